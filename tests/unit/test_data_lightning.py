"""The loaders in a real Trainer: epochs, checkpoints inside an epoch and at its end, validation, prediction."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_ntp.data import prepare_evaluation_loader, prepare_train_loader
from tests.unit.data_helpers import Squares

LENGTH, K, SHARES = 46, 2, (5, 3)  # 5 full windows of 8, a partial one of 6: 12 micro-batches an epoch


class OneOfTwo(SingleDeviceStrategy):
    """A single process that plays replica 0 of 2."""

    def process_dataloader(self, dataloader):
        trainer = self.lightning_module.trainer
        if trainer.training:
            self.train_loader = prepare_train_loader(
                dataloader, replica=0, shares=SHARES, seed=1, micro_batches=lambda: trainer.accumulate_grad_batches
            )
            if isinstance(trainer.limit_train_batches, int):
                self.train_loader.limit = trainer.limit_train_batches
            return self.train_loader
        return prepare_evaluation_loader(dataloader, replica=0, num_replicas=2, seed=1, fill=not trainer.predicting)


class Recorder(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen, self.steps, self.validated = [], [], 0

    def training_step(self, batch, batch_idx):
        fact = self.trainer.strategy.train_loader.current
        assert batch.tolist() == [i * i for i in fact.sample_ids]
        assert self.trainer.fit_loop.epoch_loop._should_accumulate() is not fact.is_last
        self.seen.append((fact.epoch, fact.window, fact.index, fact.sample_ids))
        return self.layer(batch.float().unsqueeze(1)).mean() * 0

    def validation_step(self, batch, batch_idx):
        self.validated += 1

    def predict_step(self, batch, batch_idx):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(Callback):
    def __init__(self, path, after, hook):
        self.path, self.after, self.hook = path, after, hook

    def on_train_batch_end(self, trainer, module, *_):
        if self.hook == "batch" and len(module.seen) == self.after:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer, module):
        if self.hook == "epoch" and trainer.current_epoch == self.after:
            trainer.save_checkpoint(self.path)


def fit(ckpt_path=None, callbacks=(), num_workers=0, **kwargs):
    trainer = Trainer(
        accelerator="cpu",
        strategy=OneOfTwo(accelerator=None, device="cpu"),
        accumulate_grad_batches=K,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        **{"max_epochs": 3, **kwargs},
    )
    module = Recorder()
    train = DataLoader(Squares(LENGTH), batch_size=2, shuffle=True, num_workers=num_workers)
    trainer.fit(module, train, DataLoader(Squares(9), batch_size=2), ckpt_path=ckpt_path)
    return module, trainer


@pytest.fixture(scope="module")
def undisturbed():
    return fit()[0].seen


pytestmark = pytest.mark.filterwarnings("ignore:.*(does not have many workers|deprecated|log_every_n_steps)")


def test_epochs_windows_and_validation(undisturbed):
    module, trainer = fit(num_workers=2)
    assert module.seen == undisturbed
    assert [entry[0] for entry in module.seen] == [0] * 12 + [1] * 12 + [2] * 12
    assert trainer.num_training_batches == 12 and trainer.global_step == 18
    assert module.validated == 1 + 3 * 3


@pytest.mark.parametrize(
    "after, hook, by_steps",
    [*((after, "batch", by_steps) for after in (16, 17, 23, 24) for by_steps in (False, True)), (0, "epoch", False)],
)
def test_a_resumed_run_continues_with_the_next_sample(tmp_path, undisturbed, after, hook, by_steps):
    limits = {"max_epochs": -1, "max_steps": 18} if by_steps else {}
    path = tmp_path / "saved.ckpt"
    fit(callbacks=[SaveAt(path, after, hook)], **limits)
    num_workers = 2 if after == 17 and not by_steps else 0
    resumed = fit(ckpt_path=path, num_workers=num_workers, **limits)[0].seen
    done = after if hook == "batch" else 12
    assert resumed == undisturbed[done:]


def test_a_run_by_steps_resumed_at_an_epochs_end_takes_whole_epochs(tmp_path, undisturbed):
    limits = {"max_epochs": -1, "max_steps": 18}
    path = tmp_path / "saved.ckpt"
    fit(callbacks=[SaveAt(path, 0, "epoch")], **limits)
    resumed = fit(ckpt_path=path, **limits)[0].seen
    # Lightning counts an empty epoch 1 here (2.6.6, with any loader), so the epochs are 2 and 3; none is cut.
    assert resumed[:12] == undisturbed[24:]
    assert [entry[0] for entry in resumed] == [2] * 12 + [3] * 12


def test_a_limit_inside_a_window():
    module, trainer = fit(limit_train_batches=3)
    assert [entry[:3] for entry in module.seen[:4]] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert trainer.global_step == 6


def test_prediction_returns_this_replicas_samples():
    trainer = Trainer(
        accelerator="cpu",
        strategy=OneOfTwo(accelerator=None, device="cpu"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    found = trainer.predict(Recorder(), DataLoader(Squares(9), batch_size=2))
    assert [batch.tolist() for batch in found] == [[0, 1], [16, 25], [64]]
