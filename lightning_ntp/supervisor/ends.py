"""How members end, and what that means for the others."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_ntp.errors import ConfigError
from lightning_ntp.supervisor.node import Node
from lightning_ntp.supervisor.sites import StoreSite


@dataclass(frozen=True)
class MemberEnd:
    """How one member ended.

    Attributes:
        rank: The member's rank.
        seat: Its seat for the reader, such as ``r1.s3``, or an empty string where seats are not known.
        exit_code: Exit code as a shell tells it: 128 + signal number for a member that a signal ended.
        killed: Whether the supervisor itself killed it.
    """

    rank: int
    seat: str
    exit_code: int
    killed: bool

    def __str__(self) -> str:
        name = f"rank {self.rank}" + (f" ({self.seat})" if self.seat else "")
        if self.killed:
            return f"{name} was killed by the supervisor"
        if self.exit_code > 128:
            with contextlib.suppress(ValueError):
                return f"{name} was ended by {signal.Signals(self.exit_code - 128).name}"
        return f"{name} exited with code {self.exit_code}"


class Job(Protocol):
    """What a policy may know and ask of the supervisor.

    Attributes:
        node: Which part of the job is started here.
        site: Where the job's store is.
        ends: Of members, in the order seen.
        stop_signal: The signal that asked the job to stop, if one did.
    """

    node: Node
    site: StoreSite
    ends: Sequence[MemberEnd]
    stop_signal: int | None

    @property
    def running(self) -> Collection[int]:
        """Ranks whose processes run here."""

    def start_member(self, rank: int) -> None: ...

    def kill_member(self, rank: int) -> bool: ...

    def kill_after(self, delay_s: float) -> None: ...

    def kill(self) -> None: ...


class EndPolicy:
    """Decides what the end of a member means.

    Attributes:
        poll_s: How often :meth:`on_poll` is called, in seconds; ``None`` for never.
    """

    poll_s: float | None = None

    def member_env(self, rank: int) -> Mapping[str, str]:
        """Variables that a member gets besides the supervisor's own."""
        return {}

    def on_start(self, supervisor: Job) -> None:
        """The store is there, no member is started yet."""

    def on_poll(self, supervisor: Job) -> None:
        """Between two looks at the members."""

    def on_end(self, supervisor: Job, end: MemberEnd) -> None:
        """React to a member's end, by calling the supervisor's methods. Its process group is gone already."""
        raise NotImplementedError

    def waits(self, supervisor: Job) -> bool:
        """Whether to go on although no member runs here."""
        return False

    def exit_code(self, supervisor: Job) -> int:
        """The supervisor's exit code, once all members have ended (``supervisor.ends``, in the order seen)."""
        raise NotImplementedError

    def note(self, supervisor: Job) -> str:
        """More to say at the end, whatever the exit code."""
        return ""

    def on_finish(self, supervisor: Job, exit_code: int | None) -> None:
        """The supervisor ends with this code, or by an error of its own (``None``)."""


@dataclass(frozen=True)
class AllOrNothing(EndPolicy):
    """One failed member ends the job; the others get a moment to say what they saw.

    Attributes:
        grace_s: Time in seconds from a failure to the kill of the rest. Few need it: the others' collectives raise as
            soon as the connection to the failed member is closed.
        stop_grace_s: The same once a signal has asked the job to stop. Longer, as members may be saving.
    """

    grace_s: float = 5.0
    stop_grace_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("grace_s", "stop_grace_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be a number of seconds, 0 or more")

    def on_end(self, supervisor: Job, end: MemberEnd) -> None:
        if end.exit_code != 0:
            supervisor.kill_after(self.stop_grace_s if supervisor.stop_signal else self.grace_s)

    def exit_code(self, supervisor: Job) -> int:
        failures = [end for end in supervisor.ends if end.exit_code != 0]
        own = next((end.exit_code for end in failures if not end.killed), 0)
        if failures and not own:  # only a second Ctrl-C kills where nobody failed: tell of the signal, not of the kill
            return 128 + (supervisor.stop_signal or signal.SIGKILL)
        return own
