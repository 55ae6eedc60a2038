"""Windows begun again at other shares: nothing lost, nothing doubled, whatever happens at which micro-batch."""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_ntp.data import MicroBatch, ShareLoader
from lightning_ntp.policy import deal
from tests.unit.data_helpers import Buckets, Noisy, Squares, global_batches, ids_of, make_loaders, take, walk


class Fleet:
    """The loaders of all replicas at work on one epoch, and what of it is committed.

    Args:
        loader: The user's.
        shares: Those at the start.
        is_constant: Whether all shares have one sum, so that a window always has the same samples.
        arguments: For ``ShareLoader``.

    Attributes:
        loaders: One a replica.
        windows: For each window the samples of its micro-batches, over all replicas, as they were yielded last.
    """

    def __init__(self, loader: DataLoader, shares: tuple[int, ...], is_constant: bool, **arguments: Any) -> None:
        self.is_constant = is_constant
        self.make = lambda shares: [
            ShareLoader(loader, replica=r, shares=shares, seed=5, **arguments) for r in range(len(shares))
        ]
        self.loaders = self.make(shares)
        self.windows: dict[int, list[list[Any]]] = {}
        self.counts: dict[int, int] = {}
        self.samples: dict[int, int] = {}
        self.in_hand: int | None = None
        for one in self.loaders:
            iter(one)

    @property
    def length(self) -> int:
        (length,) = {len(one) for one in self.loaders}
        return length

    def step(self) -> bool:
        """One micro-batch on every replica; False at the epoch's end."""
        items = [next(one, None) for one in self.loaders]
        if items[0] is None:
            assert all(item is None for item in items)
            return False
        facts: list[MicroBatch] = [one.current for one in self.loaders]
        first = facts[0]
        assert len({(f.epoch, f.window, f.index, f.count, f.global_samples) for f in facts}) == 1
        for item, fact in zip(items, facts, strict=True):
            loaded = [*(i for batch, _ in fact.extra for i in batch.tolist()), *item.tolist()]
            assert fact.is_dummy or loaded == [i * i for i in fact.sample_ids]
            assert fact.is_dummy == (not fact.sample_ids) and len(fact.sample_ids) == fact.num_samples
        assert self.counts.setdefault(first.window, first.count) == first.count, "Lightning has counted them"
        samples = self.samples.setdefault(first.window, first.global_samples)
        assert first.global_samples == samples or not self.is_constant
        if self.in_hand != first.window:
            self.windows[first.window] = []
        self.in_hand = first.window
        done = self.windows[first.window]
        assert len(done) == first.index
        done.append(sum((list(fact.sample_ids) for fact in facts), []))
        assert not first.is_last or first.global_samples == sum(map(len, done))
        return True

    def begin_again(self, shares: tuple[int, ...]) -> None:
        for one in self.loaders:
            one.begin_again(shares)
        if self.in_hand is not None:
            self.windows[self.in_hand] = []

    def reshare(self, shares: tuple[int, ...]) -> None:
        for one in self.loaders:
            one.reshare(shares)

    def resume(self, shares: tuple[int, ...]) -> None:
        """Go on in new processes."""
        state = self.loaders[0].state_dict()
        assert all(one.state_dict() == state for one in self.loaders)
        self.loaders = self.make(shares)
        for one in self.loaders:
            one.load_state_dict(state)
            iter(one)
            assert one.state_dict() == {**state, "shares": one.state_dict()["shares"]}
        if not state["index"]:
            self.in_hand = None  # nothing to go back to

    def committed(self) -> list[list[Any]]:
        return [sum(self.windows[number], []) for number in sorted(self.windows)]


EVENTS = ("begin_again", "begin_again", "reshare", "resume")


