"""Keeping the store small: what old generations wrote is deleted, so that the number of keys does not grow."""

from __future__ import annotations

import re

from lightning_ntp.comm.abortable import GROUP_KEYS
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View

_BY_GENERATION = re.compile(rf"(?:join|view|say|{re.escape(GROUP_KEYS)})/(-?[0-9]+)(?:/|$)")
_BY_POSITION = re.compile(r"ev/([0-9]+)$")


def clean(store: JobStore, view: View) -> int:
    """Delete what nobody can need any more once ``view`` is decided.

    Whoever is in it has adopted the view before it, so generations before that one are nobody's, and events that the
    view before it knew of are read by all. The last two generations stay: somebody may be reading them.

    Returns:
        How many keys were deleted.
    """
    oldest = view.generation - 1
    body = store.get(f"view/{oldest}") if oldest >= 0 else None
    read_by_all = View.from_json(body).events if body is not None else 0

    def is_old(key: str) -> bool:
        if match := _BY_GENERATION.match(key):
            return int(match[1]) < oldest
        match = _BY_POSITION.match(key)
        return match is not None and int(match[1]) < read_by_all

    return store.delete_where(is_old)
