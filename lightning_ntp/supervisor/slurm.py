"""What SLURM says of a job's nodes, for one supervisor a node: ``srun --ntasks-per-node=1 --no-kill ...``."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_ntp.errors import LaunchError

TASK_VARIABLES = (
    "SLURM_LOCALID",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
)
"""They tell of supervisors, one a node. A member must not take them for its own: Lightning would (``SLURM_NTASKS``)."""

_SET_BY_SRUN = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_NODES", "SLURM_LAUNCH_NODE_IPADDR")
_SRUN = "srun --ntasks-per-node=1 --no-kill"
_FIRST_PORT, _NUM_PORTS = 15_000, 10_000
_PARTS = re.compile(r"((?:[^,\[\]]|\[[^\]]*\])+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True)
class SlurmStep:
    """A job step with one task a node.

    Attributes:
        num_nodes: How many nodes it has.
        index: Of this node, from 0.
        hosts: Names or addresses of the first node, the best first.
        port: For the job's store: equal on all nodes, another one for every step.
    """

    num_nodes: int
    index: int
    hosts: tuple[str, ...]
    port: int

    @classmethod
    def of(cls, env: Mapping[str, str]) -> SlurmStep | None:
        """The step of this process; ``None`` where srun did not start it, or on one node.

        Raises:
            LaunchError: for more than one task a node, or if srun is missing or the nodes' names are.
        """
        if not {"SLURM_JOB_ID", "SLURM_NODEID", "SLURM_PROCID"} <= env.keys():
            return None
        is_shell = env.get("SLURM_JOB_NAME") in ("bash", "interactive")  # as Lightning has it
        in_all = _first_number(env, ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), 1)
        if not any(env.get(name) for name in _SET_BY_SRUN):
            if in_all > 1 and not is_shell:
                raise LaunchError(
                    f"this SLURM job has {in_all} nodes, but srun did not start this process: put `{_SRUN}` before the "
                    "command, or pass --nnodes 1 to use this node alone"
                )
            return None
        num_nodes = _first_number(env, ("SLURM_STEP_NUM_NODES",), 1 if is_shell else in_all)
        num_tasks = _first_number(env, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), num_nodes)
        if num_nodes == 1 and num_tasks == 1:
            return None
        if num_tasks != num_nodes:
            raise LaunchError(
                f"SLURM starts {num_tasks} tasks on {num_nodes} nodes, but this launcher runs once a node and starts "
                f"the members itself: `{_SRUN} python -m lightning_ntp.run --nproc-per-node N ...`"
            )
        job, step = _first_number(env, ("SLURM_JOB_ID",), 0), _first_number(env, ("SLURM_STEP_ID",), 0)
        port = _FIRST_PORT + (job + 101 * step) % _NUM_PORTS
        return cls(num_nodes, _first_number(env, ("SLURM_NODEID",), 0), _first_hosts(env), port)

    def store_address(self) -> str:
        """Where node 0 hosts the store, as this node knows it.

        Raises:
            LaunchError: on node 0, if its own name leads nowhere else than to itself.
        """
        if self.index > 0:
            return f"{self.hosts[0]}:{self.port}"
        for host in self.hosts:
            if _is_reachable(host):
                return f"{host}:{self.port}"
        raise LaunchError(
            f"on this machine the names {', '.join(self.hosts)} mean a loopback address, which other machines cannot "
            "reach: pass --store HOST:PORT with an address of this machine on all nodes"
        )


def expand_hosts(nodelist: str) -> Iterator[str]:
    """The hosts of SLURM's short form.

    >>> list(expand_hosts("a[01-03,07],b"))
    ['a01', 'a02', 'a03', 'a07', 'b']

    Raises:
        LaunchError: for another form.
    """
    parts = _PARTS.findall(nodelist.replace(" ", ","))
    if ",".join(parts) != nodelist.replace(" ", ","):
        raise LaunchError(f"SLURM's list of nodes {nodelist!r} cannot be read: pass --nnodes, --node-rank and --store")
    for part in parts:
        yield from _expand(part)


def _expand(part: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, after = rest.partition("]")
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise LaunchError(f"SLURM's list of nodes has the range {text!r}, which cannot be read: pass --store")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            for ending in _expand(after):
                yield f"{before}{number:0{len(first)}d}{ending}"


def _first_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    lists = [env[name] for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if env.get(name)]
    found = [next(expand_hosts(lists[0]))] if lists else []
    if address := env.get("SLURM_LAUNCH_NODE_IPADDR"):  # of where srun was called: mostly, but not always, node 0
        found.append(address)
    if not found:
        raise LaunchError(
            "SLURM names no nodes (SLURM_JOB_NODELIST is not set): pass --nnodes, --node-rank and --store"
        )
    return tuple(found)


def _is_reachable(host: str) -> bool:
    """Whether others reach this machine by the name; a loopback address that is written as such is meant so."""
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        pass
    try:
        return not ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def _first_number(env: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        if value := env.get(name):
            try:
                return int(value)
            except ValueError:
                raise LaunchError(f"{name}={value!r} must be a whole number") from None
    return default
