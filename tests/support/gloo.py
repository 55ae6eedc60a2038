"""A store client and a gloo world inside a rank, on the store that the zygote hosts."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

import torch.distributed as dist


def connect(store_address: str, timeout_s: float = 30.0) -> dist.TCPStore:
    """A client of the TCPStore at "host:port"."""
    host, port = store_address.rsplit(":", 1)
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


@contextlib.contextmanager
def gloo_world(rank: int, world_size: int, store_address: str, timeout_s: float = 30.0) -> Iterator[dist.Store]:
    """An initialised default group of all ranks over gloo; yields the store and destroys the group afterwards.

    After an exception the group is left alone: destroying it could wait for an operation in flight, and the rank is
    about to end anyway.
    """
    store = connect(store_address, timeout_s)
    timeout = datetime.timedelta(seconds=timeout_s)
    prefixed = dist.PrefixStore("world", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world_size, timeout=timeout)
    yield store
    dist.destroy_process_group()
