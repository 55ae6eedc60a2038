"""What the policies make of members' ends, on a supervisor that starts nothing."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist

from lightning_ntp.config import Timeouts
from lightning_ntp.membership.events import Event, Kind
from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.membership.host import Host
from lightning_ntp.membership.store import JobStore
from lightning_ntp.supervisor import MemberEnd, TolerateDeaths
from lightning_ntp.topology import Seat

SEATS = [Seat(0, 0), Seat(0, 1), Seat(1, 0)]
KILLED = 128 + signal.SIGKILL


@dataclass
class StandIn:
    """Notes what a policy asks for."""

    ends: list[MemberEnd] = field(default_factory=list)
    stop_signal: signal.Signals | None = None
    kill_after_s: list[float] = field(default_factory=list)
    started: list[int] = field(default_factory=list)

    def kill_after(self, delay_s: float) -> None:
        self.kill_after_s.append(delay_s)

    def start_member(self, rank: int) -> None:
        self.started.append(rank)


class Scene:
    def __init__(self, **arguments) -> None:
        client = dist.HashStore()
        self.store, self.supervisor = JobStore(lambda: client, "token"), StandIn()
        self.policy = TolerateDeaths(SEATS, Timeouts(), token="token", **arguments)
        self.policy.host = Host(self.store, SEATS, Timeouts(), lambda seat: True)

    def end(self, rank: int, code: int, killed: bool = False) -> None:
        end = MemberEnd(rank, str(SEATS[rank]), code, killed)
        self.supervisor.ends.append(end)
        self.policy.on_end(self.supervisor, end)

    def say(self, kind: Kind, rank: int, text: str = "") -> None:
        self.store.append(Event(kind, SEATS[rank], text=text))
        self.policy.on_poll(self.supervisor)

    @property
    def exit_code(self) -> int:
        return self.policy.exit_code(self.supervisor)


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
    assert scene.policy.note(scene.supervisor) == "r0.s1 ended the job:\nTraceback ...\nValueError: x"


def test_a_signal_gives_time_then_ends_the_job():
    scene = Scene(stop_grace_s=7.0)
    scene.supervisor.stop_signal = signal.SIGTERM
    scene.end(0, 128 + signal.SIGTERM)
    assert scene.supervisor.kill_after_s == [7.0] and scene.exit_code == 128 + signal.SIGTERM


def test_respawn_is_asked_for_deaths_only():
    asked = []
    scene = Scene(respawn=lambda end: asked.append(end.rank) or end.rank == 1)
    for rank, code in enumerate((KILLED, KILLED, int(ExitCode.SHARDS_LOST))):
        scene.end(rank, code)
    assert asked == [0, 1] and scene.supervisor.started == [1]
    assert scene.policy.member_env(1)["NTP_INCARNATION"] == "1" and scene.policy.member_env(0)["NTP_INCARNATION"] == "0"
    assert scene.policy.member_env(1)["NTP_SEAT"] == "r0.s1" and scene.policy.member_env(1)["NTP_TOKEN"] == "token"
    scene.say(Kind.FATAL, 0)
    scene.end(1, KILLED)
    assert asked == [0, 1]
