"""The training loader: exactly once, the same on all ranks, under resharing and resuming, with and without workers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ntp.data import ShareLoader
from lightning_ntp.errors import ConfigError, DataError
from tests.unit.data_helpers import Noisy, Squares, global_batches, ids_of, make_loaders, take, walk

WORKERS = [0, 2]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    "shares, k, length",
    [
        ((8, 8), 1, 64),
        ((8, 8), 2, 61),
        ((9, 7), 1, 61),
        ((5, 3), 3, 50),
        ((5, 3), 3, 4),
        ((9, 7), 4, 3),
        ((5, 4, 3), 2, 37),
    ],
)
def test_an_epoch_is_a_permutation(shares, k, length, num_workers):
    loader = DataLoader(Squares(length), batch_size=4, shuffle=True, num_workers=num_workers)
    loaders = make_loaders(loader, shares, k)
    lengths = [len(one) for one in loaders]
    facts = [walk(one) for one in loaders]
    assert [len(one) for one in facts] == lengths == [len(one) for one in loaders]
    batches = global_batches(facts)
    assert sorted(sum(batches, [])) == list(range(length))
    assert all(len(batch) == sum(shares) for batch in batches[:-1])


def test_the_items_are_the_collated_samples():
    loader = make_loaders(DataLoader(Squares(20), batch_size=4, shuffle=True), (5, 3), 3)[0]
    for batch in loader:
        assert batch.tolist() == [i * i for i in loader.current.sample_ids]


def test_micro_batches_of_a_window():
    first, second = (walk(one) for one in make_loaders(DataLoader(Squares(16), batch_size=4), (5, 3), 3))
    assert [fact.num_samples for fact in first] == [2, 2, 1] * 2
    assert [fact.num_samples for fact in second] == [1, 1, 1] * 2
    assert [fact.is_last for fact in first] == [False, False, True] * 2
    assert {fact.global_samples for fact in first} == {8}
    assert first[0].sample_ids == (0, 1) and second[0].sample_ids == (5,)


def test_a_replica_without_samples_runs_one_dummy():
    loader = make_loaders(DataLoader(Squares(9), batch_size=4), (4, 4))[1]
    batches = [(batch.tolist(), loader.current) for batch in loader]
    item, fact = batches[-1]
    assert item == [64]  # the first sample of the window
    assert fact.is_dummy and fact.num_samples == 0 and fact.sample_ids == () and fact.global_samples == 1
    assert not batches[0][1].is_dummy and len(batches) == 2


def test_a_cap_splits_a_micro_batch_into_passes():
    loader = make_loaders(DataLoader(Squares(16), batch_size=4), (9, 7), max_micro_batch=4)[0]
    batch = next(iter(loader))
    fact = loader.current
    assert (fact.passes, fact.num_samples, fact.last_samples) == ((3, 3, 3), 9, 3)
    assert [(part.tolist(), size) for part, size in fact.extra] == [([0, 1, 4], 3), ([9, 16, 25], 3)]
    assert batch.tolist() == [36, 49, 64]
    assert fact.sample_ids == tuple(range(9))


def test_order_depends_on_seed_and_epoch_alone():
    def epoch(seed, number, noise):
        torch.manual_seed(noise)
        loader = ShareLoader(
            DataLoader(Squares(30), batch_size=4, shuffle=True), replica=0, shares=(8,), seed=seed, micro_batches=1
        )
        loader.set_epoch(number)
        return ids_of(walk(loader))

    assert epoch(1, 0, noise=3) == epoch(1, 0, noise=4)
    assert epoch(1, 0, noise=3) != epoch(1, 1, noise=3)
    assert epoch(1, 0, noise=3) != epoch(2, 0, noise=3)


def test_the_global_batch_does_not_depend_on_the_shares():
    loader = DataLoader(Squares(50), batch_size=4, shuffle=True)
    assert global_batches([walk(one) for one in make_loaders(loader, (8, 8), 2)]) == global_batches(
        [walk(one) for one in make_loaders(loader, (9, 7), 2)]
    )


def test_an_epoch_starts_anew_with_every_iter():
    loader = make_loaders(DataLoader(Squares(20), batch_size=4, shuffle=True), (5, 3))[0]
    first = ids_of(walk(loader, limit=2))
    assert ids_of(walk(loader))[: len(first)] == first
    loader.sampler.set_epoch(1)
    assert ids_of(walk(loader))[: len(first)] != first
    assert loader.current.epoch == 1


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_reshare_takes_effect_at_the_next_window(num_workers, persistent):
    loader = DataLoader(Squares(61), batch_size=4, shuffle=True, num_workers=num_workers, persistent_workers=persistent)
    facts: list[list] = []
    for one in make_loaders(loader, (8, 8), 2):
        iter(one)
        before = take(one, 3)  # in the middle of the second window
        one.reshare((9, 7))
        before += take(one, 3)
        one.reshare((7, 5))
        facts.append(before + take(one, len(one) - 6))
        with pytest.raises(StopIteration):
            next(one)
    assert sorted(sum(global_batches(facts), [])) == list(range(61))
    assert [f.num_samples for f in facts[0]] == [4, 4, 4, 4, 5, 4, 4, 3, 1]
    assert [f.num_samples for f in facts[1]] == [4, 4, 4, 4, 4, 3, 3, 2, 0]
    # The next epoch, under the new shares from its start.
    one.set_epoch(1)
    assert {fact.global_samples for fact in walk(one)} == {12, 1}


def test_deferred_samples_come_later_in_the_epoch():
    loader = DataLoader(Squares(48), batch_size=4, shuffle=True)
    full = global_batches([walk(one) for one in make_loaders(loader, (8, 8))])
    shrunk = make_loaders(loader, (8, 8))
    lengths, facts = [len(one) for one in shrunk], []
    for one in shrunk:
        iter(one)
        first = take(one, 1)
        one.reshare((8, 6))
        facts.append(first + take(one, len(one) - 1))
    batches = global_batches(facts)
    assert lengths == [3, 3] and [len(one) for one in shrunk] == [4, 4]
    assert batches[0] == full[0] and batches[1] == full[1][:14] and batches[2][:2] == full[1][14:]
    assert sum(batches, []) == sum(full, [])


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5, 7])
def test_resume_continues_with_the_next_sample(num_workers, stop):
    def make(seed=5):
        loader = DataLoader(Squares(31), batch_size=4, shuffle=True, num_workers=num_workers if stop in (3, 4) else 0)
        return ShareLoader(loader, replica=1, shares=(5, 3), seed=seed, micro_batches=2)

    whole = make()
    whole.set_epoch(2)
    expected = walk(whole)
    stopped = make()
    stopped.set_epoch(2)
    iter(stopped)
    before = take(stopped, stop)
    state = stopped.state_dict()  # workers have prefetched more than was yielded
    resumed = make(seed=99)
    resumed.load_state_dict(state)
    assert len(resumed) == len(expected)
    iter(resumed)
    resumed.set_epoch(2)  # Lightning: after iter
    after = take(resumed, len(expected) - stop)
    assert before + after == expected
    with pytest.raises(StopIteration):
        next(resumed)
    assert resumed.state_dict() == whole.state_dict()


def test_state_is_the_same_on_all_replicas_and_plain():
    states = []
    for one in make_loaders(DataLoader(Squares(31), batch_size=4, shuffle=True), (5, 3), 2):
        iter(one)
        take(one, 3)
        states.append(one.state_dict())
    assert states[0] == states[1]
    assert all(isinstance(value, int | list) for value in states[0].values())


def test_resume_inside_a_window_at_other_shares():
    loader = DataLoader(Squares(48), batch_size=4, shuffle=True)
    facts = []
    for old, new in zip(make_loaders(loader, (8, 8), 2), make_loaders(loader, (9, 7), 2), strict=True):
        iter(old)
        before = take(old, 3)
        new.load_state_dict(old.state_dict())
        iter(new)
        facts.append(before + take(new, len(new) - 3))
    assert sorted(sum(global_batches(facts), [])) == list(range(48))
    assert [fact.num_samples for fact in facts[0]] == [4, 4, 4, 4, 5, 4]


def test_resume_inside_a_window_with_other_replicas_begins_it_again():
    loader = DataLoader(Squares(48), batch_size=4, shuffle=True)
    old = make_loaders(loader, (8, 8), 2)[0]
    iter(old)
    take(old, 3)
    facts = []
    for new in make_loaders(loader, (6, 5, 5), 2):
        with pytest.warns(UserWarning, match="begun again"):
            new.load_state_dict(old.state_dict())
        assert len(new) == 6
        facts.append(walk(new))
    order = sum(global_batches([walk(one) for one in make_loaders(loader, (8, 8), 2)]), [])
    assert sum(global_batches(facts), []) == order[16:]


def test_resume_at_an_epochs_end_goes_on_with_the_next():
    loader = make_loaders(DataLoader(Squares(16), batch_size=4, shuffle=True), (5, 3))[0]
    walk(loader)
    other = make_loaders(DataLoader(Squares(16), batch_size=4, shuffle=True), (5, 3))[0]
    other.load_state_dict(loader.state_dict())
    iter(other)
    other.set_epoch(1)
    loader.set_epoch(1)
    assert take(other, 2) == walk(loader)


def test_resume_with_another_dataset_is_refused():
    loader = make_loaders(DataLoader(Squares(16), batch_size=4), (5, 3))[0]
    iter(loader)
    take(loader, 1)
    with pytest.raises(DataError, match="epoch of 16 samples, but the loader now has 24"):
        make_loaders(DataLoader(Squares(24), batch_size=4), (5, 3))[0].load_state_dict(loader.state_dict())


@pytest.mark.parametrize("num_workers, persistent", [(0, False), (2, False), (2, True)])
def test_random_transforms_are_the_same_whoever_loads(num_workers, persistent):
    def mix(items):  # a collate function that is random, too
        return sorted(items), torch.rand(()).item()

    def epoch(shares, replica, noise, num_workers):
        torch.manual_seed(noise)
        loader = DataLoader(
            Noisy(24),
            batch_size=4,
            shuffle=True,
            collate_fn=mix,
            num_workers=num_workers,
            persistent_workers=persistent and num_workers > 0,
        )
        one = ShareLoader(loader, replica=replica, shares=shares, seed=5, micro_batches=1)
        before = torch.get_rng_state()
        epochs = [list(one)]
        one.set_epoch(1)
        epochs.append(list(one))
        assert torch.equal(before, torch.get_rng_state())
        return epochs

    mine = epoch((8, 8), 0, noise=1, num_workers=num_workers)
    assert mine == epoch((8, 8), 0, noise=2, num_workers=0)  # another tensor-parallel rank
    samples = dict((item[0], item[1:]) for items, _ in mine[0] for item in items)
    assert len(set(samples.values())) == len(samples)
    assert samples != dict((item[0], item[1:]) for items, _ in mine[1] for item in items)
    # At other shares a sample that another replica takes over is transformed as it would have been.
    moved = dict((i[0], i[1:]) for items, _ in epoch((5, 11), 1, 3, num_workers)[0] for i in items)
    common = samples.keys() & moved.keys()
    assert common and all(samples[i] == moved[i] for i in common)


def test_lightning_worker_seeding_uses_the_replica(monkeypatch):
    from lightning.fabric.utilities.seed import pl_worker_init_function

    from lightning_ntp.data.fetch import worker_init

    def own(worker_id):
        pass

    assert worker_init(None, 3) is None and worker_init(own, 3) is own
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    function = worker_init(None, 3)
    assert function.func is pl_worker_init_function and function.keywords == {"rank": 3}
    assert worker_init(function, 5).keywords == {"rank": 5}
    assert worker_init(own, 3) is own


def test_a_worker_finds_the_users_dataset():
    def init(worker_id):
        info = torch.utils.data.get_worker_info()
        assert info.dataset.length == 8
        info.dataset.length = 100 + worker_id

    class Length(Squares):
        def __getitem__(self, index):
            return self.length

    loader = DataLoader(Length(8), batch_size=2, num_workers=2, worker_init_fn=init)
    assert sorted(batch.tolist()[0] for batch in make_loaders(loader, (2,))[0]) == [100, 100, 101, 101]


def test_workers_are_stopped_and_started_again_as_lightning_does():
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    loader = DataLoader(Squares(32), batch_size=4, num_workers=2, persistent_workers=True)
    one = make_loaders(loader, (4, 4), 2)[0]
    combined = CombinedLoader(one)
    iter(combined)
    first = next(combined)[0]
    workers = one._iterator._workers
    combined.reset()
    assert not any(worker.is_alive() for worker in workers)
    assert next(one).tolist() == [i * i for i in one.current.sample_ids]  # from the position, with new workers
    assert one.current.index == 1
    assert next(iter(one)).tolist() == first.tolist()
    combined.reset()


def test_drop_last():
    whole = DataLoader(Squares(45), batch_size=4, drop_last=True)
    facts = [walk(one) for one in make_loaders(whole, (8, 8), 2)]
    # Two windows of 16 and, of the 13 left, one whole batch of 4 on each replica.
    assert [len(batch) for batch in global_batches(facts)] == [16, 16, 8]
    facts = [walk(one) for one in make_loaders(whole, (9, 7), 2)]
    assert [len(batch) for batch in global_batches(facts)] == [16, 16]
    with pytest.raises(DataError, match="drop_last=True drops the whole epoch"):
        make_loaders(DataLoader(Squares(7), batch_size=4, drop_last=True), (4, 4))


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_limit_weights_the_cut_window_by_what_is_run(num_workers):
    loader = DataLoader(Squares(48), batch_size=4, num_workers=num_workers)
    facts = [walk(one) for one in make_loaders(loader, (9, 7), 2, limit=3)]
    assert [len(batch) for batch in global_batches(facts)] == [16, 9]
    assert [(f.index, f.count) for f in facts[0]] == [(0, 2), (1, 2), (0, 1)]
    one = make_loaders(loader, (9, 7), 2)[0]
    one.limit = 1
    assert len(walk(one)) == 1 and len(make_loaders(loader, (9, 7), 2)[0]) == 6


def test_k_is_read_at_every_window():
    k = 2
    one = ShareLoader(DataLoader(Squares(48), batch_size=4), replica=0, shares=(8, 8), seed=0, micro_batches=lambda: k)
    iter(one)
    sizes = [fact.num_samples for fact in take(one, 2)]
    k = 4
    assert sizes == [4, 4] and [fact.num_samples for fact in take(one, 4)] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"shares": (8, float("nan"))}, "nan of replica 1"),
        ({"shares": (8, -8)}, "-8 of replica 1"),
        ({"shares": (0, 0)}, "give no replica a sample"),
        ({"replica": 2}, r"replica=2 is outside 0\.\.1"),
        ({"max_micro_batch": 0}, "max_micro_batch=0"),
        ({"micro_batches": 0}, "micro_batches=0"),
    ],
)
def test_arguments_that_cannot_be(arguments, text):
    good = {"replica": 0, "shares": (8, 8), "seed": 0, "micro_batches": 1}
    with pytest.raises(ConfigError, match=text):
        ShareLoader(DataLoader(Squares(48), batch_size=4), **{**good, **arguments})


def test_reshare_to_other_replicas_is_refused():
    with pytest.raises(ConfigError, match="3 entries, but this loader cuts for 2"):
        make_loaders(DataLoader(Squares(48), batch_size=4), (8, 8))[0].reshare((8, 4, 4))
