"""Entry point of ``lightning-ntp VERB``.

A verb is a module with two functions: ``add_parser(subparsers)``, which declares its arguments and names its ``run``,
and ``run(args)``, which returns the exit code. Input that cannot work ends with exit code 2 and the error's own text;
any other error of ours ends with 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from lightning_ntp.__about__ import __version__
from lightning_ntp.cli import drain, join, layout, plan, store
from lightning_ntp.errors import ConfigError, NTPError

VERBS = (layout, plan, store, join, drain)


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing the usage, so that every bad input is one message on one way out."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: The arguments after the program's name; those of the process if ``None``.

    Returns:
        The exit code: 0, 2 for bad input, 1 for another error of this package, 130 after Ctrl-C.
    """
    try:
        args = build_parser().parse_args(argv)
        code = args.run(args)
        sys.stdout.flush()
        return code
    except NTPError as error:
        print(f"lightning-ntp: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader (`| head`) has enough. Python flushes once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = _Parser(prog="lightning-ntp", description="Tools for nonuniform tensor parallelism.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        verb.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
