"""What a job is: declared once, read strictly."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_ntp.config import Timeouts
from lightning_ntp.errors import ConfigError, MembershipError
from lightning_ntp.membership.founding import Founding, Respawn, next_incarnation
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.topology import Seat, Topology

FOUNDING = Founding(Topology.start([2, 1], 3), Timeouts(lease_s=4, classify_s=6), Respawn(mode="once"))


@pytest.fixture
def store() -> JobStore:
    client = dist.HashStore()
    return JobStore(lambda: client, "token")


def test_it_says_who_sits_where():
    assert FOUNDING.members == (Seat(0, 0), Seat(0, 1), Seat(1, 0))
    assert FOUNDING.view == View.founding(FOUNDING.topology) and FOUNDING.view.nominal_degree == 3


def test_all_get_what_the_first_declared(store):
    assert Founding.read(store) is None
    assert FOUNDING.declare(store) == FOUNDING.declare(store) == Founding.read(store) == FOUNDING


def test_other_arguments_are_told(store):
    FOUNDING.declare(store)
    told = r"seats=\[\['r0.s0'\]\] here, \[\['r0.s0', 'r0.s1'\], \['r1.s0'\]\] there"
    with pytest.raises(MembershipError, match=told):
        Founding(Topology.start([1], 3), FOUNDING.timeouts, FOUNDING.respawn).declare(store)


@pytest.mark.parametrize(
    "change",
    [
        {"fault_tolerance": False},
        {"nominal_degree": 1},
        {"seats": [["r0.s0", "r0.s0"]]},
        {"seats": ["r0.s0"]},
        {"seats": [["nobody"]]},
        {"timeouts": {}},
        {"timeouts": {**FOUNDING.to_json()["timeouts"], "lease_s": 0}},
        {"timeouts": {**FOUNDING.to_json()["timeouts"], "lease_s": "3"}},
        {"timeouts": {**FOUNDING.to_json()["timeouts"], "x": 3}},
        {"respawn": {**FOUNDING.to_json()["respawn"], "mode": "sometimes"}},
        {"more": 1},
    ],
    ids=str,
)
def test_it_is_read_strictly(change):
    with pytest.raises(MembershipError):
        Founding.from_json({**FOUNDING.to_json(), **change})


def test_respawn_is_checked():
    with pytest.raises(ConfigError, match="respawn='sometimes': choose one of 'never', 'once', 'always'"):
        Respawn(mode="sometimes")
    with pytest.raises(ConfigError, match="first_delay_s=-1"):
        Respawn(first_delay_s=-1)


def test_no_two_processes_get_the_same_incarnation(store):
    assert [next_incarnation(store, Seat(0, 1)) for _ in range(3)] == [1, 2, 3]
    assert next_incarnation(store, Seat(0, 0)) == 1
