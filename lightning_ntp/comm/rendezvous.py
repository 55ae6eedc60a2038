"""Where the members of a job meet: the store, and the environment variables that lead to it.

Who starts the processes decides who hosts the store:

=====================  ==============================================================================
``NTP_STORE`` is set   our supervisor hosts it, outside every member: it outlives any of them
torchrun               the agent hosts it; restarted members get keys of their own (prefix)
anything else          rank 0 hosts it at ``MASTER_ADDR:MASTER_PORT`` (SLURM, processes started by hand)
=====================  ==============================================================================
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from lightning_ntp.errors import ConfigError, LaunchError

STORE_VARIABLE = "NTP_STORE"
"""``host:port`` of the supervisor's store."""

WORLD_SIZE_VARIABLE = "NTP_WORLD_SIZE"
"""Number of members. Lightning deletes ``WORLD_SIZE`` at the end of a ``fit``, so we keep a copy of our own."""


def connect_store(env: Mapping[str, str] = os.environ, timeout_s: float = 300.0) -> Store:
    """Connect this member to its job's store.

    Args:
        env: Environment variables to read; a strategy whose cluster environment knows better passes its own mapping.
        timeout_s: How long a wait for a key, or for the host to appear, may take, in seconds.

    Returns:
        A store that all members of the job share. Hold it: where rank 0 hosts, the host ends with the object.

    Raises:
        LaunchError: if a variable is missing, so that the store cannot be found.
        ConfigError: if a variable has a value that is not an address or a number.
    """
    timeout = timedelta(seconds=timeout_s)
    if address := env.get(STORE_VARIABLE):
        host, port = _host_and_port(address)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    host, port = _required(env, "MASTER_ADDR"), _integer(env, "MASTER_PORT")
    if "TORCHELASTIC_RUN_ID" in env and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        # The agent keeps one store over its restarts: without a prefix, members would read their dead peers' keys.
        return PrefixStore(f"ntp/attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    rank, world_size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    return TCPStore(
        host, port, world_size, is_master=rank == 0, wait_for_workers=False, timeout=timeout, multi_tenant=True
    )


def host_store(host: str = "127.0.0.1") -> TCPStore:
    """Host a job's store in this process, on a free port of one IPv4 interface.

    Bound by ourselves: TCPStore would listen on every interface, and anybody who reaches a store can write to it. And
    it would listen by IPv6; then its only thread looks up the name of every client at the DNS, which may freeze the
    store for everybody for seconds. The name of an IPv4 loopback address stands in ``/etc/hosts``.

    Args:
        host: Address of the interface.
    """
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen(1024)
        port, fd = listener.getsockname()[1], listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def join_world(
    backend: str,
    connect: Callable[[], Store],
    rank: int,
    world_size: int,
    *,
    timeout_s: float,
    device: torch.device,
) -> None:
    """Build the default process group of all members, unless this process is in one already (an earlier Trainer).

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        connect: Gives the job's store.
        rank: This member's.
        world_size: Number of members.
        timeout_s: Of every collective, in seconds.
        device: Where its tensors live.

    Raises:
        LaunchError: if the group that is there already has another size.
    """
    if dist.is_initialized():
        if dist.get_world_size() != world_size:
            raise LaunchError(
                f"this process is in a group of {dist.get_world_size()} members already, but the Trainer asks for "
                f"{world_size}: use the same number of devices in every Trainer of a script"
            )
        return
    dist.init_process_group(
        backend,
        store=PrefixStore("ntp/world", connect()),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    # A process that ends with its groups alive may be aborted by a communication thread.
    atexit.register(_leave_world)


def _leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def check_world_size(num_members: int, env: Mapping[str, str] = os.environ) -> None:
    """Compare the number of members that a Trainer wants with the number of processes that were started.

    Args:
        num_members: Members that the Trainer's arguments ask for (devices x nodes).
        env: Environment variables to read. Without a count in them there is nothing to compare.

    Raises:
        LaunchError: if the two numbers differ.
    """
    variable = WORLD_SIZE_VARIABLE if WORLD_SIZE_VARIABLE in env else "WORLD_SIZE"
    if variable not in env:
        return
    started = _integer(env, variable)
    if started != num_members:
        raise LaunchError(
            f"the Trainer asks for {num_members} members (devices x num_nodes), but {started} processes were started "
            f"({variable}={started}): start {num_members} (--nproc-per-node) or pass devices={started}"
        )


def _required(env: Mapping[str, str], name: str) -> str:
    if value := env.get(name):
        return value
    raise LaunchError(
        f"the environment variable {name} is not set, so this process cannot find its job's store: start the script "
        "with `python train.py`, `python -m lightning_ntp.run --nproc-per-node N train.py` or torchrun"
    )


def _integer(env: Mapping[str, str], name: str) -> int:
    value = _required(env, name)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"the environment variable {name}={value!r} must be a whole number") from None


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{STORE_VARIABLE}={address!r} must have the form host:port, for example 127.0.0.1:29500")
    return host.strip("[]"), int(port)
