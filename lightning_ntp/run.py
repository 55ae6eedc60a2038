"""``python -m lightning_ntp.run --nproc-per-node N train.py ...``: start a script as the members of a job.

The script's own ``python train.py`` does the same by itself. This way in starts the members at once, before the script
has run up to ``fit`` one time more, and it also starts scripts that use no Trainer.

Under torchrun (``torchrun --nproc-per-node N -m lightning_ntp.run train.py``) torchrun starts the members and this
module only makes way for the script.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lightning_ntp.errors import LaunchError, NTPError
from lightning_ntp.supervisor import AllOrNothing, Supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; by default the process's own.

    Returns:
        The exit code: 0 if all members ended with 0, else that of the first that failed; 2 for a wrong command line.
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
            _make_way(command, options.nproc_per_node)
        if options.nproc_per_node is None:
            parser.error("--nproc-per-node is missing: how many members shall be started?")
        policy = AllOrNothing(grace_s=options.grace_period)
        return Supervisor(command, options.nproc_per_node, policy=policy).run()
    except NTPError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_ntp.run",
        usage="%(prog)s --nproc-per-node N [--grace-period S] [--] train.py [ARG ...]\n"
        "       %(prog)s --nproc-per-node N [--grace-period S] -m package.module [ARG ...]",
        description="Start a script as the members of a job on this machine, and wait for them. Ctrl-C is passed on; a "
        "second one kills. Exit code: 0 if all members ended with 0, else the first failure's (128 + signal number).",
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
        help="seconds that the others get when a member has failed, before they are killed (default: %(default)s)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="what follows is a module, as in python -m")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="...", help="the script and its own arguments")
    return parser


def _make_way(command: Sequence[str], nproc_per_node: int | None) -> None:
    if nproc_per_node is not None:
        raise LaunchError(
            f"--nproc-per-node={nproc_per_node} inside a process that is a member already (LOCAL_RANK="
            f"{os.environ['LOCAL_RANK']}): drop the option, or unset LOCAL_RANK to start a job of its own"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
