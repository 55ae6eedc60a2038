"""Streams (IterableDataset): whole batches are dealt to replicas with equal shares."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_ntp.data import EvaluationStreamLoader, StreamLoader
from lightning_ntp.errors import ConfigError, DataError


class Shuffled(IterableDataset):
    """``length`` numbers in a random order, with a random number each; split over workers."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        numbers = list(range(worker, self.length, workers))
        for place in torch.randperm(len(numbers)).tolist():
            yield numbers[place], torch.rand(()).item()


class Sized(Shuffled):
    def __len__(self) -> int:
        return self.length


def streams(make_loader, replicas=2, k=1, **kwargs):
    """Per replica the items and facts of an epoch, every replica as if in a process of its own."""
    found = []
    for replica in range(replicas):
        torch.manual_seed(replica)
        loader = StreamLoader(
            make_loader(), replica=replica, shares=(2 * k,) * replicas, seed=4, micro_batches=k, **kwargs
        )
        items = []
        for batch in loader:
            torch.rand(3)  # the model draws, too
            items.append((batch[0].tolist(), batch[1].tolist(), loader.current))
        found.append(items)
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_replicas_take_turns(num_workers):
    found = streams(lambda: DataLoader(Shuffled(24), batch_size=2, num_workers=num_workers))
    assert [len(items) for items in found] == [6, 6]
    assert sorted(number for items in found for numbers, _, _ in items for number in numbers) == list(range(24))


def test_all_ranks_of_a_replica_read_the_same():
    def epoch(noise, number=0):
        torch.manual_seed(noise)
        loader = StreamLoader(DataLoader(Shuffled(8), batch_size=2), replica=0, shares=(2, 2), seed=4, micro_batches=1)
        loader.set_epoch(number)
        items = []
        for batch in loader:
            torch.rand(noise)
            items.append([part.tolist() for part in batch])
        return items

    assert epoch(1) == epoch(2)
    assert epoch(1) != epoch(1, number=1)


def test_an_incomplete_last_group_is_dropped_with_a_warning():
    with pytest.warns(UserWarning, match="ended with 1 batches for 2 replicas"):
        found = streams(lambda: DataLoader(Shuffled(14), batch_size=2))
    assert [len(items) for items in found] == [3, 3]


def test_windows_and_weights():
    found = streams(lambda: DataLoader(Shuffled(20), batch_size=2), k=2)
    for items in found:
        facts = [fact for _, _, fact in items]
        assert [(f.window, f.index, f.count) for f in facts] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2), (2, 0, 1)]
        assert [(f.num_samples, f.global_samples) for f in facts] == [(2, 8)] * 4 + [(2, 4)]
    found = streams(lambda: DataLoader(Shuffled(20), batch_size=2), k=2, limit=3)
    assert [(f.index, f.count) for _, _, f in found[0]] == [(0, 2), (1, 2), (0, 1)]


def test_length_is_the_datasets():
    arguments = {"replica": 0, "seed": 4}
    assert len(StreamLoader(DataLoader(Sized(22), batch_size=2), shares=(2, 2), micro_batches=1, **arguments)) == 5
    with pytest.raises(TypeError):
        len(StreamLoader(DataLoader(Shuffled(22), batch_size=2), shares=(2, 2), micro_batches=1, **arguments))
    evaluation = [
        EvaluationStreamLoader(DataLoader(Sized(22), batch_size=2), replica=r, num_replicas=2, seed=4, fill=fill)
        for r, fill in ((1, True), (0, False), (1, False))
    ]
    assert [len(one) for one in evaluation] == [6, 6, 5] == [len(list(one)) for one in evaluation]


def test_the_epoch_reaches_the_dataset():
    dataset = Shuffled(8)
    loader = StreamLoader(DataLoader(dataset, batch_size=2), replica=0, shares=(2, 2), seed=4, micro_batches=1)
    loader.sampler.set_epoch(3)
    list(loader)
    assert dataset.epochs == [3] and loader.current.epoch == 3


def test_unequal_shares_are_refused_at_the_start_and_a_warning_later():
    arguments = {"replica": 0, "seed": 4, "micro_batches": 1}
    with pytest.raises(DataError, match=r"shares=\(3, 1\) are unequal.*map-style"):
        StreamLoader(DataLoader(Shuffled(8), batch_size=2), shares=(3, 1), **arguments)
    loader = StreamLoader(DataLoader(Shuffled(8), batch_size=2), shares=(2, 0, 2), **arguments)
    with pytest.warns(UserWarning, match=r"shares=\(3, 0, 1\) are unequal.*as long as the slowest"):
        loader.reshare((3, 0, 1))
    with warnings.catch_warnings(action="error"):
        loader.reshare((2, 0, 1))
        assert len(list(loader)) == 2


@pytest.mark.parametrize(
    "shares, text",
    [((2, 2, 2), "3 entries, but this loader deals to 2 replicas"), ((0, 0), "give no replica a sample")],
)
def test_shares_that_cannot_be(shares, text):
    loader = StreamLoader(DataLoader(Shuffled(8), batch_size=2), replica=0, shares=(2, 2), seed=4, micro_batches=1)
    for change in (loader.reshare, loader.begin_again):
        with pytest.raises(ConfigError, match=text):
            change(shares)


@pytest.mark.parametrize("fill", [True, False])
def test_evaluation_deals_every_batch(fill):
    found, dummies = [], 0
    for replica in range(3):
        loader = EvaluationStreamLoader(
            DataLoader(Shuffled(14), batch_size=2), replica=replica, num_replicas=3, seed=4, fill=fill
        )
        batches = [(numbers.tolist(), loader.current) for numbers, _ in loader]
        assert len(batches) == (3 if fill or replica == 0 else 2)
        found += [number for numbers, fact in batches if not fact.is_dummy for number in numbers]
        dummies += sum(fact.is_dummy for _, fact in batches)
    assert sorted(found) == list(range(14))
    assert dummies == (2 if fill else 0)


@pytest.mark.parametrize("fill", [True, False])
def test_a_redeal_takes_effect_with_the_next_pass(fill):
    loader = EvaluationStreamLoader(DataLoader(Sized(14), batch_size=2), replica=2, num_replicas=3, seed=4, fill=fill)
    before = [numbers.tolist() for numbers, _ in loader]
    found, under_way = [], iter(loader)
    for numbers, _ in under_way:
        found.append(numbers.tolist())
        loader.redeal(0, 1)
    assert found == before and len(before) == (3 if fill else 2)
    assert len(loader) == 7
    assert sorted(number for numbers, _ in loader for number in numbers.tolist()) == list(range(14))
    with pytest.raises(ConfigError, match=r"replica=1 is outside 0\.\.0"):
        loader.redeal(1, 1)
