"""The process groups of one generation, built so that a death in the middle of it stops nobody.

Connecting a gloo group cannot be interrupted, and a peer that dies meanwhile holds the others for up to five times the
timeout. So it is done in a helper thread, and the caller leaves as soon as the failure flag is set; the thread ends
later by itself. Its rendezvous goes through a store whose waits end with the flag, too.

Names: keys carry the generation, so a member never reads what an earlier generation wrote; and groups are named from a
number that depends on the generation alone, so that names are unique, and equal on all members even after failures.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

from lightning_ntp.comm.abort import Abort
from lightning_ntp.compat import torch as compat
from lightning_ntp.errors import GenerationOver

GLOO = "ntp_gloo"
"""Name under which torch knows gloo groups that are built abortably."""

GROUP_KEYS = "ntp/groups"
"""Prefix of the rendezvous keys; the generation follows."""

_NAMES_PER_GENERATION = 1_000_000
_GLOO_CONNECTS_FOR = 5  # times its timeout, at most (measured)


class AbortableStore(Store):
    """A view of a store, under a prefix, whose waits end when the generation does.

    Args:
        store: A client that no other thread blocks.
        prefix: Put before every key.
        abort: Ends the waits.
        limit_s: Of a single wait.
    """

    def __init__(self, store: Store, prefix: str, abort: Abort, limit_s: float) -> None:
        super().__init__()
        self._store, self._prefix, self._abort, self._limit_s = store, prefix, abort, limit_s

    def set(self, key, value):
        self._store.set(self._prefix + key, value)

    def get(self, key):
        self.wait([key])
        return self._store.get(self._prefix + key)

    def add(self, key, amount):
        return self._store.add(self._prefix + key, amount)

    def compare_set(self, key, expected, desired):
        return self._store.compare_set(self._prefix + key, expected, desired)

    def delete_key(self, key):
        return self._store.delete_key(self._prefix + key)

    def num_keys(self):
        return self._store.num_keys()

    def check(self, keys):
        return self._store.check([self._prefix + key for key in keys])

    def set_timeout(self, timeout):
        """The limit is this store's own; torch's wish to change it is ignored."""

    @property
    def timeout(self):
        return timedelta(seconds=self._limit_s)

    def wait(self, keys, timeout=None):
        until, pause_s = time.monotonic() + self._limit_s, 0.0005
        while not self.check(keys):
            self._abort.check()
            if time.monotonic() > until:
                raise GenerationOver(
                    f"generation {self._abort.generation}: no peer wrote {keys[0]!r} within build_s={self._limit_s} s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)


class GenerationWorld:
    """The default process group of a generation, and all groups below it.

    Args:
        generation: Of the view.
        store: A client of the job's store that no other thread blocks.
        abort: The generation's failure flag; all groups are broken when it is set.
        timeout: Of every collective.
        build_s: Time limit for the construction of one group, in seconds.
    """

    def __init__(self, generation: int, store: Store, abort: Abort, *, timeout: timedelta, build_s: float) -> None:
        self.generation, self.abort, self.timeout = generation, abort, timeout
        self._build_s = build_s
        self._store = AbortableStore(store, f"{GROUP_KEYS}/{generation}/", abort, build_s)
        self._hooks = sys.excepthook, sys.excepthook

    def open(self, rank: int, size: int, device_backend: str = "") -> None:
        """Build the default group, of all members of the view.

        Args:
            rank: This member's.
            size: Members of the view.
            device_backend: Besides gloo for CPU tensors, such as ``"cuda:nccl"`` (not run).

        Raises:
            GenerationOver: if a member died meanwhile.
        """
        self.abort.check()
        compat.register_backend(GLOO, _create)
        compat.name_groups_from(self.generation * _NAMES_PER_GENERATION)
        backend = f"cpu:{GLOO},{device_backend}" if device_backend else GLOO
        before = sys.excepthook
        dist.init_process_group(
            backend, store=self._store, rank=rank, world_size=size, timeout=self.timeout, pg_options=self
        )
        self._hooks = before, sys.excepthook
        self._guard(dist.group.WORLD)

    def new_group(self, ranks: list[int], backend: str, description: str) -> dist.ProcessGroup:
        """As ``dist.new_group``; members of the default group call it in one order, only the group's own wait.

        Raises:
            GenerationOver: if a member died meanwhile.
        """
        self.abort.check()
        is_gloo = backend == "gloo"
        group = dist.new_group(
            ranks,
            timeout=self.timeout,
            backend=GLOO if is_gloo else backend,
            pg_options=self if is_gloo else None,
            group_desc=description,
        )
        if dist.get_rank() in ranks:
            self._guard(group)
        return group

    def close(self) -> None:
        """Destroy all groups, healthy or broken. Blocks only if a healthy one has an operation under way."""
        with self.abort.disarmed():
            if dist.is_initialized():
                dist.destroy_process_group()
        before, torchs = self._hooks
        if sys.excepthook is torchs:  # it adds the rank to what was there: one more for every generation
            sys.excepthook = before

    def connect(self, store: Store, rank: int, size: int, timeout: timedelta):
        """Build one gloo backend in a helper thread; leave as soon as the generation is over."""
        built: list = []
        connecting = timedelta(seconds=self._build_s / _GLOO_CONNECTS_FOR)

        def build() -> None:
            try:
                backend = compat.gloo_group(store, rank, size, connecting)
                compat.set_backend_timeout(backend, timeout)
                built.append(backend)
            except BaseException as error:
                built.append(f"{type(error).__name__}: {error}")  # as text: an exception would keep its frames alive

        # No daemon: one that is left behind ends within build_s, and must not come back to an interpreter that is gone.
        thread = threading.Thread(target=build, name=f"ntp-connect-{self.generation}", daemon=False)
        thread.start()
        until = time.monotonic() + self._build_s
        while thread.is_alive():
            thread.join(0.002)
            self.abort.check()
            if time.monotonic() > until:
                raise GenerationOver(f"generation {self.generation}: no group within build_s={self._build_s} s")
        if isinstance(built[0], str):
            self.abort.check()
            raise GenerationOver(f"generation {self.generation}: a group could not be built: {built[0]}")
        return built[0]

    def _guard(self, group: dist.ProcessGroup) -> None:
        self.abort.guard(group)
        self.abort.check()


def _create(options, world: GenerationWorld):
    """Torch's way into :meth:`GenerationWorld.connect`: the world travels as the group's ``pg_options``."""
    return world.connect(options.store, options.group_rank, options.group_size, options.timeout)
