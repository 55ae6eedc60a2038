"""Streams when members die in mid-window: what is dealt to whom and what is lost, with and without reading ahead."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from lightning_ntp.data import MicroBatch, StreamLoader
from lightning_ntp.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:(The IterableDataset ended|The batches of the IterableDataset)")


class Numbers(IterableDataset):
    """0, 1, 2 ...: with batch size 1, batch i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        yield from range(self.length)

    def __len__(self) -> int:
        return self.length


class Member:
    """A replica's loader, read as Lightning reads it: ``ahead`` batches before the one in use."""

    def __init__(self, replica: int, replicas: int, length: int, k: int, ahead: int, limit: int | None = None) -> None:
        loader = DataLoader(Numbers(length), batch_size=1)
        self.replica = replica
        self.loader = StreamLoader(
            loader, replica=replica, shares=(k,) * replicas, seed=0, micro_batches=k, limit=limit
        )
        self.iterator = iter(self.loader)
        self.fetched = [batch for _ in range(ahead) if (batch := next(self.iterator, None)) is not None]

    def fetch(self) -> int | None:
        """The next batch for the training step, as Lightning hands it out."""
        if (batch := next(self.iterator, None)) is not None:
            self.fetched.append(batch)
        return self.fetched.pop(0).item() if self.fetched else None

    @property
    def fact(self) -> MicroBatch:
        """About the batch in use."""
        return self.loader.look_back(len(self.fetched))

    def replay(self, shares: tuple[int, ...]) -> dict[int, int | None]:
        """Begin the window in use again, up to the batch in use; the batches by micro-batch, None for a dummy."""
        last = self.fact.index
        self.loader.begin_again(shares, ahead=len(self.fetched))
        found = {}
        for index in range(last + 1):
            batch = next(self.loader).item()
            assert self.loader.current.index == index
            found[index] = None if self.loader.current.is_dummy else batch
        assert self.fact == self.loader.current
        return found


class Model:
    """What a stream of ``length`` batches should be dealt to whom: said anew, without any loader."""

    def __init__(self, replicas: int, length: int, k: int) -> None:
        self.length, self.k = length, k
        self.deals = [(0, tuple(range(replicas)))]

    def lose(self, window: int, live: tuple[int, ...]) -> None:
        self.deals = [deal for deal in self.deals if deal[0] < window + 2] + [(window + 2, live)]

    def windows(self) -> list[dict[int, list[int]]]:
        """For every window the batches of each replica that it is dealt to."""
        found, start = [], 0
        count = self.k
        while count == self.k:  # the stream ends in a window that is not full
            dealt = [live for first, live in self.deals if first <= len(found)][-1]
            count = min(self.k, (self.length - start) // len(dealt))
            if count:
                found.append({r: [start + i * len(dealt) + j for i in range(count)] for j, r in enumerate(dealt)})
            start += count * len(dealt)
        return found


@given(st.data(), st.integers(2, 4), st.integers(1, 3), st.integers(0, 1), st.integers(2, 40))
@settings(max_examples=80, deadline=None)
def test_deaths_in_any_window_at_any_micro_batch(data, replicas, k, ahead, length):
    members = [Member(replica, replicas, length, k, ahead) for replica in range(replicas)]
    model, number = Model(replicas, length, k), 0
    while number < len(model.windows()):
        count = len(next(iter(model.windows()[number].values())))
        done: dict[int, dict[int, int | None]] = {member.replica: {} for member in members}
        while len(members) > 1 and data.draw(st.integers(0, 3)) == 0:
            # Members notice at different micro-batches of the window.
            for member in members:
                use(member, done[member.replica], until=data.draw(st.integers(1, count)))
            members.pop(data.draw(st.integers(0, len(members) - 1)))
            live = tuple(member.replica for member in members)
            model.lose(number, live)
            shares = tuple(k if replica in live else 0 for replica in range(replicas))
            for member in members:
                done[member.replica] = member.replay(shares)
        expected = model.windows()[number]
        counted = [member.replica for member in members]
        for member in members:
            use(member, done[member.replica], until=count)
            fact = member.fact
            assert (fact.window, fact.index, fact.count) == (number, count - 1, count)
            assert (fact.num_samples, fact.global_samples) == (1, len(counted) * count)
            assert list(done[member.replica].values()) == expected[member.replica]
        assert {len(member.loader) for member in members} == {sum(len(w[counted[0]]) for w in model.windows())}
        number += 1
    assert all(member.fetch() is None for member in members)


def use(member: Member, done: dict[int, int | None], until: int) -> None:
    """Go on in the window until ``until`` of its micro-batches have been in use."""
    while len(done) < until:
        batch = member.fetch()
        done[member.fact.index] = None if member.fact.is_dummy else batch


def test_what_is_lost_is_said_once():
    members = [Member(replica, 2, 24, 2, ahead=1) for replica in range(2)]
    survivor = members[0]
    assert [survivor.fetch() for _ in range(3)] == [0, 2, 4]  # in the second window
    with pytest.warns(UserWarning, match=r"replicas \[1\] had in the present window and the next one are lost"):
        assert survivor.replay((4, 0)) == {0: 4}
    # 5, 7 and 9, 11 are lost; from the window after the next on nothing is.
    with warnings.catch_warnings(action="error"):
        assert survivor.replay((4, 0)) == {0: 4}
        rest = []
        while (batch := survivor.fetch()) is not None:
            rest.append(batch)
    assert rest == [6, 8, 10, *range(12, 24)]


def test_a_replica_that_comes_back_runs_dummies_until_the_stream_is_dealt_to_it():
    loaders = [Member(replica, 2, 20, 1, ahead=0).loader for replica in range(2)]
    for loader in loaders:
        loader.reshare((2, 0))
    iterators = [iter(loader) for loader in loaders]
    taken = [[next(iterator).item() for iterator in iterators] for _ in range(2)]
    assert taken == [[0, 0], [1, 1]] and loaders[1].current.is_dummy and loaders[1].current.global_samples == 1
    for loader in loaders:
        loader.begin_again((2, 2))
    facts = []
    for _ in range(4):
        batches = [next(loader).item() for loader in loaders]
        facts.append((batches, loaders[1].current.is_dummy, loaders[0].current.global_samples))
    assert facts == [([1, 1], True, 1), ([2, 2], True, 1), ([3, 4], False, 2), ([5, 6], False, 2)]


def test_a_window_that_nobody_has_is_an_error():
    loader = Member(0, 2, 20, 1, ahead=0).loader
    loader.reshare((0, 2))
    next(loader)
    with pytest.raises(DataError, match=r"dealt to replicas \[1\], and none of them is left"):
        loader.begin_again((2, 0))


def test_before_the_first_batch_there_is_nothing_to_go_back_to():
    loader = Member(0, 2, 20, 2, ahead=0).loader
    loader.begin_again((2, 0))
    assert [next(loader).item() for _ in range(4)] == [0, 2, 4, 5]
    assert loader.current.window == 1


def test_a_limit_holds_for_a_window_begun_again():
    member = Member(0, 2, 40, 2, ahead=0, limit=3)
    assert [member.fetch() for _ in range(3)] == [0, 2, 4]
    assert member.replay((2, 0)) == {0: 4}
    assert (member.fact.count, member.fact.global_samples) == (1, 1) and member.fetch() is None


def test_only_the_window_in_hand_is_kept():
    member = Member(0, 2, 40, 2, ahead=1)
    for _ in range(7):
        member.fetch()
        assert len(member.loader._windows) <= 2
