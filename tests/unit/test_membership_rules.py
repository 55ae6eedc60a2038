"""The pure rules: states, the committed step, who is late, who hangs, whose error it is; and the order of time
limits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.comm.abort import Abort
from lightning_ntp.comm.progress import Progress
from lightning_ntp.config import Timeouts
from lightning_ntp.errors import ConfigError, Fenced, GenerationOver, MembershipError
from lightning_ntp.membership.agreement import MAX_FRUITLESS, Standing, committed_step, late_member, next_view
from lightning_ntp.membership.classify import Verdict, classify
from lightning_ntp.membership.progress import Observed, Record, find_hang
from lightning_ntp.membership.states import EDGES, Course, State
from lightning_ntp.membership.view import View
from lightning_ntp.topology import Seat, Topology

A, B, C = Seat(0, 0), Seat(0, 1), Seat(1, 0)
FOUNDING = View.founding(Topology.start([2, 1], 2))


def test_every_edge_of_the_states_is_as_documented():
    table = State.__doc__.split("===\n")[2].splitlines()
    documented = {line.split()[0]: line.split("  ")[-1].strip() for line in table if line.strip("= ")}
    for state in State:
        followers = documented[state.name].split(", ") if EDGES[state] else []
        assert [follower.name for follower in EDGES[state]] == followers


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_only_documented_edges_can_be_taken(before, after):
    course = Course()
    course.state = before
    if after in EDGES[before]:
        course.to(after)
        assert course.state is after and course.history[-1] is after
    else:
        with pytest.raises(AssertionError):
            course.to(after)


def test_every_state_leads_to_the_end():
    reached = {State.ENDED}
    for _ in State:
        reached |= {state for state in State if reached & set(EDGES[state])}
    assert reached == set(State)


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=1, max_size=6), st.integers(0, 50))
def test_the_committed_step_is_never_behind_an_applied_one(ahead, step):
    """Members are at most one step apart, and have applied their step only if all have arrived there."""
    arrived = [step + extra for extra, _ in ahead]
    voted = min(arrived)
    standings = {
        Seat(0, index): Standing(at, at if applies and at == voted else at - 1)
        for index, (at, (_, applies)) in enumerate(zip(arrived, ahead, strict=True))
    }
    committed = committed_step(standings)
    assert committed == voted >= max(standing.applied for standing in standings.values())


def test_a_step_that_was_applied_too_early_is_found():
    with pytest.raises(MembershipError, match="r0.s1 has applied 5"):
        committed_step({A: Standing(4, 4), B: Standing(5, 5)})


def test_the_view_takes_over_the_vote_on_the_committed_step():
    vote = {"step": 3, "norm": 1.0}
    standings = {A: Standing(3, 2), B: Standing(3, 3, vote), C: Standing(4, 3, {"step": 3, "norm": 1.0})}
    assert next_view(FOUNDING, standings, {}, 0).vote == vote
    assert next_view(FOUNDING, {A: Standing(3, 2, {"step": 2}), C: Standing(3, 2)}, {}, 0).vote is None


def test_deaths_and_joiners_make_the_next_view():
    view = next_view(FOUNDING, {B: Standing(), C: Standing()}, {}, 9)
    assert view.seats == ((B,), (C,)) and view.generation == 0 and view.events == 9 and view.fruitless == 0
    grown = next_view(view, {B: Standing(2, 2), C: Standing(2, 2)}, {A: Standing(fresh=True, incarnation=1)}, 12)
    assert grown.seats == ((B, A), (C,)) and grown.incarnations[A] == 1 and grown.joined[A] == 1
    assert grown.leader == B and grown.step == 2 and set(grown.holdings) == {B, C}


def test_generations_without_a_death_and_without_a_step_are_counted():
    view = next_view(FOUNDING, {A: Standing(), B: Standing(), C: Standing()}, {}, 0)
    for expected in range(1, MAX_FRUITLESS + 1):
        assert late_member(view, {A: Standing(took_s=9), B: Standing()}, 1.0) is None
        view = next_view(view, dict.fromkeys((A, B, C), Standing()), {}, 0)
        assert view.fruitless == expected
    assert late_member(view, {A: Standing(took_s=9), B: Standing(), C: Standing()}, 1.0) == A
    with pytest.raises(MembershipError, match="no member was later"):
        late_member(view, dict.fromkeys((A, B, C), Standing(took_s=2)), 1.0)
    assert next_view(view, dict.fromkeys((A, B, C), Standing(0, 0)), {}, 0).fruitless == 0
    assert next_view(view, dict.fromkeys((A, C), Standing()), {}, 0).fruitless == 0


def test_a_standing_is_read_strictly():
    data = Standing(3, 2, {"step": 3}, ["x"], incarnation=1, took_s=0.25).to_json()
    assert Standing.from_json(data) == Standing(3, 2, {"step": 3}, ["x"], incarnation=1, took_s=0.25)
    for change in ({"arrived": 1}, {"vote": {}}, {"fresh": 1}, {"x": 1}, {"incarnation": -1}):
        with pytest.raises(MembershipError):
            Standing.from_json({**data, **change})


LIMITS = Timeouts(join_s=15, hang_s=20, slow_hang_s=100)


def record(phase="forward", waiting=(), generation=0) -> Record:
    return Record(generation, 5, phase, tuple(waiting), 10)


def test_the_culprit_is_the_one_outside():
    waits = Observed(record("sync", [("data_parallel", 3)]), 21)
    cases = (("forward", 21, (B,)), ("forward", 5, None), ("data", 50, None), ("data", 101, (B,)))
    for phase, age_s, culprits in cases:
        hang = find_hang({A: waits, B: Observed(record(phase), age_s), C: waits}, LIMITS)
        assert (hang and hang.culprits) == culprits
    assert find_hang({A: Observed(record("sync", [("x", 1)]), 5), B: Observed(record(), 500)}, LIMITS) is None
    assert find_hang({}, LIMITS) is None


def test_who_waits_in_another_collective_is_no_culprit():
    observed = {seat: Observed(record("sync", [("x", n)]), 30) for n, seat in enumerate((A, B, C))}
    hang = find_hang(observed, LIMITS)
    assert hang.culprits == () and "do not match" in hang.text


def test_a_member_of_an_older_generation_is_no_evidence():
    waits = Observed(record("change", [("control", 1)], generation=2), 30)
    assert find_hang({A: waits, B: Observed(record(generation=1), 500)}, LIMITS).culprits == ()


def test_while_members_agree_nobody_hangs():
    records = {A: record("agree"), B: record("sync", [("x", 1)]), C: record()}
    observed = {seat: Observed(entry, 30) for seat, entry in records.items()}
    assert find_hang(observed, LIMITS) is None


def test_records_are_read_strictly():
    progress = Progress(2, 7, "vote")
    progress.enter("control", 4)
    data = Record.of(progress).to_json()
    assert Record.from_json(data) == Record.of(progress)
    for change in ({"waiting": {"x": "y"}}, {"left": -1}, {"more": 0}):
        with pytest.raises(MembershipError):
            Record.from_json({**data, **change})


@pytest.mark.parametrize(
    ("error", "is_over", "failed_in", "verdict"),
    [
        (GenerationOver("x"), False, None, Verdict.OVER),
        (RuntimeError("x"), True, None, Verdict.OVER),
        (RuntimeError("x"), False, "control", Verdict.OVER),
        (RuntimeError("x"), False, None, Verdict.OWN),
        (ValueError("x"), True, "control", Verdict.OWN),
        (NotImplementedError("x"), True, None, Verdict.OWN),
        (torch.OutOfMemoryError("x"), True, None, Verdict.OWN),
        (Fenced("x"), True, None, Verdict.OWN),
    ],
)
def test_whose_error_it_is(error, is_over, failed_in, verdict):
    abort, progress = Abort(0), Progress(failed_in=failed_in)
    if is_over:
        abort.set("a member died")
    assert classify(error, abort, progress, 0.01) is verdict


def test_a_failure_flag_is_set_once_and_breaks_everything_once():
    abort, broken = Abort(3), []
    abort.add(lambda: broken.append(1))
    abort.add(lambda: 1 / 0)  # logged; the others are broken all the same
    abort.add(lambda: broken.append(2))
    abort.check()
    assert abort.set("first") and not abort.set("second")
    abort.add(lambda: broken.append(3))
    assert broken == [1, 2, 3]
    with pytest.raises(GenerationOver, match="generation 3 is over: first"):
        abort.check()


@pytest.mark.parametrize(
    "values",
    [
        dict(lease_s=0.2),
        dict(lease_margin_s=3.5),
        dict(classify_s=3.9),
        dict(join_s=4.0),
        dict(hang_s=14.0),
        dict(hang_s=50.0, slow_hang_s=49.0),
        dict(slow_hang_s=1801.0),
        dict(build_s=1801.0),
        dict(shutdown_grace_s=300.0),
        dict(start_s=1801.0),
        dict(beat_s=0.0),
        dict(lease_s=float("nan")),
        dict(collective_s=float("inf")),
    ],
)
def test_a_wrong_order_of_time_limits_is_an_error_with_all_values(values):
    with pytest.raises(ConfigError) as caught:
        Timeouts(**values)
    assert all(f"{name}=" in str(caught.value) for name in Timeouts.__dataclass_fields__)


def test_every_time_limit_is_documented():
    assert all(f"        {name}:" in Timeouts.__doc__ for name in Timeouts.__dataclass_fields__)
