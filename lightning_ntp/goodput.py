"""The ledger of a run's time: every second belongs to exactly one bucket.

========================  ===============================================================================
bucket                    what is in it
========================  ===============================================================================
``productive``            committed steps, at full capacity
``initialization``        until the first step of a process's run
``data_loading``          waiting for batches
``checkpoint_save``       saving
``checkpoint_restore``    loading
``detection``             from a death until the survivors have left their collectives
``reconfiguration``       from then until all are ready to step: agreement, channels, moves
``wasted_progress``       work that was done again: passes of a step that was not committed, steps since a checkpoint
``reduced_capacity``      the part of a committed step in which lost members would have helped
``other``                 validation, callbacks, whatever else happens between the steps
========================  ===============================================================================

Goodput is what is productive, over all. The names follow the field's: ``goodput``, ``badput/<source>``,
``samples_goodput``, ``disruptions``, ``time_to_recover``. Pure: no torch, no clock of its own.

    >>> ledger = Ledger(now=0.0)
    >>> ledger.enter("productive", 2.0)
    >>> ledger.enter("other", 5.0)
    >>> ledger.seconds["initialization"], ledger.seconds["productive"]
    (2.0, 3.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightning_ntp.errors import ConfigError

Bucket = Literal[
    "productive",
    "initialization",
    "data_loading",
    "checkpoint_save",
    "checkpoint_restore",
    "detection",
    "reconfiguration",
    "wasted_progress",
    "reduced_capacity",
    "other",
]
BUCKETS: tuple[str, ...] = get_args(Bucket)
BADPUT = tuple(bucket for bucket in BUCKETS if bucket not in ("productive", "other"))


@dataclass
class Tally:
    """What a run, or a part of it, comes to; tallies add up.

    Attributes:
        seconds: By bucket.
        samples: In committed steps that still count.
        steps: Committed steps that still count.
        disruptions: Failures that have ended a generation.
        recovery_s: Time from each failure to the next step, in all.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    samples: int = 0
    steps: int = 0
    disruptions: int = 0
    recovery_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """All time."""
        return sum(self.seconds.values())

    def add(self, other: Tally) -> None:
        """Add another part of the run."""
        for bucket, seconds in other.seconds.items():
            self.seconds[bucket] += seconds
        self.samples += other.samples
        self.steps += other.steps
        self.disruptions += other.disruptions
        self.recovery_s += other.recovery_s

    def metrics(self) -> dict[str, float]:
        """What loggers get: fractions of the wall time, samples a second, seconds. Empty before any time has passed."""
        wall_s = self.wall_s
        if not wall_s:
            return {}
        found = {"goodput": self.seconds["productive"] / wall_s}
        found |= {f"badput/{bucket}": self.seconds[bucket] / wall_s for bucket in BADPUT}
        found |= {"samples_goodput": self.samples / wall_s, "disruptions": float(self.disruptions)}
        if self.disruptions:
            found["time_to_recover"] = self.recovery_s / self.disruptions
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": dict(self.seconds),
            "samples": self.samples,
            "steps": self.steps,
            "disruptions": self.disruptions,
            "recovery_s": self.recovery_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tally:
        """Read :meth:`to_json`; of another version what it has in common with this one.

        Raises:
            ConfigError: if it is no tally.
        """
        try:
            tally = cls(
                samples=int(data["samples"]),
                steps=int(data["steps"]),
                disruptions=int(data["disruptions"]),
                recovery_s=float(data["recovery_s"]),
            )
            for bucket, seconds in data["seconds"].items():
                tally.seconds[bucket if bucket in BUCKETS else "other"] += float(seconds)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{data!r:.200} is no tally of a run's time: {error!r}") from None
        return tally


