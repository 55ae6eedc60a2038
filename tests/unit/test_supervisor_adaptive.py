"""The policy that learns from the members what the job is; several supervisors on one store, which start nothing."""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist

from lightning_ntp.config import Timeouts
from lightning_ntp.errors import ConfigError, LaunchError
from lightning_ntp.membership.events import Event, Kind
from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.membership.founding import Founding
from lightning_ntp.membership.store import JobStore
from lightning_ntp.supervisor import Adaptive, MemberEnd, Node
from lightning_ntp.topology import Topology
from tests.unit.test_supervisor_policies import KILLED, Site, StandIn

FOUNDING = Founding(Topology.start([2, 2]), Timeouts())
SEATS = FOUNDING.members


class Client:
    """A store whose host may go."""

    def __init__(self) -> None:
        self.store, self.is_gone = dist.HashStore(), False

    def __getattr__(self, name: str):
        if self.is_gone:
            raise dist.DistNetworkError("failed to recv, got 0 bytes")
        return getattr(self.store, name)


TWO_NODES = (Node.one_of(2, 0, 2), Node.one_of(2, 1, 2))


class Scene:
    """Two nodes of two members each; node 0 hosts the store."""

    def __init__(self, nodes=TWO_NODES, **arguments) -> None:
        self.now, self.client = 0.0, Client()
        self.store = JobStore(lambda: self.client, "token")
        self.supervisors, self.policies = [], []
        for node in nodes:
            self.start(node, is_host=node.index == 0, **arguments)

    def start(self, node: Node, is_host: bool = False, **arguments) -> None:
        supervisor = StandIn(Site(self.client, is_host, greets=is_host), node)
        policy = Adaptive("token", clock=lambda: self.now, **arguments)
        policy.on_start(supervisor)
        self.supervisors.append(supervisor)
        self.policies.append(policy)

    def end(self, index: int, rank: int, code: int) -> None:
        supervisor = self.supervisors[index]
        supervisor.ends.append(MemberEnd(rank, "", int(code), killed=False))
        supervisor.running.discard(rank)
        self.policies[index].on_end(supervisor, supervisor.ends[-1])

    def poll(self, seconds: float = 0.0, nodes=(0, 1)) -> None:
        for _ in range(max(1, round(seconds))):
            self.now += min(seconds, 1.0)
            for index in nodes:
                self.policies[index].on_poll(self.supervisors[index])

    def waits(self, index: int) -> bool:
        return self.policies[index].waits(self.supervisors[index])

    def finish(self, index: int) -> tuple[int, str]:
        policy, supervisor = self.policies[index], self.supervisors[index]
        result = policy.exit_code(supervisor), policy.note(supervisor)
        policy.on_finish(supervisor, result[0])
        return result


@pytest.fixture
def scene():
    scene = Scene()
    yield scene
    for policy, supervisor in zip(scene.policies, scene.supervisors, strict=True):
        policy.on_finish(supervisor, 0)  # ends the guards


def test_before_anybody_knows_a_failure_ends_the_job_on_all_nodes(scene):
    assert scene.policies[0].member_env(0) == {"NTP_TOKEN": "token", "NTP_INCARNATION": "0"}
    scene.end(1, 2, 3)
    assert scene.supervisors[1].kill_after_s == [5.0]
    scene.poll(2)
    assert scene.supervisors[0].kill_after_s[0] == 5.0
    FOUNDING.declare(scene.store)  # too late
    scene.poll()
    assert scene.policies[0].tolerant is None
    scene.end(0, 0, KILLED)
    assert scene.finish(0) == (3, "node 1: rank 2 exited with code 3") and scene.finish(1)[0] == 3


def test_once_it_is_known_deaths_are_tolerated(scene):
    FOUNDING.declare(scene.store)
    scene.end(1, 3, KILLED)  # seen although nobody has polled since
    scene.poll(1)
    assert not scene.supervisors[1].kill_after_s and not scene.supervisors[0].kill_after_s
    facts = scene.policies[0].tolerant.host.facts
    assert facts.gone == {(SEATS[3], 0)} and facts.causes[SEATS[3], 0] == "rank 3 (r1.s1) was ended by SIGKILL"
    assert scene.policies[1].member_env(2)["NTP_SEAT"] == "r1.s0"


def test_a_supervisor_that_knows_says_it_itself():
    scene = Scene([Node.alone(4)], founding=FOUNDING)
    assert Founding.read(scene.store) == FOUNDING
    scene.end(0, 2, KILLED)
    assert not scene.supervisors[0].kill_after_s


def test_who_ended_well_before_the_job_began_is_not_waited_for(scene):
    scene.end(0, 1, 0)
    FOUNDING.declare(scene.store)
    scene.poll(1)
    assert scene.policies[1].tolerant.host.facts.gone == {(SEATS[1], 0)}


