"""Leaving collectives that will never end because a peer is gone.

A death is seen only by those who talk directly to the dead member; all others wait until the group timeout. So every
survivor breaks its own groups, from whichever thread learns of the death first:

*gloo* has no abort: ``abort()``, ``shutdown()`` and ``destroy_process_group()`` leave a blocked member blocked. But a
receive that times out closes every connection of its group. :func:`poison` posts one; the operation in flight then
raises, here and on the peers. It needs connections that exist (not ``TORCH_GLOO_LAZY_INIT=1``). This is behaviour, not
an interface, so :func:`poison_works` tries it at start; where it fails, the group timeout remains.

*NCCL* communicators are aborted, every one of them: an abort does not reach the children that were split off. Written
from torch's and NCCL's sources; it has not been run, for want of GPUs with peers that die.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_ntp.compat import torch as compat
from lightning_ntp.config import Timeouts
from lightning_ntp.errors import GenerationOver

log = logging.getLogger(__name__)

_POISON_TAG = 0x7FFF


class Abort:
    """The way out of one generation: a failure flag, and the groups that are broken when it is set.

    Any thread may set it; it is set once and never cleared, as a new generation gets a new one.

    Attributes:
        generation: The generation that it ends.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._reason: str | None = None
        self._groups: list[dist.ProcessGroup] = []
        self._actions: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._event = threading.Event()

    @property
    def reason(self) -> str | None:
        """Why the generation ended, or ``None`` while it goes on."""
        return self._reason

    @property
    def is_set(self) -> bool:
        return self._reason is not None

    def set(self, reason: str) -> bool:
        """End the generation: break all groups, in this thread. Returns whether it was the first call."""
        with self._lock:
            if self._reason is not None:
                return False
            self._reason = reason
            self._event.set()
            for action in (lambda: break_groups(self._groups), *self._actions):
                _attempt(action)
            return True

    def guard(self, process_group: dist.ProcessGroup) -> None:
        """Break a group when the flag is set; at once, if it is already."""
        with self._lock:
            self._groups.append(process_group)
            if self.is_set:
                _attempt(lambda: break_groups([process_group]))

    def add(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the flag is set; at once, if it is already."""
        with self._lock:
            self._actions.append(action)
            if self.is_set:
                _attempt(action)

    @contextmanager
    def disarmed(self) -> Iterator[None]:
        """Inside, nothing is broken: it is being destroyed. Afterwards nothing is guarded."""
        with self._lock:
            yield
            self._groups.clear()
            self._actions.clear()

    def check(self) -> None:
        """Raise if the generation is over.

        Raises:
            GenerationOver: with the reason.
        """
        if self._reason is not None:
            raise GenerationOver(f"generation {self.generation} is over: {self._reason}")

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set; returns whether it is."""
        return self._event.wait(timeout_s)


def _attempt(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:  # one group that cannot be broken must not keep the others alive
        log.exception("a group could not be aborted; its collectives end at the group timeout")


def break_groups(process_groups: Sequence[dist.ProcessGroup]) -> None:
    """Make all operations on some groups end, on CPU tensors and on CUDA ones. Any thread may call it."""
    if torch.cuda.is_available():
        found = [compat.device_backend(group, "cuda") for group in process_groups]
        nccl = [backend for backend in found if isinstance(backend, getattr(dist, "ProcessGroupNCCL", ()))]
        if nccl:
            compat.abort_nccl(nccl)  # not run, see the module's text
    gloo = [group for group in process_groups if compat.device_backend(group, "cpu") is not None]
    # At the same time: closing a group's connections is mostly waiting for gloo's own thread, 10 to 50 ms a group.
    threads = [threading.Thread(target=_attempt, args=(partial(poison, group),), daemon=True) for group in gloo]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def poison(group) -> None:
    """Break every connection of a gloo group, by a receive that times out. 3 to 25 ms.

    Args:
        group: A process group, or a bare gloo backend.
    """
    me, size = group.rank(), group.size()
    for step in range(1, size):
        # On a connection that is broken already the receive raises at once and closes nothing: try the next peer.
        try:
            group.recv([torch.empty(1)], (me + step) % size, _POISON_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return


def poison_works(limit_s: float = 5.0) -> bool:
    """Whether poison frees a blocked collective with this torch: tried on a group of two inside this process (20
    ms)."""
    store, groups, freed = dist.HashStore(), {}, threading.Event()

    def build(rank: int) -> None:
        groups[rank] = compat.gloo_group(store, rank, 2, timedelta(seconds=limit_s))

    def wait_for_nobody() -> None:
        try:
            groups[0].allreduce([torch.zeros(1)]).wait()
        except RuntimeError:
            freed.set()

    builders = [threading.Thread(target=build, args=(rank,), daemon=True) for rank in range(2)]
    for thread in builders:
        thread.start()
    for thread in builders:
        thread.join(limit_s)
    if len(groups) < 2:
        return False
    blocked = threading.Thread(target=wait_for_nobody, daemon=True)
    blocked.start()
    time.sleep(0.005)  # let it enter; poison before it enters works as well, but that is not what is tried
    poison(groups[0])
    works = freed.wait(limit_s / 2)
    blocked.join(limit_s)
    return works


def collective_timeout(timeouts: Timeouts) -> timedelta:
    """Time limit of collectives, after the self-test: where poison does not work, the limit is what ends them."""
    if poison_works():
        return timedelta(seconds=timeouts.collective_s)
    log.warning(
        "gloo collectives cannot be broken with torch %s: after a failure, members that do not talk to the lost one "
        "leave theirs only after hang_s=%s s",
        torch.__version__,
        timeouts.hang_s,
    )
    return timedelta(seconds=timeouts.hang_s)
