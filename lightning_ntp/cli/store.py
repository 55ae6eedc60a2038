"""``lightning-ntp store``: host a job's store on a machine of its own, so that the job may lose any other.

The process holds nothing but the store. It prints one line with the address, and ends with SIGTERM or Ctrl-C. A store
serves one job.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
from pathlib import Path

from lightning_ntp.comm.rendezvous import parse_address, read_token
from lightning_ntp.errors import ConfigError
from lightning_ntp.membership.store import JobStore
from lightning_ntp.supervisor import HostedStore

_CONNECT_S = 30.0


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "store",
        help="host the store of a job that `python -m lightning_ntp.run --store HOST:PORT --no-host-store` starts",
        description="Host the store of one job until SIGTERM or Ctrl-C, and print its address. Whoever reaches the "
        "port can stop the job: bind to a network that only the job's machines are on.",
    )
    parser.add_argument(
        "--bind",
        required=True,
        metavar="HOST:PORT",
        help="address of this machine at which to listen; port 0 takes a free one",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="holds the job's secret, for the launchers (run --token-file FILE); made, for your eyes only, if it is "
        "not there",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Host the store.

    Raises:
        ConfigError: if the address or the token's file cannot be used.
        LaunchError: if it cannot listen there.
    """
    host, port = parse_address(args.bind, "--bind")
    token = _token(args.token_file) if args.token_file else ""
    ending = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # before the store's thread starts, which inherits it
    try:
        site = HostedStore(host, port, is_shared=True)
        site.open()
        JobStore(lambda: site.connect(_CONNECT_S), token).greet()
        print(f"lightning-ntp store: listening at {site.host}:{site.port}", flush=True)
        signal.sigwait(ending)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
    return 0


def _token(path: str) -> str:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise ConfigError(f"--token-file={Path(path)} cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secrets.token_hex(16)}\n")
    return read_token(path)
