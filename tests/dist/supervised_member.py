"""A member that a real supervisor starts: agrees, does as told (``r0.s0:kill``, ``r1.s0:raise``), finishes."""

from __future__ import annotations

import os
import signal
import sys

from lightning_ntp.comm.rendezvous import connect_store
from lightning_ntp.config import Timeouts
from lightning_ntp.errors import JobFailed
from lightning_ntp.membership.agreement import Standing
from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.membership.member import Membership
from lightning_ntp.membership.parse import parse_seat
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.topology import Topology


def main(orders: list[str]) -> int:
    seat = parse_seat(os.environ["NTP_SEAT"])
    store = JobStore(lambda: connect_store(timeout_s=20.0), os.environ["NTP_TOKEN"])
    member = Membership(store, seat, View.founding(Topology.start([1, 1])), timeouts=Timeouts())
    member.start()
    while True:
        try:
            view = member.agree(Standing())
            member.run()
            if view.generation == 0 and f"{seat}:kill" in orders:
                os.kill(os.getpid(), signal.SIGKILL)
            if view.generation == 0 and f"{seat}:raise" in orders:
                raise ValueError("a mistake in the user's code")
            member.finish()
            return 0
        except JobFailed:
            return int(ExitCode.JOB_FAILED)
        except (RuntimeError, ValueError) as error:
            member.leave(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
