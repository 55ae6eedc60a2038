"""Buckets of the gradient sync: which parameters travel together.

Cut by *dense* sizes, so that the buckets are the same on all members at every degree, in reverse order of the
parameters (gradients of the last layers are ready first). Replicated parameters have buckets of their own: at equal
degrees these need the same length and offset on all slots, since a ring sums in another order at another offset and
the copies would differ in the last bit.

Pure: no torch, no processes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

from lightning_ntp.layout.shard import ParameterLayout, Replicated


class BucketKind(Enum):
    """What the parameters of a bucket have in common."""

    SHARDED = "sharded"
    REPLICATED = "replicated"  # every slot has the whole gradient
    PARTIAL = "partial"  # replicated, and the slots' gradients are parts of the sum


@dataclass(frozen=True)
class ParameterSize:
    """What the cut needs to know of one parameter: its layout, dense bytes, and what must not be mixed (dtype)."""

    layout: ParameterLayout
    dense_bytes: int
    key: Hashable

    @property
    def kind(self) -> BucketKind:
        if not isinstance(self.layout, Replicated):
            return BucketKind.SHARDED
        return BucketKind.PARTIAL if self.layout.partial_grad else BucketKind.REPLICATED


@dataclass(frozen=True)
class BucketCut:
    """Indices of the parameters of one bucket, in the order in which they lie in it."""

    kind: BucketKind
    key: Hashable
    params: tuple[int, ...]


def cut_buckets(params: Sequence[ParameterSize], cap_bytes: int) -> tuple[BucketCut, ...]:
    """Cut parameters into buckets of at most ``cap_bytes`` (a larger parameter has one of its own).

    Returns:
        Buckets in launch order: that of their last parameter to get its gradient.
    """
    open_buckets: dict[tuple[BucketKind, Hashable], list[int]] = {}
    filled: dict[tuple[BucketKind, Hashable], int] = {}
    closed: list[BucketCut] = []
    for index in reversed(range(len(params))):
        param = params[index]
        group = (param.kind, param.key)
        if group in open_buckets and filled[group] + param.dense_bytes > cap_bytes:
            closed.append(BucketCut(*group, tuple(open_buckets.pop(group))))
        open_buckets.setdefault(group, []).append(index)
        filled[group] = (filled[group] if len(open_buckets[group]) > 1 else 0) + param.dense_bytes
    closed += [BucketCut(*group, tuple(members)) for group, members in open_buckets.items()]
    return tuple(sorted(closed, key=lambda bucket: bucket.params[-1], reverse=True))
