"""How the samples of a global batch are shared out among replicas of unequal degree.

A replica at degree 3 of 4 computes slower, so it takes fewer samples. Two ways to do it:

*constant*  The global batch keeps its size; what the reduced replica leaves, the others take.
*shrink*    Every replica takes what its degree can carry in the nominal time; the global batch gets smaller, and the
            deferred samples come later in the epoch.

    >>> shares_by_degree(8, (4, 3), 4, "constant")
    (9, 7)
    >>> shares_by_degree(8, (4, 3), 4, "shrink")
    (8, 6)

This module is pure: no torch, no processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        degrees: Degree of every replica.
        nominal_degree: Degree of a replica without failures.
        mode: ``"constant"`` deals ``per_replica * len(degrees)`` samples in proportion to the degrees; ``"shrink"``
            gives each replica ``per_replica * degree / nominal_degree``, rounded down, at least 1.

    Returns:
        One share a replica, in samples of a full global batch. At constant size a very thin replica may get 0.

    Raises:
        ConfigError: for a degree outside 1..nominal_degree, a ``per_replica`` below 1, or an unknown mode.
    """
    _check_mode(mode)
    if per_replica < 1:
        raise ConfigError(f"per_replica={per_replica}: a replica's nominal batch needs at least 1 sample")
    for replica, degree in enumerate(degrees):
        if not 1 <= degree <= nominal_degree:
            raise ConfigError(
                f"degrees={tuple(degrees)}: the degree {degree} of replica {replica} is outside 1..{nominal_degree}, "
                f"where {nominal_degree} is the nominal tensor-parallel degree"
            )
    if mode == "constant":
        return deal(per_replica * len(degrees), degrees)
    return tuple(max(1, per_replica * degree // nominal_degree) for degree in degrees)


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
    """The shares as ints.

    Raises:
        ConfigError: if one is no whole number of at least 0 (a NaN, a fraction, a negative), or if together they are
            fewer samples than replicas.
    """
    given = tuple(shares)
    for replica, share in enumerate(given):
        if isinstance(share, bool) or not isinstance(share, Integral) or share < 0:
            raise ConfigError(
                f"shares={given}: the share {share!r} of replica {replica} is not a whole number of samples; give ints "
                "of at least 0"
            )
    counts = tuple(int(share) for share in given)
    if sum(counts) < max(1, len(counts)):
        raise ConfigError(
            f"shares={counts} are {sum(counts)} samples for {len(counts)} replicas, a nominal batch smaller than the "
            "replicas: raise the DataLoader's batch_size or use fewer replicas"
        )
    return counts


def _check_mode(mode: str) -> None:
    if mode not in get_args(ShareMode):
        raise ConfigError(f"mode={mode!r} is not a way to size the global batch: use one of {get_args(ShareMode)}")
