"""``python -m lightning_ntp.run --nproc-per-node N train.py ...``: start a script as the members of a job.

The script's own ``python train.py`` does the same by itself, on one machine. This way in starts the members at once,
before the script has run up to ``fit`` one time more, on several machines too, and it also starts scripts that use no
Trainer:

* one machine: as above;
* several: the same on each, with ``--nnodes M --node-rank K --store HOST:PORT`` and one token for all;
* SLURM: ``srun --ntasks-per-node=1 --no-kill python -m lightning_ntp.run --nproc-per-node N train.py``;
* torchrun: ``torchrun --nproc-per-node N -m lightning_ntp.run train.py``. torchrun ends the whole job when one of its
  processes dies, so that process is not the member but a supervisor of that member alone;
* seats of a job that runs: ``--store HOST:PORT --join r1.s0,r1.s1``.

docs/launching.md has the details.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lightning_ntp.comm.rendezvous import TOKEN_VARIABLE, has_agent_store, job_token, parse_address, read_token
from lightning_ntp.errors import ConfigError, LaunchError, NTPError
from lightning_ntp.membership.founding import Founding
from lightning_ntp.membership.parse import parse_seat
from lightning_ntp.membership.store import JobStore
from lightning_ntp.supervisor import Adaptive, AgentStore, AllOrNothing, HostedStore, Node, RemoteStore, Supervisor
from lightning_ntp.supervisor.sites import StoreSite
from lightning_ntp.supervisor.slurm import TASK_VARIABLES, SlurmStep

_START_S = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; by default the process's own.

    Returns:
        The exit code: 0 if all members, or in a fault-tolerant job the survivors, ended with 0, else that of the first
        that failed; 2 for a wrong command line.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        parser.error("the script to run is missing: ... --nproc-per-node N train.py")
    if not options.module and not os.path.exists(words[0]):
        parser.error(
            f"no such script: {words[0]!r} (options of this launcher stand before the script; -m runs a module)"
        )
    command = [sys.executable, *(["-m"] if options.module else []), *words]
    try:
        if "LOCAL_RANK" in os.environ:
            return _run_inside(command, options)
        if options.join:
            return _join(command, options)
        if options.nproc_per_node is None:
            parser.error("--nproc-per-node is missing: how many members shall be started?")
        return _run(command, options)
    except NTPError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


def _run(command: Sequence[str], options: argparse.Namespace) -> int:
    step = SlurmStep.of(os.environ) if options.nnodes is None else None
    num_nodes = step.num_nodes if step else options.nnodes or 1
    index = step.index if step and options.node_rank is None else options.node_rank or 0
    if not 0 <= index < num_nodes:
        raise ConfigError(f"--node-rank={index} is outside the nodes 0..{num_nodes - 1} of --nnodes={num_nodes}")
    several, num_members = num_nodes > 1, options.nproc_per_node
    address = options.store or (step.store_address() if step else "")
    if several and not address:
        raise ConfigError(
            f"--store is missing: with --nnodes={num_nodes} all nodes need the address at which node 0 hosts the job's "
            "store, for example --store 10.0.0.1:29500"
        )
    return Supervisor(
        command,
        num_members,
        policy=Adaptive(_needed_token(options) if several else _given_token(options), grace_s=options.grace_period),
        node=Node.one_of(num_nodes, index, num_members) if several else Node.alone(num_members),
        site=_site(address, options.host_store, index, several),
        hidden=TASK_VARIABLES,
        start_s=_START_S,
    ).run()


def _site(address: str, host_store: bool | None, index: int, is_shared: bool) -> StoreSite:
    hosts = index == 0 if host_store is None else host_store
    if not address:
        if not hosts:
            raise ConfigError("--no-host-store: where is the store? Pass --store HOST:PORT")
        return HostedStore()
    host, port = parse_address(address, "--store")
    return HostedStore(host, port, is_shared) if hosts else RemoteStore(f"{host}:{port}")


def _join(command: Sequence[str], options: argparse.Namespace) -> int:
    """Start members at seats of a job that runs."""
    if not options.store or options.nproc_per_node is not None or options.nnodes is not None:
        raise ConfigError(
            f"--join={options.join} needs --store HOST:PORT, the address of the running job's store, and no "
            "--nproc-per-node or --nnodes: one member is started for each seat"
        )
    token = _needed_token(options)
    site = _site(options.store, False, 0, False)
    site.open(_START_S)
    founding = Founding.read(JobStore(lambda: site.connect(_START_S), token))
    if founding is None:
        raise LaunchError(
            f"--join={options.join}: the store at {site.address} knows of no fault-tolerant job with this token: it "
            "has not begun yet, runs with fault_tolerance=False, or has another token"
        )
    seats = [parse_seat(name) for name in options.join.split(",")]
    unknown = [str(seat) for seat in seats if seat not in founding.members]
    if unknown or len(set(seats)) != len(seats):
        raise ConfigError(
            f"--join={options.join}: name seats of the job, each once: {' '.join(map(str, founding.members))}"
        )
    ranks = [founding.members.index(seat) for seat in seats]
    return Supervisor(
        command,
        len(ranks),
        policy=Adaptive(token, grace_s=options.grace_period, joins=True),
        node=Node.joining(ranks, len(founding.members)),
        site=site,
        hidden=TASK_VARIABLES,
    ).run()


def _run_inside(command: Sequence[str], options: argparse.Namespace) -> int:
    """This process counts as a member already: under torchrun look after the real one, else make way for it."""
    given = {"--nproc-per-node": options.nproc_per_node, "--nnodes": options.nnodes, "--join": options.join}
    for name, value in given.items():
        if value is not None:
            raise LaunchError(
                f"{name}={value} inside a process that is a member already (LOCAL_RANK={os.environ['LOCAL_RANK']}): "
                "drop the option, or unset LOCAL_RANK to start a job of its own"
            )
    if has_agent_store():
        policy = Adaptive(_given_token(options) or job_token(), grace_s=options.grace_period)
        return Supervisor(command, 1, policy=policy, node=Node.under_torchrun(), site=AgentStore()).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def _given_token(options: argparse.Namespace) -> str | None:
    return read_token(options.token_file) if options.token_file else os.environ.get(TOKEN_VARIABLE)


def _needed_token(options: argparse.Namespace) -> str:
    return _given_token(options) or job_token({})  # raises, with the way out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_ntp.run",
        usage="%(prog)s --nproc-per-node N [OPTION ...] [--] train.py [ARG ...]\n"
        "       %(prog)s --nproc-per-node N [OPTION ...] -m package.module [ARG ...]\n"
        "       %(prog)s --store HOST:PORT --join SEAT[,SEAT ...] train.py [ARG ...]",
        description="Start a script as members of a job on this machine, and wait for them. Ctrl-C is passed on; a "
        "second one kills. Exit code: 0 if all members, or in a fault-tolerant job the survivors, ended with 0, else "
        "the first failure's (128 + signal number).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        type=int,
        metavar="N",
        help="number of members: the sum of the replicas' degrees, as the Trainer's devices",
    )
    parser.add_argument(
        "--grace-period",
        type=float,
        default=AllOrNothing.grace_s,
        metavar="S",
        help="seconds that the others get when a member of a job that is not fault tolerant has failed, before they "
        "are killed (default: %(default)s)",
    )
    _add_node_options(parser)
    parser.add_argument("-m", "--module", action="store_true", help="what follows is a module, as in python -m")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="...", help="the script and its own arguments")
    return parser


def _add_node_options(parser: argparse.ArgumentParser) -> None:
    several = parser.add_argument_group("several machines (under SLURM's srun the first three are known)")
    several.add_argument("--nnodes", type=int, metavar="M", help="number of machines that start the job")
    several.add_argument("--node-rank", "--node_rank", type=int, metavar="K", help="number of this one, from 0")
    several.add_argument(
        "--store",
        metavar="HOST:PORT",
        help="where the job's store is: an address of the machine that hosts it, the same for all",
    )
    several.add_argument(
        "--host-store",
        action=argparse.BooleanOptionalAction,
        help="whether this machine hosts the store (default: node 0; --no-host-store there if `lightning-ntp store` "
        "hosts it)",
    )
    several.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"holds the job's secret (default: the environment variable {TOKEN_VARIABLE}; on one machine a new one)",
    )
    several.add_argument(
        "--join", metavar="SEAT,...", help="start members at these seats, such as r1.s0,r1.s1, of a job that runs"
    )


if __name__ == "__main__":
    sys.exit(main())
