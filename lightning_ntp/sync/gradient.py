"""Gradient sync: weighted gradients of unequal replicas meet in buckets, while backward still runs.

Per micro-batch a hook adds ``weight * grad`` into the parameter's bucket and clears ``.grad``. In the last backward of
a window each full bucket is summed over the replicas; when ``backward()`` returns, ``.grad`` is the synced gradient of
the whole global batch. So raw ``loss.backward()``, unequal micro-batches and unequal shares need nothing from the user.

Buckets are launched strictly in order, the same on all members. A parameter without a gradient counts as zeros; whether
it was used anywhere is known only after the vote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_ntp.comm.lane import Lane
from lightning_ntp.compat.torch import call_at_end_of_backward
from lightning_ntp.layout import BucketKind, ParameterSize, cut_buckets
from lightning_ntp.parallel.model import ParallelModel, ParallelParameter
from lightning_ntp.sync.bucket import Bucket, SyncChannels
from lightning_ntp.topology import Topology

MEBIBYTE = 2**20


def reduce_dtype_of(parameter: Tensor, requested: torch.dtype | None) -> torch.dtype:
    """In what precision a gradient is summed: as requested, by default float32 or the parameter's own if wider."""
    return requested or torch.promote_types(parameter.dtype, torch.float32)


class GradientSync:
    """The gradient sync of one member.

    Args:
        model: What this member holds.
        topology: Degrees of all replicas.
        rank: This member.
        channels: Where gradients travel.
        lane: Runs the collectives beside backward.
        bucket_cap_mb: Dense mebibytes of a bucket, in the precision of the sum.
        reduce_dtype: Precision of the sum; float32, or the parameter's own if wider, if not given.
        equal_copies: Slots of a replica compute bitwise equal gradients of replicated parameters, so each may sum its
            own copy. Otherwise one slot sums and hands out.

    Attributes:
        num_syncs: How many windows were summed: a vote is stale once this has grown.
    """

    def __init__(
        self,
        model: ParallelModel,
        topology: Topology,
        rank: int,
        channels: SyncChannels,
        lane: Lane,
        *,
        bucket_cap_mb: float = 25.0,
        reduce_dtype: torch.dtype | None = None,
        equal_copies: bool = True,
    ) -> None:
        self._lane, self._channels = lane, channels
        self._params = [param for param in model.parameters() if param.parameter.is_floating_point()]
        self._buckets = _build_buckets(
            self._params, topology, rank, channels, reduce_dtype, int(bucket_cap_mb * MEBIBYTE), equal_copies
        )
        self._place = {index: (bucket, at) for bucket in self._buckets for at, index in enumerate(bucket.indices)}
        self._used = [False] * len(self._params)
        self.num_syncs = 0
        self._carried: dict[int, Tensor] = {}
        self._summed: list[Bucket] = []  # in the sync under way
        self._asked: set[int] = set()  # set aside in the backward under way, and no gradient came yet
        self._weight, self._total, self._ends_window, self._paused = 1.0, None, True, 0
        self._start_window()
        self._start_backward()
        self._handles = [
            handle for index, param in enumerate(self._params) for handle in self._hook(index, param.parameter)
        ]

    # What the engine calls

    def begin(self, weight: float, *, sync: bool, total: Tensor | None = None) -> None:
        """Say what the next backward counts for.

        Args:
            weight: Factor of its gradients. With 0 they are dropped, not multiplied: 0 x NaN would poison the sum.
            sync: Whether it is the window's last: its end sums the window over the replicas (unless ``paused``).
            total: 0-dim tensor, this member's sum of weights of the window, if weights are counts (tokens): the sum is
                then divided by the total over the replicas. Only read at the window's last backward.
        """
        self._weight, self._ends_window, self._total = weight, sync, total
        self._start_backward()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside only collect; the next one outside sums them too."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @property
    def _syncing(self) -> bool:
        return self._ends_window and not self._paused

    def used(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Whether the gradient that each parameter holds is one: on this member, or by an earlier vote anywhere."""
        used = {id(param.parameter): flag for param, flag in zip(self._params, self._used, strict=True)}
        return [used.get(id(parameter), False) for parameter in parameters]

    def settle_used(self, parameters: Sequence[nn.Parameter], used: Sequence[bool]) -> None:
        """Take over what a vote found. It holds until the gradient is cleared: a later backward may add to it."""
        found = {id(parameter): flag for parameter, flag in zip(parameters, used, strict=True)}
        self._used = [
            found.get(id(param.parameter), flag) for param, flag in zip(self._params, self._used, strict=True)
        ]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """In launch order."""
        return self._buckets

    def remove(self) -> None:
        """Take the hooks away and end the lane."""
        for handle in self._handles:
            handle.remove()
        self._lane.close()

    # Hooks

    def _hook(self, index: int, parameter: nn.Parameter) -> tuple[RemovableHandle, RemovableHandle]:
        def set_aside(_grad: Tensor) -> None:
            if parameter.grad is not None:
                if not self._asked:
                    call_at_end_of_backward(self._put_back)
                self._asked.add(index)
                self._set_aside(index)

        def collect(_parameter: nn.Parameter) -> None:
            if parameter.grad is None:  # frozen since the forward: nothing was accumulated
                return
            grad, parameter.grad = parameter.grad, None
            self._asked.discard(index)
            with torch.no_grad():  # backward may build a graph of its own (create_graph=True)
                self._collect(index, grad.detach())

        frozen = not parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen parameter takes no hooks, and may be unfrozen later
        handles = parameter.register_hook(set_aside), parameter.register_post_accumulate_grad_hook(collect)
        parameter.requires_grad_(not frozen)
        return handles

    def _set_aside(self, index: int) -> None:
        """Save an earlier backward's synced gradient: autograd must not add to it, nor the bucket reuse its memory."""
        parameter = self._params[index].parameter
        if parameter.grad is not None:
            self._carried[index] = parameter.grad.clone()
            parameter.grad = None

    def _put_back(self) -> None:
        """Undo ``_set_aside`` where no gradient came: ``torch.autograd.grad`` passes too, and hands it on."""
        for index in self._asked:
            self._params[index].parameter.grad = self._carried.pop(index, None)
        self._asked.clear()

    def _collect(self, index: int, grad: Tensor) -> None:
        if not self._queued:
            self._queued = True
            self._expect_gradients()
            call_at_end_of_backward(self._finish if self._syncing else self._start_backward)
        bucket, at = self._place[index]
        assert bucket.number >= self._launched, f"{self._params[index].name} got a gradient after its sum was launched"
        if self._weight:
            bucket.add(at, grad, self._weight)
        self._missing[bucket.number].discard(index)
        if self._syncing:
            self._launch_ready()

    # Launching

    def _start_window(self) -> None:
        """Buckets that were not launched keep what they have collected: their parameters are frozen just now."""
        self._launched = 0
        for bucket in self._summed:
            bucket.reset()
        self._summed.clear()

    def _start_backward(self) -> None:
        self._queued = False

    def _expect_gradients(self) -> None:
        """As a backward begins, not before: what is frozen may have changed since the last one."""
        self._missing = [
            {index for index in bucket.indices if self._params[index].parameter.requires_grad}
            for bucket in self._buckets
        ]

    def _launch_ready(self) -> None:
        while self._launched < len(self._buckets) and not self._missing[self._launched]:
            self._launch(self._buckets[self._launched])

    def _launch(self, bucket: Bucket) -> None:
        if self._launched == 0 and self._total is not None:
            total = self._total
            self._lane.submit(lambda: self._channels.sum_weight(total))
        self._launched += 1
        if any(self._params[index].parameter.requires_grad for index in bucket.indices):
            for index in bucket.indices:
                self._set_aside(index)
            bucket.fill_missing()
            total = self._total
            self._lane.submit(lambda: bucket.sum_over_replicas(total))
            self._summed.append(bucket)

    def _finish(self) -> None:
        while self._launched < len(self._buckets):
            self._launch(self._buckets[self._launched])
        try:
            self._lane.drain()
            self._hand_out()
            self.num_syncs += 1
        finally:
            self._start_window()
            self._start_backward()

    def _hand_out(self) -> None:
        """To frozen parameters too: they may have been collected, or voted on, before a toggle froze them."""
        for bucket in self._summed:
            for at, index in enumerate(bucket.indices):
                parameter = self._params[index].parameter
                synced = bucket.gradient(at).to(parameter.dtype)
                carried = self._carried.pop(index, None)
                parameter.grad = synced if carried is None else carried.add_(synced)
                self._used[index] = bucket.has_gradient(at) or (carried is not None and self._used[index])


def _build_buckets(
    params: Sequence[ParallelParameter],
    topology: Topology,
    rank: int,
    channels: SyncChannels,
    reduce_dtype: torch.dtype | None,
    cap_bytes: int,
    equal_copies: bool,
) -> tuple[Bucket, ...]:
    dtypes = [reduce_dtype_of(param.parameter, reduce_dtype) for param in params]
    sizes = [
        ParameterSize(
            param.layout,
            param.dense_numel * dtype.itemsize,
            (dtype, param.parameter.device, param.parameter.requires_grad),  # frozen ones apart: they do not travel
        )
        for param, dtype in zip(params, dtypes, strict=True)
    ]
    return tuple(
        Bucket(
            number,
            cut.params,
            [params[index] for index in cut.params],
            dtypes[cut.params[0]],
            topology,
            rank,
            channels,
            one_owner=cut.kind is BucketKind.PARTIAL or not (equal_copies or cut.kind is BucketKind.SHARDED),
        )
        for number, cut in enumerate(cut_buckets(sizes, cap_bytes))
    )
