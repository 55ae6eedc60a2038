"""Evaluation loaders: every sample once, the same number of batches on all replicas."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_ntp.data import EvaluationLoader
from lightning_ntp.errors import ConfigError
from tests.unit.data_helpers import Buckets, Noisy, Squares, ids_of, walk


def evaluate(loader, replicas, fill=True):
    return [
        walk(EvaluationLoader(loader, replica=r, num_replicas=replicas, seed=2, fill=fill)) for r in range(replicas)
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("length, replicas", [(24, 2), (25, 2), (3, 2), (1, 3), (22, 3)])
def test_every_sample_once_and_equal_numbers_of_batches(length, replicas, num_workers):
    facts = evaluate(DataLoader(Squares(length), batch_size=4, num_workers=num_workers), replicas)
    assert sorted(sum((ids_of(one) for one in facts), [])) == list(range(length))
    assert {len(one) for one in facts} == {-(-length // (4 * replicas))}
    for group in zip(*facts, strict=True):
        assert max(f.num_samples for f in group) - min(f.num_samples for f in group) <= 1
        assert {f.global_samples for f in group} == {sum(f.num_samples for f in group)}
        assert all(f.is_dummy == (f.num_samples == 0) for f in group)


def test_the_order_is_the_samplers():
    facts = evaluate(DataLoader(Squares(13), batch_size=3), 2)
    assert [f.sample_ids for f in facts[0]] == [(0, 1, 2), (6, 7, 8), (12,)]
    assert [f.sample_ids for f in facts[1]] == [(3, 4, 5), (9, 10, 11), ()]


def test_a_dummy_has_the_first_sample_of_the_batch_and_prediction_has_none():
    loader = DataLoader(Squares(13), batch_size=3)
    filled, bare = (EvaluationLoader(loader, replica=1, num_replicas=2, seed=2, fill=fill) for fill in (True, False))
    assert [batch.tolist() for batch in filled] == [[9, 16, 25], [81, 100, 121], [144]]
    assert [batch.tolist() for batch in bare] == [[9, 16, 25], [81, 100, 121]]
    assert (len(filled), len(bare)) == (3, 2)


def test_shuffling_is_the_same_on_all_replicas_and_differs_by_epoch():
    torch.manual_seed(1)
    loader = DataLoader(Squares(20), batch_size=4, shuffle=True)
    assert sorted(sum((ids_of(one) for one in evaluate(loader, 2)), [])) == list(range(20))
    one = EvaluationLoader(loader, replica=0, num_replicas=1, seed=2)
    first = ids_of(walk(one))
    assert ids_of(walk(one)) == first
    one.sampler.set_epoch(1)
    assert ids_of(walk(one)) != first


def test_a_loop_that_breaks_off_can_start_again():
    one = EvaluationLoader(DataLoader(Squares(20), batch_size=4, num_workers=2), replica=0, num_replicas=1, seed=2)
    first = walk(one, limit=2)  # a sanity check
    assert walk(one)[:2] == first


def test_random_transforms_are_the_same_on_all_ranks():
    def items(noise, num_workers):
        torch.manual_seed(noise)
        loader = DataLoader(Noisy(8), batch_size=4, collate_fn=list, num_workers=num_workers)
        return list(EvaluationLoader(loader, replica=0, num_replicas=1, seed=2))

    assert items(1, 0) == items(2, 2)


def test_batch_samplers_and_drop_last():
    facts = evaluate(DataLoader(Squares(11), batch_sampler=Buckets([3, 2, 5, 1])), 3)
    assert sorted(sum((ids_of(one) for one in facts), [])) == list(range(11))
    assert [len(one) for one in facts] == [2, 2, 2] and facts[1][1].is_dummy
    facts = evaluate(DataLoader(Squares(11), batch_size=2, drop_last=True), 2)
    assert sum((ids_of(one) for one in facts), []) == [0, 1, 4, 5, 2, 3, 6, 7]


def test_prediction_writers_find_the_ids_of_this_replica():
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

    batches = _IndexBatchSamplerWrapper(BatchSampler(SequentialSampler(range(11)), 2, drop_last=False))
    loader = EvaluationLoader(
        DataLoader(Squares(11), batch_sampler=batches), replica=1, num_replicas=2, seed=2, fill=False
    )
    for number, _ in enumerate(loader):
        assert loader.batch_sampler.seen_batch_indices[number] == list(loader.current.sample_ids)
    assert isinstance(loader.batch_sampler, _IndexBatchSamplerWrapper)
    assert loader.batch_sampler.seen_batch_indices == [[2, 3], [6, 7], [10]]


def test_a_replica_that_is_not_there():
    with pytest.raises(ConfigError, match=r"replica=2 is outside 0\.\.1"):
        EvaluationLoader(DataLoader(Squares(4)), replica=2, num_replicas=2, seed=0)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [lambda: {"batch_size": 2}, lambda: {"batch_sampler": Buckets([3, 2, 5, 1, 4])}])
def test_a_redeal_takes_effect_with_the_next_pass(make, num_workers):
    loader = DataLoader(Squares(15), num_workers=num_workers, **make())
    loaders = [EvaluationLoader(loader, replica=replica, num_replicas=3, seed=2) for replica in range(3)]
    before = [walk(one) for one in loaders]
    during = []
    for one in loaders:
        facts = []
        for _ in one:  # workers have read no more than a few pieces ahead
            facts.append(one.current)
            one.redeal(0, 2)
        during.append(facts)
    assert during == before
    # Replica 1 has died; the others move up.
    loaders[2].redeal(1, 2)
    lengths = [len(loaders[0]), len(loaders[2])]
    after = [walk(loaders[0]), walk(loaders[2])]
    assert [len(facts) for facts in after] == lengths and lengths[0] == lengths[1]
    assert sorted(ids_of(after[0]) + ids_of(after[1])) == list(range(15))


@pytest.mark.parametrize("replica, num_replicas", [(2, 2), (-1, 2), (0, 0)])
def test_a_redeal_to_a_replica_that_is_not_there(replica, num_replicas):
    loader = EvaluationLoader(DataLoader(Squares(4)), replica=0, num_replicas=2, seed=0)
    with pytest.raises(ConfigError, match=rf"replica={replica} is outside 0\.\.{num_replicas - 1}"):
        loader.redeal(replica, num_replicas)
