"""``lightning-ntp join``: ask the launchers of a running job to start processes again at empty seats.

For a device that was repaired or replaced on a machine whose launcher still runs. On a machine without one, start the
members by hand: ``python -m lightning_ntp.run --store HOST:PORT --join SEAT,... train.py``.
"""

from __future__ import annotations

import argparse

from lightning_ntp.cli.running import add_job_arguments, open_job
from lightning_ntp.errors import ConfigError
from lightning_ntp.membership.events import Event, Kind
from lightning_ntp.membership.host import newest_view
from lightning_ntp.membership.parse import parse_seat


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "join",
        help="have processes started again at empty seats of a running job",
        description="Ask the launchers of a running job to start a process at each of these seats; the processes "
        "then join the job. A seat at which a process runs is left alone.",
    )
    parser.add_argument("seats", nargs="+", metavar="SEAT", help="such as r1.s3")
    add_job_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Put the requests into the job's log.

    Raises:
        ConfigError: for a name that is no seat of the job.
        LaunchError: if there is no such job.
    """
    store, founding = open_job(args)
    seats = {name: parse_seat(name) for name in args.seats}
    for name, seat in seats.items():
        if seat not in founding.members:
            raise ConfigError(f"{name} is no seat of this job; it has {' '.join(map(str, founding.members))}")
    view = newest_view(store)
    for seat in seats.values():
        store.append(Event(Kind.RETURN, seat, text="lightning-ntp join"), view.events if view else 0)
    print(f"asked for a process at {', '.join(seats)}")
    return 0