class Ledger:
    """Books one process's time, on a clock that the caller reads.

    At any time it is in one bucket; entering the next one books the time since. A step is booked when it is known what
    became of it: committed, it is productive but for the part that missing capacity cost; else it is wasted.

    Args:
        now: Seconds on any clock that does not go back.
        before: What the run had come to when this process began, such as from a checkpoint.

    Attributes:
        tally: Of all that is booked.
    """

    def __init__(self, now: float, before: Tally | None = None) -> None:
        self.tally = before or Tally()
        self._bucket, self._since = "initialization", now
        self._step: float | None = None  # seconds of the step under way, so far
        self._failed_at: float | None = None

    @property
    def seconds(self) -> dict[str, float]:
        return self.tally.seconds

    @property
    def bucket(self) -> str:
        """Where time goes now."""
        return self._bucket

    def enter(self, bucket: Bucket, now: float) -> None:
        """From now on time goes to ``bucket``.

        Raises:
            ConfigError: for an unknown bucket, or a clock that goes back.
        """
        if bucket not in BUCKETS:
            raise ConfigError(f"bucket={bucket!r}: choose one of {', '.join(BUCKETS)}")
        if now < self._since:
            raise ConfigError(f"now={now} is before {self._since}: give times of one clock that does not go back")
        spent = now - self._since
        if self._bucket == "productive" and self._step is not None:
            self._step += spent
        else:
            self.tally.seconds[self._bucket] += spent
        self._bucket, self._since = bucket, now

    # Steps

    def begin_step(self, now: float) -> None:
        """A step begins; one that was under way was not committed."""
        self.lose_step(now)
        self.enter("productive", now)
        self._step = 0.0
        if self._failed_at is not None:
            self.tally.recovery_s += now - self._failed_at
            self._failed_at = None

    def commit_step(self, now: float, samples: int, capacity: float = 1.0) -> None:
        """The step under way is committed.

        Args:
            now: The time.
            samples: Of its global batch.
            capacity: Live members over the members of all founding replicas; what is missing cost that part of it.

        Raises:
            ConfigError: if no step is under way, or for a capacity outside (0, 1].
        """
        if self._step is None or not 0 < capacity <= 1:
            raise ConfigError(f"capacity={capacity}: commit a step that has begun, with a capacity in (0, 1]")
        self.enter("other", now)
        spent, self._step = self._step, None
        self.tally.seconds["productive"] += spent * capacity
        self.tally.seconds["reduced_capacity"] += spent * (1 - capacity)
        self.tally.samples += samples
        self.tally.steps += 1

    def lose_step(self, now: float) -> None:
        """If a step is under way, it will be run again."""
        self.enter(self._bucket, now)
        if self._step is not None:
            self.tally.seconds["wasted_progress"] += self._step
            self._step = None
            if self._bucket == "productive":
                self._bucket = "other"

    # Failures

    def fail(self, now: float, detection_s: float = 0.0) -> None:
        """A generation has ended; from now on time goes to reconfiguration.

        The step under way may still be committed, if the vote on it is passed; the next step that begins says that it
        was not.

        Args:
            now: When this member has left its collectives.
            detection_s: How long ago the member died that did it, if that is known: so much of what was booked last
                was spent on waiting for it.
        """
        self.enter(self._bucket, now)
        if self._failed_at is None:
            self.tally.disruptions += 1
            self._failed_at = now - detection_s
        if self._step is not None:
            waited = min(detection_s, self._step)
            self.tally.seconds["detection"] += waited
            self._step -= waited
        self.enter("reconfiguration", now)

    def roll_back(self, steps: int, samples: int, seconds: float) -> None:
        """A restart from a checkpoint: the steps since are not worth anything any more.

        Raises:
            ConfigError: if more is taken back than was booked.
        """
        productive = self.tally.seconds["productive"]
        if steps > self.tally.steps or samples > self.tally.samples or seconds > productive:
            raise ConfigError(f"{steps} steps, {samples} samples, {seconds} s are more than was booked: {self.tally}")
        self.tally.steps -= steps
        self.tally.samples -= samples
        self.tally.seconds["productive"] -= seconds
        self.tally.seconds["wasted_progress"] += seconds
