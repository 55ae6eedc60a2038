"""What a job is: which seats it has, what limits hold, and whether processes come back.

Who starts the members does not read the script, so it does not know. The members write it, and the first one that does
decides it for all. A job whose members write nothing is not fault tolerant: one failed member ends it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from lightning_ntp.config import Timeouts
from lightning_ntp.errors import ConfigError, MembershipError
from lightning_ntp.membership.parse import Fields, parse_seat
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.topology import Seat, Topology

_KEY = "founding"
_MODES = ("never", "once", "always")


@dataclass(frozen=True, kw_only=True)
class Respawn:
    """Whether a process is started again at the seat of one that has died; it then joins like any other.

    Attributes:
        mode: ``"never"``, ``"once"`` at each seat, or ``"always"``.
        first_delay_s: Time in seconds from a death to the next start. It doubles from death to death.
        longest_delay_s: The most that it may become.
        steady_s: After a life of so many seconds the delay begins anew.
        tries_per_hour: At each seat; what dies more often stays dead.

    Raises:
        ConfigError: names the value that cannot work.
    """

    mode: Literal["never", "once", "always"] = "never"
    first_delay_s: float = 1.0
    longest_delay_s: float = 60.0
    steady_s: float = 300.0
    tries_per_hour: int = 10

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ConfigError(f"respawn={self.mode!r}: choose one of {', '.join(map(repr, _MODES))}")
        for name in ("first_delay_s", "longest_delay_s", "steady_s", "tries_per_hour"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"respawn: {name}={getattr(self, name)} must be 0 or more")


@dataclass(frozen=True)
class Founding:
    """A fault-tolerant job, as its first members declare it.

    Attributes:
        topology: Seats and slots at the start; the rank of a process is its place in ``topology.members``.
        timeouts: All time limits.
        respawn: Whether processes come back by themselves.

    Raises:
        MembershipError: if a seat is named twice.
    """

    topology: Topology
    timeouts: Timeouts = field(default_factory=Timeouts)
    respawn: Respawn = field(default_factory=Respawn)

    def __post_init__(self) -> None:
        View.founding(self.topology)

    @property
    def members(self) -> tuple[Seat, ...]:
        """Seats by the rank at the start."""
        return self.topology.members

    @property
    def view(self) -> View:
        """The view before the first, for every process but joiners."""
        return View.founding(self.topology)

    def declare(self, store: JobStore) -> Founding:
        """Say what the job is. For every member of the start, before its membership starts, and for a launcher that
        knows.

        Returns:
            The same.

        Raises:
            MembershipError: if another member has declared something else.
        """
        mine, theirs = self.to_json(), self.from_json(store.decide(_KEY, self.to_json())).to_json()
        if theirs != mine:
            differing = [key for key in mine if mine[key] != theirs[key]]
            shown = "; ".join(f"{key}={mine[key]} here, {theirs[key]} there" for key in differing)
            raise MembershipError(
                f"the members of this job were given different arguments: {shown}: start all of them with the same"
            )
        return self

    @classmethod
    def read(cls, store: JobStore) -> Founding | None:
        """What was declared; ``None`` as long as nothing was.

        Raises:
            MembershipError: if what was declared cannot be understood.
        """
        body = store.get(_KEY) if store.has([_KEY]) else None
        return None if body is None else cls.from_json(body)

    def to_json(self) -> dict[str, Any]:
        """Plain data; :meth:`from_json` reads it."""
        return {
            "fault_tolerance": True,
            "nominal_degree": self.topology.nominal_degree,
            "seats": [[str(seat) for seat in replica] for replica in self.topology.seats],
            "timeouts": asdict(self.timeouts),
            "respawn": asdict(self.respawn),
        }

    @classmethod
    def from_json(cls, data: Any) -> Founding:
        """Read :meth:`to_json`.

        Raises:
            MembershipError: if anything is missing, unknown, of another type or out of range.
        """
        body = Fields("founding", data)
        replicas = body.take("seats", list)
        if body.take("fault_tolerance", bool) is not True or not all(isinstance(names, list) for names in replicas):
            raise MembershipError("founding: seats must be a list of lists, and fault_tolerance true")
        seats = tuple(tuple(parse_seat(name) for name in names) for names in replicas)
        try:
            founding = cls(
                Topology(body.number("nominal_degree", at_least=1), seats),
                Timeouts(**_numbers(Timeouts, body.take("timeouts", dict))),
                Respawn(**_numbers(Respawn, body.take("respawn", dict), text=("mode",))),
            )
        except ConfigError as error:
            raise MembershipError(f"founding: {error}") from None
        body.finish()
        return founding


def next_incarnation(store: JobStore, seat: Seat) -> int:
    """Number of the next process at a seat, for whoever starts it: nobody else gets the same. The first one has 0."""
    return store.count(f"lives/{seat}")


def _numbers(kind: type, data: Any, text: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass; all are numbers but those in ``text``."""
    body = Fields(kind.__name__.lower(), data)
    values = {
        entry.name: body.take(entry.name, str if entry.name in text else (int, float)) for entry in fields(kind)
    }
    body.finish()
    return values
