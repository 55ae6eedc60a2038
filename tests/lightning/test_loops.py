"""Data and loops: streams, workers, limits, validation in mid-epoch, data modules."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_ntp import NTPStrategy
from tests.lightning.runs import SMALL, Language, Scenario, check_parity, fit_dense, loader, quiet_trainer
from tests.support.batches import TokenDataset, sample
from tests.support.models import loss_fn


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        worker = get_worker_info()
        for index in range(0 if worker is None else worker.id, self.size, 1 if worker is None else worker.num_workers):
            yield index, sample(index)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


def stream(size: int, batch_size: int) -> DataLoader:
    return DataLoader(Stream(size), batch_size=batch_size)


def sized_stream(size: int, batch_size: int) -> DataLoader:
    return DataLoader(SizedStream(size), batch_size=batch_size)


def with_workers(size: int, batch_size: int) -> DataLoader:
    return loader(size, batch_size, num_workers=2)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(data=stream, size=32, accumulate=2, strategy={"shares": [8, 8]}), id="stream"),
        pytest.param(Scenario(data=sized_stream, size=32, strategy={"shares": [4, 4]}), id="sized-stream"),
        pytest.param(
            Scenario(data=with_workers, trainer={"max_epochs": 2, "num_sanity_val_steps": 1, "val_check_interval": 2}),
            id="workers",
        ),
        pytest.param(
            Scenario(trainer={"limit_train_batches": 2, "val_check_interval": 1, "max_epochs": 2}), id="limit"
        ),
        pytest.param(Scenario(trainer={"limit_train_batches": 0.5, "limit_val_batches": 1}), id="limit-fraction"),
        pytest.param(Scenario(trainer={"max_steps": 6, "max_epochs": -1, "val_check_interval": 0.5}), id="max-steps"),
    ],
)
def test_loops(workers, scenario):
    results = check_parity(workers, scenario)
    if scenario.data is not stream:
        _, metrics, _ = fit_dense(scenario)
        if "limit_val_batches" not in scenario.trainer:
            assert results[1].metrics["val_loss"] == pytest.approx(metrics["val_loss"], rel=1e-6)


class Tokens(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(TokenDataset(30, with_index=True), batch_size=4, shuffle=True)

    def val_dataloader(self) -> list[DataLoader]:
        return [loader(7, 2), loader(3, 1)]


class SeveralLoaders(Language):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int) -> None:
        self.log("val", loss_fn(self.model(batch[1]), batch[1]), sync_dist=True)


def fit_datamodule(rank: int, world_size: int, store: str) -> list[list[int]]:
    warnings.filterwarnings("ignore")
    module = SeveralLoaders(SMALL, seed=rank)
    trainer = quiet_trainer(world_size, NTPStrategy(degrees=[2, 1]), max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, datamodule=Tokens())
    assert {"val/dataloader_idx_0", "val/dataloader_idx_1"} <= set(trainer.callback_metrics)
    return [entry.ids for entry in module.seen]


def test_datamodule(workers):
    first, same, other = workers.run(fit_datamodule, 3)
    assert first == same
    half = len(first) // 2
    for epoch in (slice(0, half), slice(half, None)):
        assert sorted(sum(first[epoch] + other[epoch], [])) == list(range(30))
    assert first[:half] != first[half:], "every epoch has its own order"
