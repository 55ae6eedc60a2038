"""Reading messages of others: every field is checked, and what is unknown is refused."""

from __future__ import annotations

import re
from typing import Any

from lightning_ntp.errors import MembershipError
from lightning_ntp.topology import Seat

_SEAT = re.compile(r"r(0|[1-9][0-9]{0,5})\.s(0|[1-9][0-9]{0,5})")
_LARGEST = 2**53


def parse_seat(name: Any) -> Seat:
    """The seat of a name such as ``r1.s3``.

    Raises:
        MembershipError: if it is no such name.
    """
    match = _SEAT.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise MembershipError(f"{str(name)[:40]!r} is not the name of a seat, such as r1.s3")
    return Seat(int(match[1]), int(match[2]))


class Fields:
    """Takes the fields out of one JSON object.

    Args:
        kind: What the object is, for the messages.
        data: The object.

    Raises:
        MembershipError: from every method, if the object is not what it should be.
    """

    def __init__(self, kind: str, data: Any) -> None:
        if not isinstance(data, dict):
            raise MembershipError(f"{kind}: an object was expected, not {type(data).__name__}")
        self._kind, self._rest = kind, dict(data)

    def take(self, name: str, expected: type | tuple[type, ...], optional: bool = False) -> Any:
        """A field of the given type (a bool is no int); ``None`` too, if optional."""
        if name not in self._rest:
            raise MembershipError(f"{self._kind}: the field {name!r} is missing")
        value = self._rest.pop(name)
        if value is None and optional:
            return None
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise MembershipError(f"{self._kind}: {name}={str(value)[:40]!r} has the wrong type")
        return value

    def number(self, name: str, at_least: int) -> int:
        value = self.take(name, int)
        if not at_least <= value <= _LARGEST:
            raise MembershipError(f"{self._kind}: {name}={value} must be at least {at_least}")
        return value

    def seats(self, name: str, expected: type) -> dict[Seat, Any]:
        """An object whose keys are seats."""
        values = {parse_seat(key): value for key, value in self.take(name, dict).items()}
        for value in values.values():
            if not isinstance(value, expected) or (expected is int and (isinstance(value, bool) or value < 0)):
                raise MembershipError(f"{self._kind}: {name} holds {str(value)[:40]!r}")
        return values

    def finish(self) -> None:
        """Refuse what has not been taken."""
        if self._rest:
            raise MembershipError(f"{self._kind}: unknown fields {sorted(self._rest)[:5]}")
