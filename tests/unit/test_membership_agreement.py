"""Members that agree through a store: threads of one process, without any process group."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from lightning_ntp.config import Timeouts
from lightning_ntp.errors import Fenced, GenerationOver, JobFailed, MembershipError, NTPError
from lightning_ntp.membership.agreement import MAX_FRUITLESS, Standing
from lightning_ntp.membership.events import Event, Kind
from lightning_ntp.membership.host import Host
from lightning_ntp.membership.lease import beat_key
from lightning_ntp.membership.member import Membership
from lightning_ntp.membership.states import State
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.membership.watcher import wait_until
from lightning_ntp.topology import Seat, Topology

TIMEOUTS = Timeouts(
    beat_s=0.02, lease_s=0.4, lease_margin_s=0.1, classify_s=0.55, join_s=0.6, build_s=2.0, hang_s=0.7, slow_hang_s=2.0,
    shutdown_grace_s=1.0, start_s=5.0, collective_s=10.0,
)  # fmt: skip


class Job:
    """Several members of one job, driven by the test."""

    def __init__(self, degrees=(2, 1), nominal=2) -> None:
        self.client = dist.HashStore()
        self.store = JobStore(lambda: self.client, "token")
        self.store.greet()
        self.founding = View.founding(Topology.start(degrees, nominal))
        self.exits: list[tuple[Seat, int]] = []
        self.members: dict[Seat, Membership] = {}
        for seat in self.founding.members:
            self.start(seat, self.founding)

    def start(self, seat: Seat, founding: View | None, incarnation: int = 0) -> Membership:
        member = Membership(
            self.store.clone(), seat, founding, incarnation=incarnation, timeouts=TIMEOUTS,
            end_process=lambda code: self.exits.append((seat, code)),
        )  # fmt: skip
        member.start()
        self.members[seat] = member
        return member

    def die(self, seat: Seat, number: int = 0) -> None:
        self.members.pop(seat).close()
        self.store.append(Event(Kind.DEAD, seat, number, text="killed"))

    def agree(self, standings=None, seats=None) -> dict[Seat, View | NTPError]:
        """All (or the given) members agree at the same time; what each got."""
        seats = list(self.members) if seats is None else seats
        return self.all(lambda seat: self.members[seat].agree((standings or {}).get(seat, Standing())), seats)

    def all(self, call, seats) -> dict[Seat, object]:
        results: dict[Seat, object] = {}

        def run(seat: Seat) -> None:
            try:
                results[seat] = call(seat)
            except NTPError as error:
                results[seat] = error

        threads = [threading.Thread(target=run, args=(seat,)) for seat in seats]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
        return results

    def close(self) -> None:
        for member in self.members.values():
            member.close()


@pytest.fixture
def job():
    job = Job()
    yield job
    job.close()


A, B, C = Seat(0, 0), Seat(0, 1), Seat(1, 0)


def one_view(results) -> View:
    views = list(results.values())
    assert all(view == views[0] for view in views), views
    return views[0]


def over(job, *seats) -> None:
    """These members come out of the generation that has ended."""
    for seat in seats:
        member = job.members[seat]
        assert member.abort.wait(2)
        member.leave(GenerationOver("x"))


def test_all_get_the_same_view(job):
    view = one_view(job.agree())
    assert view.seats == ((A, B), (C,)) and view.generation == 0 and view.step == -1
    for member in job.members.values():
        member.run()
        assert member.course.state is State.RUNNING


def test_a_death_ends_the_generation_and_the_survivors_agree(job):
    job.agree()
    for member in job.members.values():
        member.run()
    job.die(A)
    over(job, B, C)
    vote = {"step": 4, "norm": 2.5}
    view = one_view(job.agree({B: Standing(4, 3, holdings=[0, 2, 1]), C: Standing(4, 4, vote, [1, 1, 0])}))
    assert view.seats == ((B,), (C,)) and view.step == 4 and view.vote == vote
    assert view.holdings == {B: [0, 2, 1], C: [1, 1, 0]} and view.leader == B


def test_a_vote_is_remembered_by_those_who_got_it_in_a_view(job):
    job.agree({seat: Standing(0, -1) for seat in (A, B)} | {C: Standing(0, 0, {"step": 0, "norm": 1.0})})
    job.die(C)
    over(job, A, B)
    assert one_view(job.agree({A: Standing(0, -1), B: Standing(0, -1)})).vote == {"step": 0, "norm": 1.0}


def test_one_who_sees_an_error_brings_all_out(job):
    job.agree()
    error = RuntimeError("Connection closed by peer")
    job.members[B].progress.failed_in = "control"
    job.members[B].leave(error)
    over(job, A, C)
    view = one_view(job.agree())
    assert view.generation == 1 and view.fruitless == 1 and len(view.members) == 3


def test_an_error_of_its_own_ends_the_job_with_its_traceback(job):
    job.agree()
    with pytest.raises(ValueError, match="mistake"):
        try:
            raise ValueError("a mistake in the user's code")
        except ValueError as error:
            job.members[B].leave(error)
    over(job, A, C)
    results = job.agree(seats=[A, C])
    assert all(isinstance(error, JobFailed) for error in results.values())
    assert "r0.s1 ended the job" in str(results[A]) and "a mistake in the user's code" in str(results[C])
    assert "\n" not in str(results[A]), "its traceback is with the launcher, and with the member itself"
    assert "Traceback" in job.members[A]._watcher.facts.fatal.text


def test_a_plain_runtime_error_waits_for_news(job):
    job.agree()
    threading.Timer(0.1, lambda: job.store.append(Event(Kind.DEAD, A, text="killed"))).start()
    job.members[B].leave(RuntimeError("Read error: Connection reset by peer"))
    assert job.members[B].course.state is State.LEAVING


def test_deaths_during_agreement_and_in_a_row(job):
    job.agree()
    job.die(A)
    over(job, B)
    slow = threading.Timer(0.15, lambda: job.die(C))
    slow.start()
    view = job.agree(seats=[B])[B]
    assert view.members == (B,) and view.generation == 1


def test_a_late_member_is_reported_then_expelled_and_fenced(job):
    job.agree()
    job.die(A)
    over(job, B, C)
    started = time.monotonic()
    assert job.agree(seats=[B])[B].members == (B,)  # C lives, but does not join; no launcher answers
    assert TIMEOUTS.join_s < time.monotonic() - started < TIMEOUTS.join_s + TIMEOUTS.silence_s + 1
    events = [job.store.event(k) for k in range(10) if job.store.has_event(k)]
    assert [event.kind for event in events if event.seat == C] == [Kind.KILL, Kind.EXPELLED]
    assert isinstance(job.agree(seats=[C])[C], Fenced)
    assert job.members[C].course.state is State.FENCED


def test_a_straggler_finds_its_generation_gone(job):
    job.agree()
    job.die(A)
    over(job, B, C)
    job.agree(seats=[B, C])
    for generation in (2, 3):
        job.members[B].abort.set("x")
        job.members[B].leave(GenerationOver("x"))
        if generation == 2:
            job.store.append(Event(Kind.EXPELLED, C))
        job.agree(seats=[B])
    job.members[B].clean()
    job.members[C].leave(GenerationOver("x"))
    assert isinstance(job.agree(seats=[C])[C], Fenced)


def test_fruitless_generations_end_the_job(job):
    job.agree()
    for _ in range(MAX_FRUITLESS):
        for member in job.members.values():
            member.abort.set("no luck")
            member.leave(GenerationOver("x"))
        one_view(job.agree())
    for member in job.members.values():
        member.abort.set("no luck")
        member.leave(GenerationOver("x"))
    started = job.all(lambda seat: _agree_or_fail(job.members[seat]), list(job.members))
    assert all("no member was later" in str(error) for error in started.values())


def _agree_or_fail(member: Membership) -> View:
    try:
        return member.agree(Standing())
    except MembershipError as error:
        member.leave(error)


def test_a_joiner_is_admitted_at_the_next_agreement(job):
    job.agree()
    job.die(B)
    over(job, A, C)
    job.agree({seat: Standing(2, 2) for seat in (A, C)})
    for seat in (A, C):
        job.members[seat].run()
    joined = {}
    joiner = job.start(B, None, incarnation=1)
    thread = threading.Thread(target=lambda: joined.update(view=joiner.agree(Standing())))
    thread.start()
    assert wait_until(lambda: job.members[A].joiner_waits and job.members[C].joiner_waits, 2)
    view = one_view(job.agree({seat: Standing(6, 6) for seat in (A, C)}, seats=[A, C]))
    thread.join(5)
    assert joined["view"] == view and view.seats == ((A, B), (C,)) and view.step == 6
    assert view.joined == {A: 0, B: 2, C: 0} and view.incarnations[B] == 1
    assert not job.members[A].joiner_waits
    joiner.run()
    joiner.abort.check()  # the death of its predecessor is not its own


def test_a_joiner_that_dies_while_it_waits_is_forgotten(job):
    job.agree()
    job.die(B)
    over(job, A, C)
    job.agree(seats=[A, C])
    job.store.append(Event(Kind.WAITING, B, 1))
    assert wait_until(lambda: job.members[A].joiner_waits, 2)
    job.store.append(Event(Kind.DEAD, B, 1, text="killed again"))
    assert wait_until(lambda: not job.members[A].joiner_waits, 2)


def test_a_joiner_of_a_job_that_has_ended_is_told_so(job):
    job.agree()
    for member in job.members.values():
        member.run()
    job.all(lambda seat: job.members[seat].finish(), [A, B, C])
    joiner = job.start(Seat(1, 1), None)
    assert "nobody is left" in str(job.agree(seats=[Seat(1, 1)])[Seat(1, 1)])
    assert joiner.course.state is State.FENCED


def test_a_joiner_without_the_token_is_refused_and_the_job_goes_on(job, caplog):
    job.agree()
    stranger = JobStore(lambda: job.client, "guessed")
    stranger.put("joiner/r1.s1", replace(Standing(), fresh=True).to_json())
    with caplog.at_level(logging.WARNING):
        stranger.append(Event(Kind.WAITING, Seat(1, 1)))
        assert wait_until(lambda: "refused" in caplog.text, 2)
    assert not job.members[A].joiner_waits
    for member in job.members.values():
        member.run()
    assert len(one_view(job.agree()).members) == 3


def test_small_exchanges_need_no_channel(job):
    job.agree()
    results = job.all(lambda seat: job.members[seat].exchange("norm", str(seat)), [A, B, C])
    assert list(one_view(results).items()) == [(seat, str(seat)) for seat in (A, B, C)]
    job.die(C)
    over_error = job.all(lambda seat: job.members[seat].exchange("more", 1), [A, B])
    assert all(isinstance(error, GenerationOver) for error in over_error.values())


def test_members_finish_together(job):
    job.agree()
    for member in job.members.values():
        member.run()
    threading.Timer(0.1, lambda: job.all(lambda seat: job.members[seat].finish(), [C])).start()
    job.all(lambda seat: job.members[seat].finish(), [A, B])
    assert wait_until(lambda: all(m.course.state is State.ENDED for m in job.members.values()), 2)
    assert all(State.DONE in member.course.history for member in job.members.values())


def test_a_death_before_all_have_finished_keeps_the_others(job):
    job.agree()
    for member in job.members.values():
        member.run()
    threading.Timer(0.1, lambda: job.die(C)).start()
    results = job.all(lambda seat: job.members[seat].finish(), [A, B])
    assert all(isinstance(error, GenerationOver) for error in results.values())
    over(job, A, B)
    assert one_view(job.agree()).members == (A, B)


def test_the_lease_ends_a_member_whose_store_is_stuck():
    class Stuck(dist.Store):
        """Blocks for ever once told so, as a client does whose host does not answer."""

        def __init__(self, store):
            super().__init__()
            self.store, self.free = store, threading.Event()
            self.free.set()

        def __getattribute__(self, name):
            if name in ("set", "add", "check", "multi_get", "get", "compare_set", "wait"):
                object.__getattribute__(self, "free").wait(5)
                return getattr(object.__getattribute__(self, "store"), name)
            return object.__getattribute__(self, name)

    client, exits = Stuck(dist.HashStore()), []
    store = JobStore(lambda: client, "token")
    store.greet()
    member = Membership(store, A, View.founding(Topology.start([1])), timeouts=TIMEOUTS, end_process=exits.append)
    member.start()
    time.sleep(TIMEOUTS.lease_s + 0.1)
    assert exits == [] and member.lease.is_valid
    client.free.clear()
    assert wait_until(lambda: exits == [80], TIMEOUTS.lease_s * 2)
    assert not member.lease.is_valid
    client.free.set()
    member.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hosted():
    clock, killed = Clock(), []
    client = dist.HashStore()
    store = JobStore(lambda: client, "token")
    host = Host(store, [A, B, C], TIMEOUTS, lambda seat: killed.append(seat) or seat != C, clock)
    return host, store, clock, killed


def advance(hosted, seconds: float, beating=()) -> None:
    host, store, clock, _ = hosted
    for _ in range(round(seconds / TIMEOUTS.beat_s)):
        clock.now += TIMEOUTS.beat_s
        for seat in beating:
            store.count(beat_key(seat, 0))
        host.poll()


def test_the_host_kills_the_silent_and_tells_of_those_it_cannot_kill(hosted):
    host, store, _, killed = hosted
    advance(hosted, 0.2, [A, B, C])
    advance(hosted, TIMEOUTS.silence_s - 0.06, [A])
    assert killed == []
    advance(hosted, 0.2, [A])
    assert killed == [B, C] and host.facts.gone == {(C, 0)}  # B's end is told when its group is gone
    host.ended(B, "killed by the supervisor")
    advance(hosted, 0.1, [A])
    assert host.facts.gone == {(B, 0), (C, 0)} and killed == [B, C]


def test_who_has_said_that_it_leaves_gets_time_to_end(hosted):
    advance(hosted, 0.2, [A, B, C])
    hosted[1].append(Event(Kind.LEFT, A))
    advance(hosted, TIMEOUTS.silence_s + TIMEOUTS.shutdown_grace_s - 0.1, [B, C])
    assert hosted[3] == []
    advance(hosted, 0.3, [B, C])
    assert hosted[3] == [A]


def test_who_has_not_yet_given_a_sign_is_not_silent(hosted):
    advance(hosted, 3, [A])
    assert hosted[3] == []


def test_the_host_forgives_what_it_has_slept_through(hosted):
    advance(hosted, 0.2, [A, B, C])
    hosted[2].now += 10.0
    advance(hosted, 0.3, [A, B, C])
    assert hosted[3] == []


def test_the_host_kills_on_request_once_and_ends_are_told_once(hosted):
    host, store, _, killed = hosted
    store.append(Event(Kind.KILL, A))
    store.append(Event(Kind.KILL, A))
    advance(hosted, 0.1)
    assert killed == [A]
    store.append(Event(Kind.DONE, B))
    host.ended(B, "exit code 0")
    host.ended(A, "exit code -9")
    advance(hosted, 0.1)
    assert host.facts.gone == {(A, 0)} and store.has([beat_key(A, 0)])
    advance(hosted, 1.5)  # other launchers have stopped to read it
    assert not store.has([beat_key(A, 0)])


def test_the_host_finds_the_culprit_of_a_hang(hosted):
    host, store, _, killed = hosted
    for seat, waiting in ((A, {"sync": 4}), (B, {}), (C, {"sync": 4})):
        store.put(
            f"progress/{seat}/0", {"generation": 0, "step": 1, "phase": "forward", "waiting": waiting, "left": 3}
        )
    advance(hosted, TIMEOUTS.hang_s + 0.2, [A, B, C])
    assert killed == [B]


def test_the_store_stays_small_over_many_generations(job):
    clock, sizes = Clock(), []
    host = Host(job.store.clone(), [A, B, C], TIMEOUTS, lambda seat: True, clock)
    job.agree()
    for step in range(24):
        job.members[A].progress.failed_in = "control"
        job.members[A].leave(RuntimeError("Connection closed by peer"))
        over(job, B, C)
        assert one_view(job.agree({seat: Standing(step, step) for seat in (A, B, C)})).generation == step + 1
        for _ in range(2):  # it sees the new generation, and cleans when a second has passed
            host.poll()
            clock.now += 1.1
        host.poll()
        sizes.append(job.client.num_keys())
    assert max(sizes[8:]) <= max(sizes[:8]) + 1, sizes
