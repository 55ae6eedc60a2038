"""A member without Lightning, for whatever launcher: says who it is, agrees, waits for a word, finishes.

    python launched_member.py DIRECTORY DEGREES [mode=once] [ORDER ...]

It writes ``DIRECTORY/SEAT.INCARNATION`` with its process id, and its environment, when it is up, the same with
``.in`` when it is in a view, and ``.done`` when it has finished. It finishes once ``DIRECTORY/go`` is there. Orders:
``raise:r1.s0`` raises a user's exception in the first view, ``early:r1.s0=3`` exits with a code at once, ``plain``
declares nothing and waits for the word, ``greet`` says which protocol the job speaks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.support.light import skip_lightning

    skip_lightning()

from lightning_ntp.comm.rendezvous import INCARNATION_VARIABLE, SEAT_VARIABLE, connect_store, job_token
from lightning_ntp.config import Timeouts
from lightning_ntp.membership.agreement import Standing
from lightning_ntp.membership.events import Event, Kind
from lightning_ntp.membership.exits import exit_code_of
from lightning_ntp.membership.founding import Founding, Respawn
from lightning_ntp.membership.member import Membership
from lightning_ntp.membership.parse import parse_seat
from lightning_ntp.membership.store import JobStore
from lightning_ntp.topology import Topology

TIMEOUTS = Timeouts(
    beat_s=0.1, lease_s=3.0, lease_margin_s=0.5, classify_s=4.0, join_s=6.0, build_s=10.0, hang_s=9.0, slow_hang_s=15.0,
    shutdown_grace_s=2.0, start_s=20.0, collective_s=60.0,
)  # fmt: skip
_FACTS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NTP_WORLD_SIZE", "SLURM_NTASKS")


def founding_of(degrees: str, mode: str = "never") -> Founding:
    """Of degrees like ``2,2``."""
    topology = Topology.start([int(degree) for degree in degrees.split(",")])
    return Founding(topology, TIMEOUTS, Respawn(mode=mode, first_delay_s=0.2))


class Member:
    """One process.

    Args:
        directory: Where it writes, and reads the word.
        founding: What it declares.
        orders: Words of the command line.
    """

    def __init__(self, directory: Path, founding: Founding, orders: list[str]) -> None:
        self.directory, self.founding = directory, founding
        seat = os.environ.get(SEAT_VARIABLE)
        self.seat = parse_seat(seat) if seat else founding.members[int(os.environ["RANK"])]
        self.incarnation = int(os.environ.get(INCARNATION_VARIABLE, "0"))
        self.orders = dict(order.partition(":")[::2] for order in orders)

    def run(self) -> int:
        self.write("", pid=os.getpid(), **{name: os.environ.get(name) for name in _FACTS})
        seat, _, code = self.orders.get("early", "").partition("=")
        if seat == str(self.seat) and self.incarnation == 0:
            return int(code)
        if "plain" in self.orders:
            while not self.may_end:
                time.sleep(0.01)
            return 0
        self.store = JobStore(lambda: connect_store(timeout_s=20.0), job_token())
        if "greet" in self.orders:  # nobody else does, without a launcher of ours
            self.store.greet()
        is_first = self.incarnation == 0
        founding = self.founding.declare(self.store) if is_first else Founding.read(self.store)
        view = founding.view if is_first else None
        self.membership = Membership(
            self.store, self.seat, view, incarnation=self.incarnation, timeouts=founding.timeouts
        )
        self.membership.start()
        while True:
            try:
                self.take_part()
                return 0
            except Exception as error:
                try:
                    self.membership.leave(error)
                except Exception as own:
                    print(f"{self.seat}: {type(own).__name__}: {str(own)[:200]}", file=sys.stderr)
                    self.membership.close()
                    return exit_code_of(own)

    def take_part(self) -> None:
        view = self.membership.agree(Standing())
        self.membership.run()
        self.write(".in", generation=view.generation, members=[str(seat) for seat in view.members])
        while not self.may_end:
            self.membership.abort.check()
            if self.orders.get("raise") == str(self.seat):
                raise ValueError("a mistake in the user's code")
            if self.membership.joiner_waits and view.leader == self.seat:
                event = Event(Kind.OVER, self.seat, self.incarnation, view.generation, "somebody wants to join")
                self.store.append(event)
            time.sleep(0.01)
        self.membership.finish()
        self.write(".done")

    @property
    def may_end(self) -> bool:
        return (self.directory / "go").exists()

    def write(self, ending: str, **fields) -> None:
        path = self.directory / f"{self.seat}.{self.incarnation}{ending}"
        path.with_suffix(".partial").write_text(json.dumps(fields))
        path.with_suffix(".partial").rename(path)


if __name__ == "__main__":
    where, degrees, *words = sys.argv[1:]
    mode = next((word.removeprefix("mode=") for word in words if word.startswith("mode=")), "never")
    sys.exit(Member(Path(where), founding_of(degrees, mode), words).run())
