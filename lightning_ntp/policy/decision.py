"""From the degrees of a view to what each replica does: shares, boosts, passes, and who is too thin to stay.

*Size of the global batch.* ``"auto"`` compares keeping the global batch with letting it shrink: it keeps it where a
sample then costs at most 2 % more, as a constant batch changes nothing for the user; else it shrinks.

*Thin replicas.* The degree of the gradient sync is the lowest of all replicas, so each member of a thin replica has
more of the sum to carry, and all wait for it. A replica whose samples are not worth that retires until members come
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from lightning_ntp.errors import ConfigError
from lightning_ntp.policy.boost import EXPONENT, Boost, boost_for
from lightning_ntp.policy.memory import Memory
from lightning_ntp.policy.pace import Pace, pace_of, speeds_by_degree
from lightning_ntp.policy.shares import ShareMode

Sizing = Literal["constant", "shrink", "auto"]
WORTH_A_CONSTANT_BATCH = Fraction(2, 100)
"""How much more a sample may cost where ``"auto"`` keeps the global batch."""


@dataclass(frozen=True)
class Situation:
    """What a decision is made from; equal on all members.

    Attributes:
        degrees: Of all founding replicas; 0 for one without live members.
        nominal_degree: Of a replica without failures.
        per_replica: Samples of a replica at nominal degree in one step.
        micro_batch: Samples of one pass at nominal degree.
        global_batch: What the user wants.
        speeds: Measured; by the degrees if not given.
        headroom: For each replica the most power its boards and energy domain allow, as a ratio; no boosts if empty.
        exponent: Of speed over power.
        sync: Part of a nominal step that is gradient sync and not hidden behind the backward.
        lowest_degree: Replicas below it retire.
        memory: Of a member; not guarded if not given.
    """

    degrees: tuple[int, ...]
    nominal_degree: int
    per_replica: int
    micro_batch: int = 1
    global_batch: Sizing = "auto"
    speeds: tuple[Fraction, ...] = ()
    headroom: tuple[float, ...] = ()
    exponent: float = EXPONENT
    sync: Fraction = Fraction(0)
    lowest_degree: int = 1
    memory: Memory | None = None

    def __post_init__(self) -> None:
        if not any(self.degrees) or max(self.degrees) > self.nominal_degree or min(self.degrees) < 0:
            raise ConfigError(
                f"degrees={self.degrees} must be between 0 and nominal_degree={self.nominal_degree}, one above 0"
            )
        for name in ("speeds", "headroom"):
            if getattr(self, name) and len(getattr(self, name)) != len(self.degrees):
                raise ConfigError(f"{name}={getattr(self, name)}: give one for each of {len(self.degrees)} replicas")


@dataclass(frozen=True)
class Decision:
    """What the replicas do until the next one.

    Attributes:
        degrees: As they will be: 0 for a replica that retires.
        shares: Samples of a global batch, for each replica.
        boosts: Power of each replica's members.
        micro_batches: Samples of one pass, for each replica.
        retirements: Numbers of the replicas that leave.
        mode: How the global batch is sized.
        time: Predicted, in nominal steps.
        cost: How much longer a sample takes than undisturbed.
        compared: The paces that were looked at, for the log.
        reasons: In words.
    """

    degrees: tuple[int, ...]
    shares: tuple[int, ...]
    boosts: tuple[Boost, ...]
    micro_batches: tuple[int, ...]
    retirements: tuple[int, ...]
    mode: ShareMode
    time: Fraction
    cost: Fraction
    compared: tuple[Pace, ...] = ()
    reasons: tuple[str, ...] = ()


def decide(situation: Situation) -> Decision:
    """The decision for a situation.

    Raises:
        ConfigError: if no replica has memory for a single sample.
    """
    reasons: list[str] = []
    staying = _staying(situation, reasons)
    if not any(staying):
        raise ConfigError(f"degrees={situation.degrees}: no replica has the members and the memory to stay")
    best = _at(situation, staying)
    while len([degree for degree in staying if degree]) > 1:
        thinnest = min((i for i, degree in enumerate(staying) if degree), key=lambda i: (staying[i], -i))
        fewer = tuple(0 if i == thinnest else degree for i, degree in enumerate(staying))
        other = _at(situation, fewer)
        if _price(situation, staying, other=best) <= _price(situation, fewer, other=other):
            break
        reasons.append(
            f"replica {thinnest} at degree {staying[thinnest]} retires: with it the sync runs at that degree, and a "
            "sample takes longer than without it"
        )
        staying, best = fewer, other
    gone = tuple(i for i, degree in enumerate(situation.degrees) if degree and not staying[i])
    return replace(best, retirements=gone, reasons=(*reasons, *best.reasons))


def _staying(situation: Situation, reasons: list[str]) -> tuple[int, ...]:
    """Degrees of the replicas that have members and memory enough; if all are below the lowest, they stay."""
    lowest = situation.lowest_degree if max(situation.degrees) >= situation.lowest_degree else 1
    staying = []
    for replica, degree in enumerate(situation.degrees):
        if 0 < degree < lowest:
            reasons.append(f"replica {replica} at degree {degree} retires: it is below {lowest}, the lowest degree")
            degree = 0
        elif degree and not _passes(situation, degree):
            reasons.append(f"replica {replica} at degree {degree} retires: it has no memory for a single sample")
            degree = 0
        staying.append(degree)
    return tuple(staying)


def _passes(situation: Situation, degree: int) -> int:
    if not degree or situation.memory is None:
        return situation.micro_batch
    return situation.memory.largest_micro_batch(degree, situation.nominal_degree, situation.micro_batch)


def _at(situation: Situation, degrees: tuple[int, ...]) -> Decision:
    """Shares and boosts at given degrees."""
    base = situation.speeds or speeds_by_degree(degrees, situation.nominal_degree)
    boosts = tuple(_boost(situation, replica, degree) for replica, degree in enumerate(degrees))
    speeds = tuple(
        min(speed * Fraction(boost.speed).limit_denominator(1000), max(speed, Fraction(1))) if degree else Fraction(0)
        for speed, boost, degree in zip(base, boosts, degrees, strict=True)
    )
    pace, compared, reason = _choose(situation, speeds)
    passes = tuple(_passes(situation, degree) for degree in degrees)
    return Decision(degrees, pace.shares, boosts, passes, (), pace.mode, pace.time, pace.cost, compared, reason)


def _boost(situation: Situation, replica: int, degree: int) -> Boost:
    if not situation.headroom or not 0 < degree < situation.nominal_degree:
        return Boost()
    return boost_for(degree, situation.nominal_degree, situation.headroom[replica], situation.exponent)


def _choose(situation: Situation, speeds: Sequence[Fraction]) -> tuple[Pace, tuple[Pace, ...], tuple[str, ...]]:
    wanted = situation.global_batch
    if wanted != "auto":
        pace = pace_of(wanted, situation.per_replica, speeds)
        return pace, (pace,), ()
    constant = pace_of("constant", situation.per_replica, speeds)
    shrink = pace_of("shrink", situation.per_replica, speeds)
    chosen = constant if constant.cost <= shrink.cost + WORTH_A_CONSTANT_BATCH else shrink
    return chosen, (constant, shrink), (f"auto takes {chosen.mode} ({constant}; {shrink})",)


def _price(situation: Situation, degrees: Sequence[int], *, other: Decision) -> Fraction:
    """Time of a sample over all that a step is, in nominal steps: compute, and the sync at the lowest degree."""
    lowest = min(degree for degree in degrees if degree)
    sync = situation.sync * Fraction(situation.nominal_degree, lowest)
    return ((1 - situation.sync) * other.time + sync) / sum(other.shares)