@st.composite
def jobs(draw):
    replicas = draw(st.integers(1, 4))
    k, drop_last = draw(st.integers(1, 4)), draw(st.booleans())
    # drop_last keeps a part of the partial window only where the live replicas have equal shares.
    share = st.sampled_from([0, k, 2 * k]) if drop_last and draw(st.booleans()) else st.integers(0, 7)
    sizes = st.lists(share, min_size=replicas, max_size=replicas).filter(any).map(tuple)
    shares, is_constant = draw(sizes), draw(st.booleans())
    others = sizes.map(lambda weights: deal(sum(shares), weights)) if is_constant else sizes
    event = st.none() | st.tuples(st.sampled_from(EVENTS), st.integers(0, 5))
    return {
        "shares": shares,
        "constant": is_constant,
        "others": draw(st.lists(others, min_size=6, max_size=6)),
        "k": k,
        "length": draw(st.integers(1, 30)),
        "drop_last": drop_last,
        "limit": draw(st.sampled_from([None, None, None, 1, 3, 4, 6, 7, 9])),
        "lists": draw(st.none() | st.none() | st.lists(st.integers(1, 5), min_size=1, max_size=15)),
        "cap": draw(st.none() | st.integers(1, 3)),
        # What happens before each micro-batch, from the epoch's start.
        "events": draw(st.lists(event, min_size=6, max_size=24)),
    }


def fleet_of(job: dict[str, Any]) -> Fleet:
    if job["lists"]:
        job["length"], job["drop_last"] = sum(job["lists"]), False
        loader = DataLoader(Squares(job["length"]), batch_sampler=Buckets(job["lists"]))
    else:
        loader = DataLoader(Squares(job["length"]), batch_size=2, shuffle=True, drop_last=job["drop_last"])
    shares = job["shares"]
    assume(not job["drop_last"] or all(job["length"] >= sum(each) for each in (shares, *job["others"])))
    arguments = {"micro_batches": job["k"], "max_micro_batch": job["cap"], "limit": job["limit"]}
    return Fleet(loader, shares, job["constant"], **arguments)


@given(jobs())
@settings(max_examples=120, deadline=None)
def test_whatever_happens_an_epoch_is_a_permutation(job):
    fleet = fleet_of(job)
    limit = float("inf") if job["limit"] is None else job["limit"]
    order = fleet.loaders[0]._order
    events = [event and (event[0], job["others"][event[1]]) for event in job["events"]]
    length, logical = fleet.length, 0
    for event in chain(events, repeat(None)):
        if event is not None:
            name, shares = event
            getattr(fleet, name)(shares)
            length, logical = fleet.length, fleet.loaders[0].state_dict()["yielded"]
        assert min(fleet.length, limit) == min(length, limit), "len() moves with an event only"
        if not fleet.step():
            break
        logical += 1
    assert logical == min(length, limit)
    batches = fleet.committed()
    assert all(len(fleet.windows[w]) == fleet.counts[w] for w in fleet.windows)
    # Every window holds the next samples of the order; all but the last have k micro-batches, as Lightning counts.
    start = 0
    for batch in batches:
        assert sorted(batch) == sorted(order.at(range(start, start + len(batch)))) and batch
        start += len(batch)
    assert all(fleet.counts[w] == job["k"] for w in sorted(fleet.windows)[:-1])
    if job["limit"] is None and not job["drop_last"]:
        assert start == job["length"]
    if job["limit"] is None and job["drop_last"]:
        assert job["length"] - start < max(map(sum, (job["shares"], *job["others"])))


def begun_again(loader, shares, stop, others, k=1, **arguments):
    """Every replica's facts of an epoch whose window in hand is begun again after ``stop`` micro-batches."""
    facts = []
    for one in make_loaders(loader, shares, k, **arguments):
        iter(one)
        before = take(one, stop)
        one.begin_again(others)
        position = one.state_dict()["yielded"]
        facts.append(before[:position] + take(one, len(one) - position))
        with pytest.raises(StopIteration):
            next(one)
    return facts


