"""What the launcher's scripts share: a strategy with our launcher on plain DDP, and a small Trainer."""

import os
import pathlib

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

from lightning_ntp.strategies.launcher import NTPLauncher


class LauncherStrategy(DDPStrategy):
    """DDP on gloo, started by our launcher."""

    def __init__(self) -> None:
        super().__init__(process_group_backend="gloo")

    def _configure_launcher(self) -> None:
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = NTPLauncher(self.cluster_environment, self.num_processes, self.num_nodes)


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
        strategy=LauncherStrategy(),
        default_root_dir=directory,
        callbacks=[notes],
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, **kwargs},
    )
    return trainer, notes


__all__ = ["BoringModel", "build_trainer"]
