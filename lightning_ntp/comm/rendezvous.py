"""Where the members of a job meet: the store, and the environment variables that lead to it.

Who starts the processes decides who hosts the store:

=====================  ==============================================================================
``NTP_STORE`` is set   a supervisor or ``lightning-ntp store`` hosts it: it outlives any member
torchrun               the agent hosts it; restarted members get keys of their own (prefix)
anything else          rank 0 hosts it at ``MASTER_ADDR:MASTER_PORT`` (``srun train.py``, processes started by hand)
=====================  ==============================================================================
"""

from __future__ import annotations

import atexit
import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from lightning_ntp.errors import ConfigError, LaunchError

STORE_VARIABLE = "NTP_STORE"
"""``host:port`` of the supervisor's store."""

WORLD_SIZE_VARIABLE = "NTP_WORLD_SIZE"
"""Number of members. Lightning deletes ``WORLD_SIZE`` at the end of a ``fit``, so we keep a copy of our own."""

TOKEN_VARIABLE, SEAT_VARIABLE, INCARNATION_VARIABLE = "NTP_TOKEN", "NTP_SEAT", "NTP_INCARNATION"
"""The job's secret; a member's seat, if whoever started it knows it; which process at that seat it is."""


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
        host, port = parse_address(address, STORE_VARIABLE)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    host, port = _required(env, "MASTER_ADDR"), _integer(env, "MASTER_PORT")
    if has_agent_store(env):
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        # The agent keeps one store over its restarts: without a prefix, members would read their dead peers' keys.
        return PrefixStore(f"ntp/attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    rank, world_size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    return TCPStore(
        host, port, world_size, is_master=rank == 0, wait_for_workers=False, timeout=timeout, multi_tenant=True
    )


def has_agent_store(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process, and its agent hosts a store that we can use."""
    return "TORCHELASTIC_RUN_ID" in env and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def job_token(env: Mapping[str, str] = os.environ) -> str:
    """The job's secret: ``NTP_TOKEN``; under torchrun, where nobody hands it out, made of what all processes know.

    The latter can be guessed by whoever reaches the agent's store: it only keeps two jobs apart.

    Raises:
        LaunchError: if there is none.
    """
    if token := env.get(TOKEN_VARIABLE):
        return token
    if "TORCHELASTIC_RUN_ID" in env:
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        return hashlib.sha256(" ".join(env.get(name, "") for name in names).encode()).hexdigest()[:32]
    raise LaunchError(
        f"the job's token is missing: set the environment variable {TOKEN_VARIABLE} to the same secret in all its "
        f"processes, for example by `export {TOKEN_VARIABLE}=$(openssl rand -hex 16)` before they are started"
    )


def read_token(path: str) -> str:
    """The token in a file.

    Raises:
        ConfigError: if the file cannot be read or is empty.
    """
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file={path}: it cannot be read: {error}") from None
    if not token:
        raise ConfigError(f"--token-file={path} is empty: write a secret into it, such as `openssl rand -hex 16` gives")
    return token


def host_store(host: str = "127.0.0.1", port: int = 0) -> TCPStore:
    """Host a job's store in this process, on one IPv4 interface.

    Bound by ourselves: TCPStore would listen on every interface, and anybody who reaches a store can write to it. And
    it would listen by IPv6; then its only thread looks up the name of every client at the DNS, which may freeze the
    store for everybody for seconds. The name of an IPv4 loopback address stands in ``/etc/hosts``.

    Args:
        host: Address of the interface.
        port: 0 for a free one.

    Raises:
        OSError: if it cannot listen there.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for connections of an earlier job, now closed
        listener.bind((host, port))
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


def parse_address(address: str, name: str) -> tuple[str, int]:
    """Host and port of ``host:port``.

    Args:
        address: What was given.
        name: Of the argument, for the message.

    Raises:
        ConfigError: if it has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{name}={address!r} must have the form host:port, for example 127.0.0.1:29500")
    return host.strip("[]"), int(port)
