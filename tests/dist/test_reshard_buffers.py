"""Buffers of joiners: those of their own replica, whatever they had before."""

from __future__ import annotations

import torch
from torch import nn

from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.comm.groups import GroupHandle, world_handle
from lightning_ntp.parallel import ParallelPlan, TensorParallelContext, parallelize
from lightning_ntp.reshard import PeerState, Place, ShardKeeper
from tests.support.gloo import gloo_world

VETERANS = (Place(0, 2, 0), Place(0, 2, 1), Place(1, 1, 0))
AFTER = (*VETERANS[:2], Place(1, 2, 0), Place(1, 2, 1), Place(2, 1, 0))  # one joins replica 1, and replica 2 comes


class Model(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.fill_(value)
        self.norm.num_batches_tracked.fill_(int(value))
        self.register_buffer("mask", torch.full((2, 2), value > 0), persistent=False)
        self.register_buffer("wide", torch.full((1, 1), value).expand(4, 4))  # cannot be written in place
        self.register_buffer("grows", torch.full((int(value) + 1,), value), persistent=False)


def join(rank: int, world_size: int, store: str, without: str = "") -> dict[str, object] | str:
    with gloo_world(rank, world_size, store):
        is_new = rank >= len(VETERANS)
        place = Place(0, 2, 0) if is_new else VETERANS[rank]
        model = Model(0.0 if is_new else 1.0 + place.replica)
        if not is_new:  # made at the first forward
            model.norm.register_buffer("late", torch.tensor(5 + place.replica, dtype=torch.int32), persistent=False)
            model.norm.register_buffer("saved", torch.tensor(3.0))
        if is_new and without:
            delattr(model, without)
            setattr(model, without, nn.Identity())
        context = TensorParallelContext.at(Exchange(GroupHandle("alone")), place.degree, place.slot, 2)
        parallel = parallelize(model, ParallelPlan({"embed": "vocab"}), context)
        index, mean = model.embed._index, model.norm.running_mean
        keeper = ShardKeeper(parallel, [], None if is_new else place)
        held = [((where,),) * 3 for where in VETERANS] + [()] * 2
        peers = [PeerState(h, target) for h, target in zip(held, AFTER, strict=True)]
        try:
            report = keeper.move(Exchange(world_handle(world_size, rank)), peers)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        assert model.embed._index is index, "it follows the slot"
        assert model.norm.running_mean is mean, "the model may refer to it"
        persistent = model.state_dict(keep_vars=True)
        return {
            **{name: buffer.tolist() for name, buffer in model.named_buffers() if name != "embed._index"},
            "persistent": ["norm.late" in persistent, "norm.saved" in persistent],
            "bytes": report.buffer_bytes,
        }


def test_a_joiner_gets_the_buffers_of_its_replica(workers):
    outcomes = workers.run(join, len(AFTER))
    for outcome, value in zip(outcomes, (1.0, 1.0, 2.0, 2.0, 1.0), strict=True):
        assert outcome["norm.running_mean"] == [value] * 3 and outcome["norm.num_batches_tracked"] == value
        assert outcome["mask"] == [[True] * 2] * 2 and outcome["wide"] == [[value] * 4] * 4
        assert outcome["grows"] == [value] * (int(value) + 1)
        assert outcome["norm.late"] == 4 + value and outcome["norm.saved"] == 3.0
        assert outcome["persistent"] == [False, True]
    assert [outcome["bytes"] > 0 for outcome in outcomes] == [True, False, True, True, True]


def test_a_buffer_without_a_place_is_refused(workers):
    *_, first, second = workers.run(join, len(AFTER), "mask")
    for told in (first, second):
        assert told.startswith("MembershipError") and "a buffer 'mask', for which there is no place" in told
