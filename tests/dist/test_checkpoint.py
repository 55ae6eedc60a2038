"""A run saved at one list of degrees goes on at others, and in plain torch and Lightning, as if never interrupted."""

from __future__ import annotations

import lightning
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ntp.checkpoint import (
    gather_model_state,
    gather_optimizer_state,
    load_model_state,
    load_optimizer_state,
    read_file,
    save_file,
)
from lightning_ntp.engine import Member
from lightning_ntp.layout import Sharded
from lightning_ntp.topology import Topology
from tests.dist.checkpoint_legs import (
    BATCHES,
    CASES,
    GQA,
    Leg,
    Net,
    assert_same,
    dense_from,
    dense_run,
    dense_step,
    plan_for,
    run_leg,
    save,
    single,
    trained,
)
from tests.support.batches import TokenDataset
from tests.support.gloo import gloo_world
from tests.support.models import ModelConfig, loss_fn
from tests.support.reference import make_optimizer


@pytest.mark.parametrize("case", CASES)
def test_round_trip(workers, tmp_path, case):
    config, name = CASES[case]
    first = tmp_path / "first.ckpt"
    told = workers.run(run_leg, 7, config, name, Leg((4, 3), 4, BATCHES[:2], save=str(first)))
    assert [each.holds_data for each in told] == [[True]] + [[False]] * 6

    saved = torch.load(first, weights_only=True)
    dense, dense_optimizer = dense_run(config, name, steps=2)
    assert_same(saved["state_dict"], dense.state_dict(), rtol=1e-12)
    assert_same(saved["optimizer_states"][0], dense_optimizer.state_dict(), rtol=1e-12)
    assert saved["state_dict"]._metadata == dense.state_dict()._metadata

    plain, plain_optimizer = dense_from(first, config, name)
    dense_step(plain, plain_optimizer, BATCHES[2])
    for degrees, nominal in (((2, 2), 2), ((3, 1), 4), ((1,), 4)):
        again, last = tmp_path / "again.ckpt", tmp_path / "last.ckpt"
        leg = Leg(degrees, nominal, BATCHES[2:], load=str(first), again=str(again), save=str(last))
        told = workers.run(run_leg, sum(degrees), config, name, leg)
        assert_same(torch.load(again), saved)
        end = torch.load(last)
        assert_same(end["state_dict"], plain.state_dict(), rtol=1e-12)
        assert_same(end["optimizer_states"][0], plain_optimizer.state_dict(), rtol=1e-12)
        assert all(each.identity_kept and each.extra == {"seed": 0} and each.lr == 1e-3 for each in told)


def test_slots_without_units(workers, tmp_path):
    """Two heads and three blocks of everything else on four slots."""
    config = ModelConfig(vocab=3, width=8, num_heads=2, num_kv_heads=1, ffn=3, layers=1, fused_qkv=True)
    first, again = tmp_path / "first.ckpt", tmp_path / "again.ckpt"
    ids = (tuple(range(4)),)
    workers.run(run_leg, 4, config, "adamw", Leg((4,), 4, ids, save=str(first)))
    for degrees in ((3,), (2, 4)):
        workers.run(run_leg, sum(degrees), config, "adamw", Leg(degrees, 4, (), load=str(first), again=str(again)))
        assert_same(torch.load(again), torch.load(first))


def test_tied_tensors_stay_tied_in_the_file(workers, tmp_path):
    path = tmp_path / "tied.ckpt"
    workers.run(run_leg, 3, CASES["heads-7-tied"][0], "sgd", Leg((3,), 3, (), save=str(path)))
    state = torch.load(path)["state_dict"]
    assert state["net.embed.weight"].data_ptr() == state["net.lm_head.weight"].data_ptr()


def gather_dtypes(rank: int, world_size: int, store: str, path: str) -> None:
    with gloo_world(rank, world_size, store):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            member = Member(Topology.start([3, 2]), rank)
            model = Net(GQA, seed=0, dtype=dtype)
            member.shard(model, plan_for(GQA))
            optimizer = make_optimizer("sgd", model.parameters())
            for parameter in model.parameters():
                optimizer.state[parameter]["momentum_buffer"] = parameter.detach().clone()
            save(member, optimizer, f"{path}/{dtype}.ckpt")


def test_every_dtype_bitwise(workers, tmp_path):
    workers.run(gather_dtypes, 5, str(tmp_path))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        found, dense = torch.load(tmp_path / f"{dtype}.ckpt"), Net(GQA, seed=0, dtype=dtype)
        assert_same(found["state_dict"], dense.state_dict())
        for parameter, state in zip(dense.parameters(), found["optimizer_states"][0]["state"].values(), strict=True):
            assert torch.equal(state["momentum_buffer"], parameter)


