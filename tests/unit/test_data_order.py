"""The user's samplers and batch samplers are kept, and give all processes the same order."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_ntp.data import nominal_batch_size, prepare_evaluation_loader, prepare_train_loader
from lightning_ntp.data.order import EpochOrders
from lightning_ntp.errors import DataError
from tests.unit.data_helpers import Buckets, EveryOther, Noisy, Squares, global_batches, make_loaders, take, walk


def order_of(loader, epoch=0, noise=0, seed=3):
    torch.manual_seed(noise)
    order = EpochOrders(loader, seed).of(epoch)
    return order.at(range(order.extent.total))


def with_generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda noise: RandomSampler(Squares(20)),
        lambda noise: RandomSampler(Squares(20), generator=with_generator(noise)),
        lambda noise: RandomSampler(Squares(20), num_samples=33),
        lambda noise: RandomSampler(Squares(20), replacement=True, generator=with_generator(noise)),
        lambda noise: WeightedRandomSampler([1.0] * 20, 30, generator=with_generator(noise)),
        lambda noise: SubsetRandomSampler(range(5, 15)),
        lambda noise: EveryOther(20),
        lambda noise: DistributedSampler(Squares(20), num_replicas=1, rank=0),
    ],
)
def test_a_random_sampler_gives_the_same_order_in_every_process(make_sampler):
    def order(epoch, noise):
        return order_of(DataLoader(Squares(20), batch_size=4, sampler=make_sampler(noise)), epoch, noise)

    assert order(0, noise=1) == order(0, noise=2)
    assert order(1, noise=1) == order(1, noise=2)
    assert order(0, noise=1) != order(1, noise=1)


def test_the_order_leaves_the_global_generators_and_the_samplers_alone():
    generator = with_generator(7)
    loader = DataLoader(Squares(20), batch_size=4, sampler=SubsetRandomSampler(range(20), generator=generator))
    before, own = torch.get_rng_state(), generator.get_state()
    EpochOrders(loader, 3).of(0)
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(own, generator.get_state())


def test_a_sequential_order_and_torchs_own_batch_sampler():
    assert order_of(DataLoader(Squares(7), batch_size=2)) == list(range(7))
    custom = BatchSampler(EveryOther(20), 4, drop_last=False)
    orders = EpochOrders(DataLoader(Squares(20), batch_sampler=custom), 3)
    assert not orders.has_lists and sorted(orders.of(0).ids) == list(range(0, 20, 2))
    assert custom.sampler.epochs == [0]


def test_an_epoch_with_a_users_sampler_holds_its_samples_once():
    facts = [
        walk(one) for one in make_loaders(DataLoader(Squares(42), batch_size=4, sampler=EveryOther(42)), (5, 3), 3)
    ]
    assert sorted(sum(global_batches(facts), [])) == list(range(0, 42, 2))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_users_batch_sampler_decides_what_comes_together(num_workers):
    sizes = [3, 5, 1, 4, 2, 6, 2, 3, 4]
    loader = DataLoader(Squares(30), batch_sampler=Buckets(sizes), num_workers=num_workers)
    loaders = make_loaders(loader, (4, 3), 2)
    facts = [walk(one) for one in loaders]
    batches = global_batches(facts)
    assert sorted(sum(batches, [])) == list(range(30))
    assert [len(one) for one in facts] == [len(one) for one in loaders] == [5, 5]
    lists = order_lists(loader)
    assert batches == [sum(lists[:4], []), sum(lists[4:8], []), lists[8]]


def order_lists(loader):
    order = EpochOrders(loader, 5).of(0)
    bounds = [0, *order.extent.ends]
    return [order.at(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]


def test_resume_with_a_batch_sampler():
    loader = DataLoader(Squares(30), batch_sampler=Buckets([3, 5, 1, 4, 2, 6, 2, 3, 4]))
    expected = walk(make_loaders(loader, (4, 3), 2)[1])
    for stop in range(1, 5):
        old, new = (make_loaders(loader, (4, 3), 2)[1] for _ in range(2))
        iter(old)
        before = take(old, stop)
        new.load_state_dict(old.state_dict())
        iter(new)
        assert before + take(new, len(new) - stop) == expected


def test_ids_may_be_anything():
    data = {f"doc{i}": i for i in range(9)}
    loader = DataLoader(data, batch_size=2, sampler=list(data))
    facts = [walk(one) for one in make_loaders(loader, (3, 2))]
    assert sum(global_batches(facts), []) == list(data)


def test_datasets_that_fetch_a_batch_at_once():
    class Batched(Squares):
        def __getitems__(self, ids):
            return [("batched", i) for i in ids]

    loader = make_loaders(DataLoader(Batched(8), batch_size=4, collate_fn=list), (4,))[0]
    assert next(iter(loader)) == [("batched", i) for i in range(4)]
    # A Subset has __getitems__ itself, whatever it wraps: single samples keep their own seeds.
    subset = make_loaders(DataLoader(Subset(Noisy(8), range(2, 8)), batch_size=2, collate_fn=list), (2, 1))
    whole = make_loaders(DataLoader(Subset(Noisy(8), range(2, 8)), batch_size=2, collate_fn=list), (3,))
    assert sum((list(one) for one in subset), [])[0] == next(iter(whole[0]))[:2]


def test_nominal_batch_size():
    assert nominal_batch_size(DataLoader(Squares(8), batch_size=3)) == 3
    assert (
        nominal_batch_size(DataLoader(Squares(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 2, True)))
        == 2
    )
    assert nominal_batch_size(DataLoader(Squares(8), batch_sampler=Buckets([8]))) is None


class Endless:
    def __iter__(self):
        while True:
            yield 0


class Transforming(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield 2 * batch


class Empty(Squares):
    def __init__(self):
        super().__init__(0)


@pytest.mark.parametrize("prepare", ["train", "evaluation"])
@pytest.mark.parametrize(
    "make_loader, text",
    [
        (lambda: [torch.ones(2)], "cannot cut the batches of a list: pass a torch DataLoader"),
        (lambda: DataLoader(Squares(8), batch_size=None), "batch_size=None, so there are no batches to cut"),
        (lambda: Transforming(Squares(8), batch_size=2), "Transforming overrides DataLoader.__iter__"),
        (
            lambda: DataLoader(
                Squares(8), batch_size=2, sampler=DistributedSampler(Squares(8), num_replicas=2, rank=0)
            ),
            "DistributedSampler over 2 replicas.*pass the plain sampler",
        ),
        (lambda: DataLoader(Squares(8), batch_size=2, sampler=Endless()), "Endless has no __len__"),
        (lambda: DataLoader(Squares(8), batch_sampler=Endless()), "Endless has no __len__"),
        (lambda: DataLoader(Empty(), batch_size=2), "yields no sample in epoch 0"),
    ],
)
def test_loaders_that_cannot_be_cut(prepare, make_loader, text):
    with pytest.raises(DataError, match=text):
        if prepare == "train":
            loader = prepare_train_loader(make_loader(), replica=0, shares=(4, 3), seed=0, micro_batches=1)
        else:
            loader = prepare_evaluation_loader(make_loader(), replica=0, num_replicas=2, seed=0, fill=True)
        len(loader)


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(10)


def test_prepare_chooses_the_wrapper():
    train = {"replica": 0, "shares": (4, 4), "seed": 0, "micro_batches": 1}
    evaluation = {"replica": 0, "num_replicas": 2, "seed": 0, "fill": True}
    whole, stream = DataLoader(Squares(8), batch_size=2), DataLoader(Stream(), batch_size=2)
    assert type(prepare_train_loader(whole, **train)).__name__ == "ShareLoader"
    assert type(prepare_train_loader(stream, **train)).__name__ == "StreamLoader"
    assert type(prepare_evaluation_loader(whole, **evaluation)).__name__ == "EvaluationLoader"
    assert type(prepare_evaluation_loader(stream, **evaluation)).__name__ == "EvaluationStreamLoader"
    with pytest.warns(UserWarning, match="max_micro_batch=2 has no effect"):
        prepare_train_loader(stream, **train, max_micro_batch=2)
    with pytest.raises(DataError, match=r"shares=\(5, 3\) are unequal"):
        prepare_train_loader(stream, **{**train, "shares": (5, 3)})