def test_another_number_of_members_ends_the_job(scene):
    Founding(Topology.start([2, 1]), Timeouts()).declare(scene.store)
    with pytest.raises(ConfigError, match="the script asks for 3 members, but 4 are started"):
        scene.poll()


def test_the_stores_host_waits_for_the_other_nodes(scene):
    FOUNDING.declare(scene.store)
    scene.poll(1)
    for rank in (0, 1):
        scene.store.append(Event(Kind.DONE, SEATS[rank]))
        scene.end(0, rank, 0)
    assert scene.waits(0)
    for rank in (2, 3):
        scene.store.append(Event(Kind.DONE, SEATS[rank]))
        scene.end(1, rank, 0)
    assert scene.waits(0) and not scene.waits(1)
    assert scene.finish(1) == (0, "")
    assert not scene.waits(0) and scene.finish(0) == (0, "")


def test_the_stores_host_does_not_wait_for_a_node_that_is_lost(scene):
    FOUNDING.declare(scene.store)
    scene.poll(1)
    for rank in (0, 1):
        scene.store.append(Event(Kind.DONE, SEATS[rank]))
        scene.end(0, rank, 0)
    scene.poll(4, nodes=(0,))
    assert scene.waits(0)
    scene.poll(2, nodes=(0,))
    assert not scene.waits(0)


def test_a_lost_node_ends_a_job_that_tolerates_nothing(scene):
    scene.poll(2)
    scene.poll(29, nodes=(0,))
    assert not scene.supervisors[0].kill_after_s
    scene.poll(3, nodes=(0,))
    assert scene.supervisors[0].kill_after_s
    assert scene.finish(0) == (1, "node 1: its supervisor gave no sign of life for 30 s")


@pytest.mark.parametrize("tolerates", [True, False])
def test_a_stopped_host_of_the_store_ends_the_others_with_a_word(scene, tolerates):
    if tolerates:
        FOUNDING.declare(scene.store)
    scene.poll(1)
    scene.supervisors[0].stop_signal = signal.SIGTERM
    for rank in (0, 1):
        scene.end(0, rank, 128 + signal.SIGTERM)
    assert scene.waits(0)
    scene.poll(2)
    assert scene.supervisors[1].kill_after_s
    scene.poll(4)
    assert not scene.waits(0) and scene.finish(0)[0] == 128 + signal.SIGTERM
    for rank in (2, 3):
        scene.end(1, rank, ExitCode.JOB_FAILED)
    code, note = scene.finish(1)
    assert code != 0 and ("stopped by SIGTERM" in note if tolerates else "rank 0 was ended by SIGTERM" in note)


def test_without_the_store_everything_ends(scene):
    FOUNDING.declare(scene.store)
    scene.poll(1)
    scene.client.is_gone = True
    scene.poll(1)
    assert scene.supervisors[1].kill_after_s == [FOUNDING.timeouts.shutdown_grace_s]
    for rank in (2, 3):
        scene.end(1, rank, ExitCode.STORE_LOST)
    assert not scene.waits(1)
    assert scene.finish(1) == (ExitCode.STORE_LOST, "the job's store at here:1 is gone, and with it the job")


def test_a_store_that_goes_when_all_is_done_is_no_loss(scene):
    FOUNDING.declare(scene.store)
    scene.poll(1)
    scene.client.is_gone = True
    for rank in (2, 3):
        scene.end(1, rank, 0)
    assert scene.finish(1) == (0, "")


def test_a_node_is_started_once(scene):
    with pytest.raises(LaunchError, match=r"node 1 of this job was started before.*--join"):
        scene.start(Node.one_of(2, 1, 2))


def test_the_stores_host_waits_for_guests_too(scene):
    FOUNDING.declare(scene.store)
    for rank in (2, 3):
        scene.start(Node.joining([rank], 4), joins=True)
    for index in (1, 2):
        scene.finish(index)
    assert scene.waits(0)
    scene.finish(3)
    assert not scene.waits(0)


def test_torchruns_processes_need_no_word_of_each_other():
    nodes = [Node((rank,), 4, is_shim=True, index=1) for rank in range(4)]
    scene = Scene()
    supervisor = StandIn(Site(scene.client, False, True), nodes[2])
    policy = Adaptive("token", founding=FOUNDING)
    policy.on_start(supervisor)
    supervisor.ends.append(MemberEnd(2, "", KILLED, False))
    policy.on_end(supervisor, supervisor.ends[0])
    assert policy.exit_code(supervisor) == 0 and not policy.waits(supervisor)
    assert "the job goes on elsewhere" in policy.note(supervisor)
    policy.on_finish(supervisor, 0)
