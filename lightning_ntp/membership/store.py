"""The messages of a job on a torch store: an event log, records by key, decisions that are made once. JSON only.

``compare_set`` is the only consensus there is: the store's server has one thread, so the first writer of a key wins,
and all others get the winner's value back.

A message is ``<protocol> <signature> <JSON>``. The signature is keyed by the job's token, so a process without the
token can add nothing that members believe: malformed messages, wrong signatures, other protocol versions and oversized
messages are refused and logged, and the job goes on. What the token does not protect against: whoever reaches the store
can read everything, delete or overwrite keys (which can stop a job, as cutting a cable can), and repeat a message under
its own key. So the store binds to loopback, or to a network of its own.

A client that waits holds its connection: every thread has a :class:`JobStore` of its own (:meth:`JobStore.clone`).

==========================  ===========================================================================
key (under ``ntp/job/``)
==========================  ===========================================================================
``hello``                   protocol version, written by the store's host
``ev/{k}``                  the event log; a slot is claimed once
``join/{generation}/{seat}``  this member is out of all collectives, and where it stands
``view/{generation}``       the view, decided once
``latest``                  the newest decided generation
``say/{generation}/...``    small exchanges among the members of a view
``joiner/{seat}``           a process that wants to join
``host/{seat}/{i}``         name of the machine on which incarnation i runs
``beat/{seat}/{i}``         signs of life of incarnation i: a counter; ``progress/...``: where it is
==========================  ===========================================================================
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store

from lightning_ntp.errors import MembershipError
from lightning_ntp.membership.events import Event

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20
"""Of one message. The store has no way to ask for a size before reading, so it bounds what is parsed, not what is
sent."""

_PREFIX = "ntp/job/"


class JobStore:
    """Typed access to a job's store, for one thread.

    Args:
        connect: Makes a client of the store.
        token: The job's secret.
    """

    def __init__(self, connect: Callable[[], Store], token: str) -> None:
        self._connect, self._token = connect, token
        self.client = connect()

    def clone(self) -> JobStore:
        """The same store through a connection of its own, for another thread."""
        return JobStore(self._connect, self._token)

    def greet(self) -> None:
        """Say which protocol this job speaks. For the store's host, before members start."""
        self.client.set(_PREFIX + "hello", str(PROTOCOL_VERSION))

    def check_version(self, timeout_s: float) -> None:
        """Compare protocols with the store's host.

        Raises:
            MembershipError: with both versions, if they differ, or if the store is no job's store.
        """
        key = _PREFIX + "hello"
        try:
            self.client.wait([key], timedelta(seconds=timeout_s))
        except DistStoreError:
            raise MembershipError(f"the store names no protocol within {timeout_s} s: is it a job's store?") from None
        theirs = self.client.get(key).decode(errors="replace")[:20]
        if theirs != str(PROTOCOL_VERSION):
            raise MembershipError(
                f"this job speaks membership protocol {theirs}, this process {PROTOCOL_VERSION}: install the same "
                "version of lightning_ntp everywhere"
            )

    def put(self, key: str, body: Any) -> None:
        """Write a record. Not acknowledged: a store that is gone shows at the next read."""
        self.client.set(_PREFIX + key, self._seal(key, body))

    def get(self, key: str) -> Any | None:
        """A record, or ``None`` if there is none or it is refused (which is logged)."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[Any | None]:
        """Several records at once, as :meth:`get`."""
        if not keys:
            return []
        present = list(keys) if self.has(keys) else [key for key in keys if self.has([key])]
        if not present:
            return [None] * len(keys)
        values = self.client.multi_get([_PREFIX + key for key in present])
        found = {key: self._open(key, value) for key, value in zip(present, values, strict=True)}
        return [found.get(key) for key in keys]

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all these keys exist; one short round trip."""
        return self.client.check([_PREFIX + key for key in keys])

    def decide(self, key: str, body: Any) -> Any:
        """Write a record unless a valid one is there already; returns the one that is there then, equal for all."""
        mine, expected = self._seal(key, body), ""
        while True:
            winner = self.client.compare_set(_PREFIX + key, expected, mine).decode(errors="replace")
            if winner == mine:
                return body
            found = self._open(key, winner.encode())
            if found is not None:
                return found
            expected = winner  # nobody can have believed it: replace it, if it is still there

    def replace(self, key: str, known: Any | None, body: Any) -> bool:
        """Write ``body`` if the record is still ``known`` (``None``: there is no valid one); returns whether it was."""
        raw = self.client.get(_PREFIX + key).decode(errors="replace") if self.has([key]) else ""
        if raw and self._open(key, raw.encode()) != known:
            return False
        mine = self._seal(key, body)
        return self.client.compare_set(_PREFIX + key, raw, mine).decode(errors="replace") == mine

    def count(self, key: str, amount: int = 1) -> int:
        """Add to a counter; returns its new value, as an acknowledgement."""
        return self.client.add(_PREFIX + key, amount)

    def append(self, event: Event, start: int = 0) -> int:
        """Put an event into the log; returns its position.

        Slots are claimed with a unique payload, so there are no holes, even if the writer dies in between.

        Args:
            event: What to tell.
            start: Where to look for a free slot first: no later than the end of the log.
        """
        body = {"event": event.to_json(), "id": secrets.token_hex(8)}
        position = start
        while True:
            mine = self._seal(f"ev/{position}", body)
            if self.client.compare_set(f"{_PREFIX}ev/{position}", "", mine).decode(errors="replace") == mine:
                return position
            position += 1

    def has_event(self, position: int) -> bool:
        return self.has([f"ev/{position}"])

    def wait_event(self, position: int, timeout_s: float) -> bool:
        """Block until the log reaches ``position``; returns whether it has.

        Raises:
            RuntimeError: if the store's host is gone.
        """
        try:
            self.client.wait([f"{_PREFIX}ev/{position}"], timedelta(seconds=timeout_s))
        except DistStoreError:
            return False
        return True

    def event(self, position: int) -> Event | None:
        """The event at a position that exists; ``None`` if it is refused (which is logged)."""
        body = self.get(f"ev/{position}")
        if body is None:
            return None
        try:
            return Event.from_json(body.get("event") if isinstance(body, dict) else body)
        except MembershipError as error:
            log.warning("the store's event %d is refused: %s", position, error)
            return None

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.client.delete_key(_PREFIX + key)

    def delete_where(self, is_old: Callable[[str], bool]) -> int:
        """Delete all keys of the store (whatever their prefix) for which ``is_old`` holds; returns how many."""
        old = [key for key in self.client.list_keys() if is_old(key.removeprefix(_PREFIX))]
        for key in old:
            self.client.delete_key(key)
        return len(old)

    def _seal(self, key: str, body: Any) -> str:
        text = json.dumps(body, separators=(",", ":"), allow_nan=False)
        if len(text) > MAX_MESSAGE_BYTES:
            raise MembershipError(f"the message {key!r} has {len(text)} bytes, more than {MAX_MESSAGE_BYTES}")
        return f"{PROTOCOL_VERSION} {self._signature(key, text)} {text}"

    def _open(self, key: str, raw: bytes) -> Any | None:
        try:
            return self._verified(key, raw)
        except (MembershipError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON
            log.warning("the store's message %r is refused: %s", key, error)
            return None

    def _verified(self, key: str, raw: bytes) -> Any:
        if len(raw) > MAX_MESSAGE_BYTES + 200:
            raise MembershipError(f"it has {len(raw)} bytes, more than {MAX_MESSAGE_BYTES}")
        version, _, rest = raw.decode().partition(" ")
        signature, _, text = rest.partition(" ")
        if version != str(PROTOCOL_VERSION):
            raise MembershipError(f"it speaks protocol {version[:20]!r}, this member {PROTOCOL_VERSION}")
        if not hmac.compare_digest(signature.encode(), self._signature(key, text).encode()):
            raise MembershipError("its signature is wrong: the sender has another token, or none")
        return json.loads(text)

    def _signature(self, key: str, text: str) -> str:
        # The key is signed, too, so that a message is worth nothing in another place.
        return hmac.new(self._token.encode(), f"{key}\n{text}".encode(), hashlib.sha256).hexdigest()[:32]
