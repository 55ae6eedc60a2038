"""What the policies make of members' ends, on a supervisor that starts nothing."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist

from lightning_ntp.config import Timeouts
from lightning_ntp.errors import ConfigError, LaunchError
from lightning_ntp.membership.events import Event, Kind
from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.membership.founding import Respawn
from lightning_ntp.membership.latest import advance_latest
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.supervisor import MemberEnd, Node, TolerateDeaths
from lightning_ntp.supervisor.respawn import Respawner, may_return
from lightning_ntp.topology import Seat

SEATS = [Seat(0, 0), Seat(0, 1), Seat(1, 0)]
KILLED = 128 + signal.SIGKILL
ALWAYS = Respawn(mode="always")


@dataclass
class Site:
    """Where the store of these tests is."""

    client: dist.Store
    is_host: bool = True
    greets: bool = True
    address: str = "here:1"

    def connect(self, timeout_s: float) -> dist.Store:
        return self.client


@dataclass
class StandIn:
    """Starts nothing; notes what a policy asks for."""

    site: Site
    node: Node = field(default_factory=lambda: Node.alone(3))
    ends: list[MemberEnd] = field(default_factory=list)
    stop_signal: signal.Signals | None = None
    kill_after_s: list[float] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    fails_to_start: bool = False

    def __post_init__(self) -> None:
        self.running = set(self.node.ranks)

    def kill_after(self, delay_s: float) -> None:
        self.kill_after_s.append(delay_s)

    def start_member(self, rank: int) -> None:
        if self.fails_to_start:
            raise LaunchError(f"rank {rank} could not be started")
        self.started.append(rank)
        self.running.add(rank)

    def kill_member(self, rank: int) -> bool:
        self.killed.append(rank)
        return rank in self.running

    def kill(self) -> None:
        self.killed += self.running


class Scene:
    def __init__(self, node: Node | None = None, is_host: bool = True, **arguments) -> None:
        self.now, client = 0.0, dist.HashStore()
        self.store = JobStore(lambda: client, "token")
        self.supervisor = StandIn(Site(client, is_host), node or Node.alone(3))
        self.policy = TolerateDeaths(SEATS, Timeouts(), token="token", clock=lambda: self.now, **arguments)
        self.policy.on_start(self.supervisor)

    def end(self, rank: int, code: int, killed: bool = False) -> None:
        end = MemberEnd(rank, str(SEATS[rank]), int(code), killed)
        self.supervisor.ends.append(end)
        self.supervisor.running.discard(rank)
        self.policy.on_end(self.supervisor, end)

    def say(self, kind: Kind, rank: int, text: str = "", incarnation: int = 0) -> None:
        self.store.append(Event(kind, SEATS[rank], incarnation, text=text))
        self.poll()

    def poll(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.policy.on_poll(self.supervisor)

    def decide(self, generation: int, **incarnations: int) -> None:
        """A view with ``rank0=0``: which incarnation sits where."""
        numbers = {SEATS[int(name.removeprefix("rank"))]: number for name, number in incarnations.items()}
        seats = tuple(tuple(s for s in numbers if s.replica == r) for r in sorted({s.replica for s in numbers}))
        view = View(generation, 2, seats, joined=dict.fromkeys(numbers, 0), incarnations=numbers)
        self.store.put(f"view/{generation}", view.to_json())
        advance_latest(self.store, generation)

    @property
    def exit_code(self) -> int:
        return self.policy.exit_code(self.supervisor)

    @property
    def note(self) -> str:
        return self.policy.note(self.supervisor)


def test_a_job_whose_survivors_finish_ends_well():
    scene = Scene()
    scene.end(0, KILLED)
    for rank in (1, 2):
        scene.say(Kind.DONE, rank)
        scene.end(rank, 0)
    assert scene.exit_code == 0 and not scene.supervisor.kill_after_s
    assert scene.policy.note(scene.supervisor) == "lost on the way: rank 0 (r0.s0) was ended by SIGKILL"
    scene.policy.host.poll()
    assert scene.policy.host.facts.gone == {(SEATS[0], 0)}


def test_a_job_that_loses_everybody_does_not():
    scene = Scene()
    for rank, code in enumerate((KILLED, ExitCode.SHARDS_LOST, ExitCode.SHARDS_LOST)):
        scene.end(rank, int(code))
    assert scene.exit_code == KILLED
    assert "held by no live member" in scene.policy.note(scene.supervisor)


@pytest.mark.parametrize(("killed", "code"), [(False, 1), (True, 1)], ids=["ended", "stuck"])
def test_a_users_exception_gives_the_exit_code_and_the_text(killed, code):
    scene = Scene()
    scene.say(Kind.FATAL, 1, "Traceback ...\nValueError: x")
    assert scene.supervisor.kill_after_s == [Timeouts().shutdown_grace_s]
    scene.end(0, int(ExitCode.JOB_FAILED))
    scene.end(1, KILLED if killed else 1, killed)
    scene.end(2, 0)
    assert scene.exit_code == code
    told = "\nTraceback ...\nValueError: x" if killed else " ValueError: x (its traceback is above)"
    assert scene.policy.note(scene.supervisor) == f"r0.s1 ended the job:{told}"


def test_a_signal_gives_time_then_ends_the_job():
    scene = Scene(stop_grace_s=7.0)
    scene.supervisor.stop_signal = signal.SIGTERM
    scene.end(0, 128 + signal.SIGTERM)
    assert scene.supervisor.kill_after_s == [7.0] and scene.exit_code == 128 + signal.SIGTERM


def test_one_that_left_in_good_order_does_not_make_a_lost_job_a_finished_one():
    scene = Scene()
    scene.end(0, 0)
    scene.end(1, KILLED)
    scene.end(2, KILLED)
    assert scene.exit_code == KILLED


def test_a_script_that_never_comes_to_fit_ends_well():
    scene = Scene()
    for rank in range(3):
        scene.end(rank, 0)
    assert scene.exit_code == 0 and scene.note == ""


def test_another_number_of_members_is_an_error():
    with pytest.raises(ConfigError, match="the script asks for 3 members, but 2 are started"):
        Scene(Node.alone(2))


# Coming back


@pytest.mark.parametrize(
    ("code", "returns"),
    [
        (KILLED, True), (128 + signal.SIGSEGV, True), (ExitCode.LEASE_EXPIRED, True), (ExitCode.FENCED, True),
        (0, False), (1, False), (3, False), (200, False), (ExitCode.STORE_LOST, False), (ExitCode.SHARDS_LOST, False),
        (ExitCode.JOB_FAILED, False),
    ],
)  # fmt: skip
def test_who_may_come_back(code, returns):
    assert may_return(int(code)) is returns


def respawner(**settings) -> tuple[Respawner, list[float]]:
    clock = [0.0]
    respawner = Respawner(Respawn(**settings), lambda: clock[0])
    respawner.started(SEATS[0])
    return respawner, clock


def die_and_return(respawner: Respawner, clock: list[float]) -> float | None:
    """How long the next start takes; ``None`` if there is none within two hours."""
    respawner.died(SEATS[0])
    began = clock[0]
    while not respawner.due():
        clock[0] += 0.5
        if clock[0] - began > 7200:
            clock[0] = began
            return None
    respawner.started(SEATS[0])
    return clock[0] - began


def test_the_delay_doubles_up_to_a_minute_and_begins_anew_after_a_steady_life():
    it, clock = respawner(mode="always", tries_per_hour=100)
    assert [die_and_return(it, clock) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    clock[0] += 299
    assert die_and_return(it, clock) == 60
    clock[0] += 300
    assert [die_and_return(it, clock) for _ in range(2)] == [1, 2]


def test_ten_tries_an_hour_at_each_seat():
    it, clock = respawner(mode="always")
    assert None not in [die_and_return(it, clock) for _ in range(10)]
    assert die_and_return(it, clock) is None
    assert it.died(SEATS[0]) == "r0.s0 died after 10 new starts within an hour, and stays dead"
    assert it.died(SEATS[1]) == "r0.s1 is started again in 1.0 s"
    clock[0] += 3600
    assert die_and_return(it, clock) is not None


def test_once_and_never():
    it, clock = respawner(mode="once")
    assert die_and_return(it, clock) == 1 and die_and_return(it, clock) is None
    it, clock = respawner()
    assert die_and_return(it, clock) is None and it.died(SEATS[0]) == "" and not it.waits


def test_a_dead_member_comes_back_with_a_number_of_its_own():
    scene = Scene(respawn=ALWAYS)
    scene.end(1, KILLED)
    scene.poll(0.9)
    assert scene.supervisor.started == [] and scene.policy.waits(scene.supervisor)
    scene.poll(0.2)
    assert scene.supervisor.started == [1]
    env = scene.policy.member_env(1)
    assert (env["NTP_SEAT"], env["NTP_INCARNATION"], env["NTP_TOKEN"]) == ("r0.s1", "1", "token")
    assert scene.policy.member_env(0)["NTP_INCARNATION"] == "0"
    scene.end(1, KILLED)
    scene.poll()
    assert scene.policy.host.facts.gone == {(SEATS[1], 0), (SEATS[1], 1)}
    scene.end(2, 1)  # an error of its own
    scene.say(Kind.FATAL, 0)
    scene.poll(10)
    assert scene.supervisor.started == [1] and not scene.policy.waits(scene.supervisor)


def test_a_process_that_cannot_be_started_is_a_dead_one():
    scene = Scene(respawn=ALWAYS)
    scene.supervisor.fails_to_start = True
    scene.end(1, KILLED)
    scene.poll(1.1)
    scene.poll()
    assert scene.policy.host.facts.gone == {(SEATS[1], 0), (SEATS[1], 1)}


def test_a_return_on_request_needs_an_empty_seat():
    scene = Scene()
    scene.say(Kind.RETURN, 1)
    assert scene.supervisor.started == []
    scene.end(1, KILLED)
    scene.poll()
    scene.decide(0, rank0=0, rank1=5, rank2=0)  # started by hand
    scene.say(Kind.RETURN, 1)
    assert scene.supervisor.started == []
    scene.decide(1, rank0=0, rank2=0)
    scene.say(Kind.RETURN, 1)
    assert scene.supervisor.started == [1]


def test_nobody_waits_to_return_into_a_job_that_is_over():
    scene = Scene(respawn=ALWAYS)
    scene.decide(0, rank0=0, rank1=0)
    scene.end(2, KILLED)
    for rank in (0, 1):
        scene.say(Kind.DONE, rank)
        scene.end(rank, 0)
    assert not scene.policy.waits(scene.supervisor) and scene.exit_code == 0
    lost = Scene(respawn=ALWAYS)
    for rank in range(3):
        lost.end(rank, KILLED)
    assert not lost.policy.waits(lost.supervisor) and lost.exit_code == KILLED


def test_a_joiner_that_nobody_is_left_to_admit_is_ended():
    scene = Scene(respawn=ALWAYS)
    scene.decide(0, rank0=0, rank1=0)
    scene.end(2, KILLED)
    scene.poll(1.1)
    assert scene.supervisor.started == [2]
    scene.say(Kind.DONE, 0)
    assert scene.supervisor.killed == []
    scene.say(Kind.DONE, 1)
    assert scene.supervisor.killed == [2]


# One of several launchers

LAST = Node((2,), 3, 1, 2, title="node 1 of the job")


def test_a_node_whose_members_died_ends_well_while_the_job_goes_on():
    scene = Scene(LAST, is_host=False)
    scene.end(2, KILLED)
    assert scene.exit_code == 0 and not scene.policy.waits(scene.supervisor)
    assert scene.note == (
        "lost on the way: rank 2 (r1.s0) was ended by SIGKILL; no member is left here, but the job goes on elsewhere"
    )
    for rank in (0, 1):
        scene.say(Kind.DEAD, rank)
    assert scene.exit_code == KILLED and "goes on" not in scene.note


def test_a_node_says_that_the_model_is_lost():
    scene = Scene(LAST, is_host=False)
    scene.end(2, ExitCode.SHARDS_LOST)
    assert scene.exit_code == ExitCode.SHARDS_LOST


def test_a_node_waits_if_its_member_may_come_back():
    scene = Scene(LAST, is_host=False, respawn=ALWAYS)
    scene.end(2, KILLED)
    assert scene.policy.waits(scene.supervisor)
    scene.supervisor.stop_signal = signal.SIGTERM
    assert not scene.policy.waits(scene.supervisor)


def test_members_that_join_get_numbers_that_nobody_had():
    scene = Scene(respawn=ALWAYS)
    scene.end(2, KILLED)
    scene.poll(1.1)
    scene.decide(4, rank0=0, rank1=0)
    guest = TolerateDeaths(SEATS, Timeouts(), token="token", joins=True)
    guest.on_start(StandIn(Site(scene.supervisor.site.client, False, False), Node.joining([2], 3)))
    assert guest.member_env(2)["NTP_INCARNATION"] == "2" and scene.policy.member_env(2)["NTP_INCARNATION"] == "1"
