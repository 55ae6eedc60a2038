"""The newest decided generation: for joiners, and for stragglers whose own generations are deleted."""

from __future__ import annotations

from lightning_ntp.membership.store import JobStore

_KEY = "latest"


def latest_generation(store: JobStore) -> int | None:
    """``None`` before the first view."""
    body = store.get(_KEY)
    return body if isinstance(body, int) else None


def advance_latest(store: JobStore, generation: int) -> None:
    """Say that ``generation`` is decided. Never goes back, whoever is late."""
    while True:
        known = latest_generation(store)
        if known is not None and known >= generation:
            return
        if store.replace(_KEY, known, generation):
            return
