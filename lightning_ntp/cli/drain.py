"""``lightning-ntp drain``: have members, or all members of a machine, hand over their parts of the model and leave.

The others take the parts over at the next step, and go on without a failure. Launchers whose members have all left end
with 0; only the one that hosts the job's store stays, until the job has ended.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ntp.cli.running import add_job_arguments, open_job
from lightning_ntp.errors import ConfigError, LaunchError, MembershipError, NTPError
from lightning_ntp.membership.events import Event, Facts, Kind
from lightning_ntp.membership.host import newest_view
from lightning_ntp.membership.parse import parse_seat
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.membership.whereabouts import hosts_of
from lightning_ntp.topology import Seat

_LOOK_S = 0.1


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "drain",
        help="have members of a running job hand over their parts and leave",
        description="Ask members to hand over their parts of the model at the next step, and to leave. The job goes "
        "on without them; `lightning-ntp join`, or `python -m lightning_ntp.run --join` on another machine, fills "
        "their seats again.",
    )
    parser.add_argument(
        "targets",
        nargs="+",
        metavar="SEAT[,SEAT ...]|HOST",
        help="seats such as r1.s2,r1.s3, or the name of a machine, all of whose members leave",
    )
    add_job_arguments(parser)
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="wait until they have left (default), or only ask",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Put the requests into the job's log, and wait for what they lead to.

    Raises:
        ConfigError: for a seat where no member sits, a machine that runs none, or if nobody would be left.
        LaunchError: if there is no such job, or it ends meanwhile.
    """
    store, founding = open_job(args)
    try:
        job = RunningJob.of(store)
        leaving = choose(args.targets, founding.members, job.live(), hosts_of(store, job.live()))
        asked = job.ask(leaving)
        names = ", ".join(map(str, leaving))
        print(f"asked to hand over and leave: {names}", flush=True)
        if args.wait:
            job.wait_for(asked)
            print(f"left: {names}")
    except NTPError:
        raise
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        raise LaunchError(f"--store={args.store} is gone, so the job has ended or is lost: {text}") from None
    return 0


def choose(
    targets: Sequence[str], seats: Collection[Seat], live: Collection[Seat], hosts: Mapping[Seat, str]
) -> list[Seat]:
    """The seats of the members that the words on the command line mean.

    Args:
        targets: Seats, joined by commas or not, and names of machines.
        seats: All seats of the job.
        live: Those at which a member sits.
        hosts: On which machine each of these members runs, as far as it is known.

    Raises:
        ConfigError: for a word that means nobody.
    """
    found: set[Seat] = set()
    for word in (word for target in targets for word in target.split(",") if word):
        try:
            seat = parse_seat(word)
        except MembershipError:
            found |= _on(word, hosts)
            continue
        if seat not in seats:
            raise ConfigError(f"{word} is no seat of this job; it has {_shown(seats)}")
        if seat not in live:
            raise ConfigError(f"at {word} sits no member now; the members are {_shown(live)}")
        found.add(seat)
    if not found:
        raise ConfigError("name a seat, such as r1.s3, or a machine")
    return sorted(found)


def _on(word: str, hosts: Mapping[Seat, str]) -> set[Seat]:
    """Who runs on a machine; its name may be given without the domain."""
    seats_by_host: dict[str, set[Seat]] = {}
    for seat, host in hosts.items():
        seats_by_host.setdefault(host, set()).add(seat)
    if word in seats_by_host:
        return seats_by_host[word]
    short = [host for host in seats_by_host if host.partition(".")[0].lower() == word.lower()]
    if len(short) == 1:
        return seats_by_host[short[0]]
    known = "; ".join(f"{host}: {_shown(seats)}" for host, seats in sorted(seats_by_host.items()))
    what = "means several machines" if short else "is no seat, such as r1.s3, and no machine of this job"
    raise ConfigError(f"{word!r} {what}; its members run on: {known or 'machines that are not known'}")


def _shown(seats: Collection[Seat]) -> str:
    return " ".join(map(str, sorted(seats)))


@dataclass
class RunningJob:
    """What the store says of a job, read anew as time goes on.

    Attributes:
        store: The job's.
        view: The newest.
        facts: From the events that the view did not know of.
    """

    store: JobStore
    view: View
    facts: Facts = field(default_factory=Facts)

    @classmethod
    def of(cls, store: JobStore) -> RunningJob:
        """A job that has begun.

        Raises:
            LaunchError: if it has not, or has ended.
        """
        view = newest_view(store)
        if view is None:
            raise LaunchError("the job has no view yet: its members have not all started; try again")
        job = cls(store, view, Facts(read=view.events))
        job.look()
        if not job.live():
            raise LaunchError("the job has ended: no member is left")
        return job

    def look(self) -> None:
        """Read what is new.

        Raises:
            LaunchError: if somebody has ended the job.
        """
        self.view = newest_view(self.store) or self.view
        if not self.store.has_event(self.facts.read):  # it may be deleted: then the newest view knows of it
            self.facts.read = max(self.facts.read, self.view.events)
        while self.store.has_event(self.facts.read):
            self.facts.add(self.store.event(self.facts.read))
        if self.facts.fatal is not None:
            raise LaunchError(f"{self.facts.fatal.seat} has ended the job: {self.facts.fatal.text}")

    def live(self) -> dict[Seat, int]:
        """Members, with their incarnation."""
        ended = self.facts.gone | self.facts.done
        return {seat: number for seat, number in self.view.incarnations.items() if (seat, number) not in ended}

    def ask(self, seats: Collection[Seat]) -> dict[Seat, int]:
        """Ask members to leave.

        Returns:
            Which process is asked at each seat.

        Raises:
            ConfigError: if nobody would be left.
        """
        live = self.live()
        asked = {seat for seat, number in live.items() if (seat, number) in self.facts.drains}
        if asked | set(seats) >= set(live):
            before = f" ({_shown(asked)} were asked to leave before)" if asked - set(seats) else ""
            raise ConfigError(
                f"{_shown(seats)}: nobody would be left to take over the model{before}; to end the job, stop its "
                "launcher"
            )
        for seat in seats:
            event = Event(Kind.DRAIN, seat, live[seat], self.view.generation, "lightning-ntp drain")
            self.store.append(event, self.facts.read)
        return {seat: live[seat] for seat in seats}

    def wait_for(self, asked: Mapping[Seat, int]) -> None:
        """Until all of these have left.

        Args:
            asked: As :meth:`ask` returns it.

        Raises:
            LaunchError: if one of them died instead, or no other member is left.
        """
        while True:
            self.look()
            live = self.live()
            died = sorted(set(asked.items()) & self.facts.gone)
            if died:
                causes = "; ".join(f"{seat} ({self.facts.causes[seat, number]})" for seat, number in died)
                raise LaunchError(f"gone before it had handed over: {causes}; the others recover without it")
            if not any(live.get(seat) == number for seat, number in asked.items()):
                return
            if all((seat, number) in self.facts.drains for seat, number in live.items()):
                raise LaunchError(f"{_shown(live)}: all that are left were asked to leave, so none does")
            time.sleep(_LOOK_S)