@pytest.mark.parametrize("num_workers, persistent", [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("stop", [3, 4])  # in the middle of the second window, and behind its last micro-batch
def test_begin_again_with_workers(num_workers, persistent, stop):
    loader = DataLoader(Squares(37), batch_size=4, shuffle=True, num_workers=num_workers, persistent_workers=persistent)
    undisturbed = global_batches([walk(one) for one in make_loaders(loader, (8, 8), 2)])
    facts = begun_again(loader, (8, 8), stop, (16, 0), k=2)
    assert global_batches(facts) == undisturbed
    assert [fact.num_samples for fact in facts[0]] == [4, 4, 8, 8, 5]
    assert [fact.is_dummy for fact in facts[1]] == [False, False, True, True, True]


def test_a_window_begun_again_at_fewer_samples_leaves_the_others_for_later():
    loader = DataLoader(Squares(48), batch_size=4, shuffle=True)
    order = sum(global_batches([walk(one) for one in make_loaders(loader, (8, 8))]), [])
    facts = begun_again(loader, (8, 8), 2, (8, 6))
    assert [len(batch) for batch in global_batches(facts)] == [16, 14, 14, 4]
    assert sum(global_batches(facts), []) == order


def test_the_epochs_last_window_keeps_its_samples():
    # A window of 16 and one of 7 in two micro-batches, which Lightning knows to be the last.
    facts = begun_again(DataLoader(Squares(23), batch_size=4), (8, 8), 6, (8, 0), k=4)
    assert [(f.window, f.count, f.num_samples) for f in facts[0]] == [(0, 4, 2)] * 4 + [(1, 2, 4), (1, 2, 3)]
    facts = begun_again(DataLoader(Squares(23), batch_size=4), (8, 8), 6, (8, 0), k=4, max_micro_batch=3)
    assert [fact.passes for fact in facts[0]][4:] == [(2, 2), (3,)]


def test_what_drop_last_drops_stays_dropped():
    # A window of 16 and, of the 15 left, three micro-batches of 2 on each replica. The tail of 3 would do for one of 2.
    facts = begun_again(DataLoader(Squares(31), batch_size=4, drop_last=True), (8, 8), 5, (8, 0), k=4)
    assert [(f.window, f.count, f.num_samples) for f in facts[0]] == [(0, 4, 2)] * 4 + [(1, 3, 4)] * 3


def test_a_window_begun_again_does_not_grow():
    facts = begun_again(DataLoader(Squares(48), batch_size=4), (8, 0), 1, (8, 8))
    assert [len(batch) for batch in global_batches(facts)] == [8, 16, 16, 8]


def test_a_window_that_the_limit_cuts_short_is_begun_again_as_short():
    arguments = {"k": 4, "limit": 6}
    loader = DataLoader(Squares(64), batch_size=4)
    whole = [walk(one) for one in make_loaders(loader, (8, 8), **arguments)]
    facts = []
    for one in make_loaders(loader, (8, 8), **arguments):
        iter(one)
        facts.append(take(one, 4))
        take(one, 2)
        one.begin_again((16, 0))
        facts[-1] += take(one, 2)
        with pytest.raises(StopIteration):
            next(one)
    assert global_batches(facts) == global_batches(whole) == [list(range(16)), list(range(16, 24))]


def test_at_a_loss_after_the_loss_all_come_to_the_same_window():
    """Whether a member has yielded something in between or not."""
    quick, slow = make_loaders(DataLoader(Squares(48), batch_size=4), (8, 8), 2)
    for one in (quick, slow):
        take(one, 3)
        one.begin_again((8, 6))
    take(quick, 2)  # the whole window
    for one in (quick, slow):
        one.begin_again((8, 8))
    assert quick.state_dict() == slow.state_dict()
    facts = [take(one, len(one) - 2) for one in (quick, slow)]
    assert [len(batch) for batch in global_batches(facts)] == [14, 16, 2]


def test_the_epochs_last_window_is_the_one_that_the_former_shares_made_so():
    # Of 31 samples drop_last drops 15 at (8, 8); at (8, 0) eight of them are a window.
    loader = DataLoader(Squares(31), batch_size=4, drop_last=True)
    assert [len(batch) for batch in global_batches(begun_again(loader, (8, 8), 1, (8, 0)))] == [16, 8]
    one = make_loaders(loader, (8, 8))[0]
    take(one, 1)
    one.reshare((8, 0))  # announced before
    one.begin_again((8, 0))
    assert [fact.num_samples for fact in take(one, len(one))] == [16, 8]


def test_before_the_first_micro_batch_there_is_nothing_to_go_back_to():
    loader = DataLoader(Squares(32), batch_size=4)
    (one, _), (other, _) = make_loaders(loader, (8, 8)), make_loaders(loader, (12, 4))
    iter(one)
    one.begin_again((12, 4))
    assert take(one, 2) == walk(other)
    iter(one)  # the next epoch
    one.begin_again((8, 8))
    assert one.state_dict()["yielded"] == 0 and take(one, 1)[0].num_samples == 8


def test_a_resumed_run_goes_back_to_the_windows_start():
    loader = DataLoader(Squares(48), batch_size=4, shuffle=True)
    facts = []
    for old, new in zip(make_loaders(loader, (8, 8), 2), make_loaders(loader, (9, 7), 2), strict=True):
        iter(old)
        before = take(old, 3)
        new.load_state_dict(old.state_dict())
        iter(new)
        new.begin_again((4, 12))
        assert new.state_dict()["yielded"] == 2
        facts.append(before[:2] + take(new, 4))
    assert [fact.num_samples for fact in facts[0]] == [4, 4, 2, 2, 2, 2]
    assert sorted(sum(global_batches(facts), [])) == list(range(48))


def test_a_resumed_window_knows_the_shares_that_it_was_cut_by():
    loader = DataLoader(Squares(48), batch_size=4)
    old, new = make_loaders(loader, (8, 8), 2)[0], make_loaders(loader, (8, 6), 2)[0]
    take(old, 3)
    old.reshare((8, 6))
    new.load_state_dict(old.state_dict())
    new.begin_again((8, 6))
    assert next(new) is not None and (new.current.index, new.current.global_samples) == (0, 14)


def test_who_joins_takes_the_state_made_after_the_call():
    loader = DataLoader(Squares(39), batch_size=4, shuffle=True)  # a partial window of 7 in two micro-batches of four
    veteran, _ = make_loaders(loader, (8, 8), 4)
    iter(veteran)
    take(veteran, 10)
    veteran.begin_again((16, 0))
    _, joiner = make_loaders(loader, (16, 0), 4)
    joiner.load_state_dict(veteran.state_dict())
    iter(joiner)
    assert len(joiner) == len(veteran) == 10
    facts = take(veteran, 2), take(joiner, 2)
    assert [(f.window, f.count, f.num_samples) for f in facts[0]] == [(2, 2, 4), (2, 2, 3)]
    assert [(f.window, f.count, f.is_dummy) for f in facts[1]] == [(2, 2, True)] * 2


def test_a_resume_under_another_limit_begins_the_cut_window_again():
    old = make_loaders(DataLoader(Squares(64), batch_size=4), (8, 8), 4, limit=6)[0]
    iter(old)
    take(old, 5)
    facts = []
    for new in make_loaders(DataLoader(Squares(64), batch_size=4), (8, 8), 4):
        with pytest.warns(UserWarning, match="2 replicas and 2 of 4 micro-batches, not 2 and 4 of 4.*begun again"):
            new.load_state_dict(old.state_dict())
        facts.append(walk(new))
    assert sorted(sum(global_batches(facts), [])) == list(range(16, 64))


def test_a_sample_loaded_again_meets_the_same_random_numbers():
    loader = DataLoader(Noisy(32), batch_size=4, shuffle=True, collate_fn=list, num_workers=2)
    one, other = make_loaders(loader, (8, 8), 2)
    first = {item[0]: item for loader in (one, other) for _ in range(2) for item in next(loader)}
    one.begin_again((16, 0))
    again = {item[0]: item for _ in range(2) for item in next(one)}
    assert again == first and len(first) == 16


def test_the_loop_that_holds_the_loader_goes_on_behind_the_replay():
    """Lightning's iterator is the loader itself, so it continues where the replay ended."""
    one = make_loaders(DataLoader(Squares(48), batch_size=4), (8, 8), 2)[0]
    seen = []
    for number, _ in enumerate(one):
        if number == 2:
            one.begin_again((4, 12))
            next(one)
        seen.append(one.current)
    assert [fact.num_samples for fact in seen] == [4, 4, 2, 2, 2, 2]
    assert [fact.index for fact in seen] == [0, 1] * 3
    assert ids_of(seen) == [*range(8), *range(16, 20), *range(32, 36)]
