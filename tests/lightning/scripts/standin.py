"""What the launcher's scripts share: a small model, and a Trainer of two replicas with one member each."""

import os
import pathlib

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ntp import NTPStrategy


class Boring(BoringModel):
    """Lightning's own smallest model. In `failing`, rank 1 raises in its second training step."""

    ntp_plan = {"layer": "colwise(gather_output=True)"}

    def __init__(self, failing: bool = False) -> None:
        super().__init__()
        self.failing = failing

    def training_step(self, batch, batch_idx):
        if self.failing and batch_idx == 1 and self.global_rank == 1:
            raise ValueError("rank 1 has had enough")
        return super().training_step(batch, batch_idx)


class Notes(L.Callback):
    """Leaves a file for every hook it sees, named after hook and process (`main` is the supervisor)."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def note(self, what: str, text: str = "") -> None:
        partial = pathlib.Path(self.directory, f"{what}.{os.environ.get('RANK', 'main')}.partial")
        partial.write_text(text)
        partial.rename(partial.with_suffix(""))

    def setup(self, trainer, pl_module, stage) -> None:
        self.note("setup")

    def on_train_batch_end(self, trainer, *_) -> None:
        self.note("batch")

    def on_exception(self, trainer, pl_module, exception) -> None:
        self.note("exception", type(exception).__name__)


def build_trainer(directory: str, **kwargs) -> tuple[L.Trainer, Notes]:
    torch.set_num_threads(1)
    notes = Notes(directory)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=NTPStrategy(degrees=[1, 1]),
        default_root_dir=directory,
        callbacks=[notes],
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, **kwargs},
    )
    return trainer, notes
