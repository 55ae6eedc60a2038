"""How the samples of a global batch are shared out among replicas of unequal degree.

A replica at degree 3 of 4 computes slower, so it takes fewer samples. Two ways to do it:

*constant*  The global batch keeps its size; what the reduced replica leaves, the others take.
*shrink*    Every replica takes what its degree can carry in the nominal time; the global batch gets smaller, and the
            deferred samples come later in the epoch.

    >>> shares_by_degree(8, (4, 3), 4, "constant")
    (9, 7)
    >>> shares_by_degree(8, (4, 3), 4, "shrink")
    (8, 6)

A replica without a live member (degree 0) takes nothing:

    >>> shares_by_degree(8, (4, 0, 3), 4, "constant")
    (14, 0, 10)

"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm
from numbers import Integral
from typing import Any, Literal, get_args

from lightning_ntp.errors import ConfigError

ShareMode = Literal["constant", "shrink"]


def deal(n: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Deal ``n`` samples in proportion to ``weights`` by largest remainder; ties go to the lowest index.

    The arithmetic is in whole numbers, so every process comes to the same result.

    Raises:
        ConfigError: if ``n`` or a weight is negative, or all weights are zero.
    """
    total = sum(weights)
    if n < 0 or total < 1 or min(weights) < 0:
        raise ConfigError(
            f"cannot deal n={n} samples by weights={tuple(weights)}: n and the weights must be at least 0 and one "
            "weight above 0"
        )
    parts = [n * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(n * weights[i] % total), i))
    for i in by_remainder[: n - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def shares_by_degree(per_replica: int, degrees: Sequence[int], nominal_degree: int, mode: ShareMode) -> tuple[int, ...]:
    """The shares that fit the replicas' degrees.

    Args:
        per_replica: Samples that a replica at nominal degree takes in one optimizer step.
        degrees: Degree of every replica; 0 for one without a live member.
        nominal_degree: Degree of a replica without failures.
        mode: ``"constant"`` deals ``per_replica * len(degrees)`` samples in proportion to the degrees; ``"shrink"``
            gives each live replica ``per_replica * degree / nominal_degree``, rounded down, at least 1.

    Returns:
        One share a replica, in samples of a full global batch; 0 at degree 0. At constant size a very thin replica may
        get 0 too.

    Raises:
        ConfigError: for a degree outside 0..nominal_degree, no live replica, a ``per_replica`` below 1, or an unknown
            mode.
    """
    _check_mode(mode)
    if per_replica < 1:
        raise ConfigError(f"per_replica={per_replica}: a replica's nominal batch needs at least 1 sample")
    _check_degrees("degrees", degrees, nominal_degree)
    if mode == "constant":
        return deal(per_replica * len(degrees), degrees)
    return tuple(_carried(per_replica, degree, nominal_degree) for degree in degrees)


def shares_after(
    base_shares: Sequence[int],
    base_degrees: Sequence[int],
    degrees: Sequence[int],
    mode: ShareMode,
    global_batch: int | None = None,
) -> tuple[int, ...]:
    """What shares given by hand become when degrees have changed.

    A replica's part goes with its degree: at 3 of 4 members it is three quarters of what was given.

        >>> shares_after((5, 3), (4, 4), (4, 2), "constant")
        (6, 2)
        >>> shares_after((5, 3), (4, 4), (4, 2), "shrink")
        (5, 1)

    Args:
        base_shares: The shares as they were given.
        base_degrees: Degree of every replica for which they were given; all above 0.
        degrees: Degree of every replica now; 0 for one without a live member.
        mode: ``"constant"`` deals the sum of ``base_shares`` in proportion to these parts, by largest remainder;
            ``"shrink"`` gives each replica its part, rounded down, at least 1 where a live replica's base share is not
            0. (A part is bigger than the base share where a replica has more members than when it was given.)
        global_batch: With ``"shrink"``, the most samples for all parts together; by default the sum of ``base_shares``.

    Returns:
        One share a replica: ``base_shares`` where degrees are the base's; 0 at degree 0. If only replicas with base
        share 0 are left, they take the sum of ``base_shares`` in proportion to their degrees.

    Raises:
        ConfigError: for lists of unequal length, no live replica, a negative degree, base shares without a sample, or
            an unknown mode.
    """
    _check_mode(mode)
    base = whole_shares(base_shares)
    _check_same_replicas(base, base_degrees, degrees)
    common = lcm(*base_degrees)
    parts = [s * now * (common // then) for s, then, now in zip(base, base_degrees, degrees, strict=True)]
    if not any(parts):
        return deal(sum(base), degrees)
    carried = tuple(_carried(s, now, then) for s, then, now in zip(base, base_degrees, degrees, strict=True))
    most = sum(base) if mode == "constant" or global_batch is None else global_batch
    return carried if mode == "shrink" and sum(carried) <= most else deal(most, parts)


def _check_same_replicas(base: tuple[int, ...], base_degrees: Sequence[int], degrees: Sequence[int]) -> None:
    if not len(base) == len(base_degrees) == len(degrees):
        raise ConfigError(
            f"base_shares={base}, base_degrees={tuple(base_degrees)} and degrees={tuple(degrees)} are not of equal "
            "length: give one number a replica in each"
        )
    if min(base_degrees) < 1:
        raise ConfigError(
            f"base_degrees={tuple(base_degrees)}: every replica had at least 1 member when its share was given"
        )
    _check_degrees("degrees", degrees)


def _carried(share: int, degree: int, full_degree: int) -> int:
    """The part of ``share`` for ``degree`` of ``full_degree`` members; at least 1 if there is a share and a member."""
    return max(share * degree // full_degree, 1 if share and degree else 0)


def check_shares(shares: Iterable[Any], global_batch: int, num_replicas: int, mode: ShareMode) -> tuple[int, ...]:
    """Check shares that a user gave by hand against the global batch.

    Returns:
        The shares as a tuple of ints.

    Raises:
        ConfigError: if a share is not a whole number of at least 0, if there is not one share a replica, if the sum is
            not ``global_batch`` (constant) or above it (shrink), or if the global batch is smaller than the replicas.
    """
    _check_mode(mode)
    counts = whole_shares(shares)
    if len(counts) != num_replicas:
        raise ConfigError(
            f"shares={counts} has {len(counts)} entries for {num_replicas} replicas: give one share a replica"
        )
    if global_batch < num_replicas:
        raise ConfigError(
            f"a global batch of {global_batch} samples is smaller than the {num_replicas} replicas: raise the "
            "DataLoader's batch_size or use fewer replicas"
        )
    total = sum(counts)
    if total < num_replicas:
        raise ConfigError(
            f"shares={counts} are {total} samples for {num_replicas} replicas, a nominal batch smaller than the "
            "replicas: raise the DataLoader's batch_size or use fewer replicas"
        )
    if mode == "constant" and total != global_batch:
        raise ConfigError(
            f"shares={counts} add up to {total}, but the global batch has {global_batch} samples "
            "(DataLoader batch_size x replicas x accumulate_grad_batches): make the sums equal, or set "
            'global_batch="shrink"'
        )
    if total > global_batch:
        raise ConfigError(
            f"shares={counts} add up to {total}, more than the {global_batch} samples of the global batch: with "
            'global_batch="shrink" the sum may only be smaller'
        )
    return counts


def whole_shares(shares: Iterable[Any]) -> tuple[int, ...]:
    """The shares as ints; 0 for a replica that takes no sample.

    Raises:
        ConfigError: if one is no whole number of at least 0 (a NaN, a fraction, a negative), or if none is above 0.
    """
    given = tuple(shares)
    for replica, share in enumerate(given):
        if isinstance(share, bool) or not isinstance(share, Integral) or share < 0:
            raise ConfigError(
                f"shares={given}: the share {share!r} of replica {replica} is not a whole number of samples; give ints "
                "of at least 0"
            )
    counts = tuple(int(share) for share in given)
    if not any(counts):
        raise ConfigError(f"shares={counts} give no replica a sample: at least one share must be above 0")
    return counts


def _check_degrees(name: str, degrees: Sequence[int], nominal_degree: int | None = None) -> None:
    for replica, degree in enumerate(degrees):
        if degree < 0 or (nominal_degree is not None and degree > nominal_degree):
            bounds = "negative" if nominal_degree is None else f"outside 0..{nominal_degree}, up to the nominal degree"
            raise ConfigError(
                f"{name}={tuple(degrees)}: the degree {degree} of replica {replica} is {bounds}; give its number of "
                "live members, 0 for none"
            )
    if not any(degrees):
        raise ConfigError(f"{name}={tuple(degrees)}: no replica has a live member, so nobody takes a sample")


def _check_mode(mode: str) -> None:
    if mode not in get_args(ShareMode):
        raise ConfigError(f"mode={mode!r} is not a way to size the global batch: use one of {get_args(ShareMode)}")
