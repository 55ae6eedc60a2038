"""What the verbs that talk to a running job have in common: the way to it."""

from __future__ import annotations

import argparse
import os

from lightning_ntp.comm.rendezvous import STORE_VARIABLE, connect_store, job_token, parse_address, read_token
from lightning_ntp.errors import LaunchError
from lightning_ntp.membership.founding import Founding
from lightning_ntp.membership.store import JobStore

_CONNECT_S = 10.0


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what leads to a job. Its launcher says both when it starts, unless the user gave them."""
    parser.add_argument("--store", required=True, metavar="HOST:PORT", help="address of the job's store")
    parser.add_argument(
        "--token-file", metavar="FILE", help="holds the job's secret (default: the environment variable NTP_TOKEN)"
    )


def open_job(args: argparse.Namespace) -> tuple[JobStore, Founding]:
    """Its store, and what it is.

    Raises:
        ConfigError: if the address or the token's file cannot be used.
        LaunchError: if there is no such job.
    """
    parse_address(args.store, "--store")
    token = read_token(args.token_file) if args.token_file else job_token(os.environ)
    try:
        store = JobStore(lambda: connect_store({STORE_VARIABLE: args.store}, _CONNECT_S), token)
        founding = Founding.read(store)
    except RuntimeError as error:
        raise LaunchError(f"--store={args.store}: no store answers there: {str(error).splitlines()[0]}") from None
    if founding is None:
        raise LaunchError(f"--store={args.store}: no fault-tolerant job with this token runs there")
    return store, founding