def record_traffic(rank: int, world_size: int, store: str) -> tuple[int, int, int]:
    """(collectives, bytes sent, bytes of the units that this member owns)."""
    with gloo_world(rank, world_size, store):
        member = Member(Topology.start([3, 2]), rank)
        model = Net(GQA, seed=0)
        member.shard(model, plan_for(GQA))
        member.recorder.enabled = True
        gather_model_state(member.model, member.topology, rank)
        records = [each for each in member.recorder.records if each.operation == "all_to_all"]
        owned = 0
        for each in member.model.parameters():
            if isinstance(each.layout, Sharded):
                owners = [segment.family.at(member.context.degree).owners for segment in each.layout.segments]
                rows = sum(piece.rows for piece in each.layout.pieces(member.context.degree, member.context.slot)
                           if owners[piece.segment][piece.unit] == member.context.slot)  # fmt: skip
                owned += rows * each.dense_numel // each.layout.extent * 8
        return len(member.recorder.records), sum(each.sent_bytes for each in records), owned


def test_only_the_leaders_replica_sends_and_only_what_it_owns(workers):
    told = workers.run(record_traffic, 5)
    for count, sent, owned in told[:3]:
        assert count > 1
        assert sent == owned
    assert [count for count, _, _ in told[3:]] == [0, 0]


def test_one_member_of_a_higher_nominal_degree_reorders():
    member, model = single()
    dense = Net(GQA, seed=0)
    assert not torch.equal(model.net.embed.weight, dense.net.embed.weight), "the test has no permutation to undo"
    assert_same(gather_model_state(member.model, member.topology, 0), dense.state_dict())
    load_model_state(member.model, Net(GQA, seed=5).state_dict())
    assert_same(gather_model_state(member.model, member.topology, 0), Net(GQA, seed=5).state_dict())


def test_a_gathered_state_is_a_copy():
    member, model = single()
    state = gather_model_state(member.model, member.topology, 0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    assert_same(state, Net(GQA, seed=0).state_dict())


def test_loaded_optimizer_state_does_not_alias_the_file(tmp_path):
    member, model, optimizer = trained()
    state = gather_optimizer_state(member.model, optimizer, member.topology, 0)
    save_file(state, tmp_path / "a.ckpt")
    mapped = read_file(tmp_path / "a.ckpt")
    load_optimizer_state(member.model, optimizer, mapped)
    optimizer.step()
    assert_same(mapped, state)
    held = [value for values in optimizer.state.values() for value in values.values()]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in held)


class LitNet(lightning.LightningModule):
    """The test model as a user's LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(GQA, seed=0).net

    def training_step(self, tokens: Tensor) -> Tensor:
        return loss_fn(self.net(tokens), tokens)

    def configure_optimizers(self) -> dict:
        optimizer = make_optimizer("adamw", self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def fit(folder, steps: int, start=None) -> LitNet:
    """Plain Lightning on one device, up to ``steps``; leaves ``folder/end-STEPS.ckpt``."""
    module = LitNet()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TokenDataset(8), batch_size=4), ckpt_path=start)
    trainer.save_checkpoint(folder / f"end-{steps}.ckpt")
    return module


def test_plain_lightning_goes_on_from_our_file_and_we_from_its(tmp_path):
    fit(tmp_path, steps=2)
    theirs = read_file(tmp_path / "end-2.ckpt")
    member, module = Member(Topology.start([1], 4), 0), LitNet()
    member.shard(module, plan_for(GQA))
    optimizer = make_optimizer("adamw", module.parameters())
    load_model_state(member.model, theirs["state_dict"])
    load_optimizer_state(member.model, optimizer, theirs["optimizer_states"][0])

    model_state = gather_model_state(member.model, member.topology, 0)
    optimizer_state = gather_optimizer_state(member.model, optimizer, member.topology, 0)
    ours = tmp_path / "ours.ckpt"
    save_file({**theirs, "state_dict": model_state, "optimizer_states": [optimizer_state]}, ours)
    assert_same(torch.load(ours), torch.load(tmp_path / "end-2.ckpt"))
    from_theirs, from_ours = fit(tmp_path, 4, start=tmp_path / "end-2.ckpt"), fit(tmp_path, 4, start=ours)
    assert_same(from_ours.state_dict(), from_theirs.state_dict())
    assert not torch.equal(from_ours.net.embed.weight, LitNet().net.embed.weight)
