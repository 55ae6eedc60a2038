"""Train a small GPT, and go on when a member dies.

    python examples/train_gpt.py --demo                            two replicas of degree 4: undisturbed, then with a
                                                                   member that is killed and comes back
    python examples/train_gpt.py --demo --strategy auto            the same model, dense, in one process
    python examples/train_gpt.py --degrees "[8,7]" --layers 12     your own sizes; --help lists all, --config reads YAML

The model is plain torch (``gpt/model.py``) and this is an ordinary Lightning script: two lines speak of nonuniform
tensor parallelism, ``ntp_plan`` in ``gpt/module.py`` and the strategy in ``gpt/parallel.py``.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from gpt.compare import compare
from gpt.faults import WaitForReturns
from gpt.module import GPTModule
from gpt.parallel import make_strategy, replicas_of
from gpt.report import ProgressLines, Stopwatch, print_report, read_outcome
from gpt.settings import Settings, parse
from gpt.text import read_text, split
from gpt.timeline import Timeline, write_timeline
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import DoublePrecision
from torch.utils.data import DataLoader


def make_loaders(settings: Settings) -> tuple[DataLoader, DataLoader]:
    """DataLoaders of training and validation; an incomplete last batch of an epoch is left out."""
    train, validation = split(read_text(settings.max_bytes, settings.text), settings.seq_len)
    common = {"batch_size": settings.batch_size, "num_workers": settings.workers, "drop_last": True}
    return DataLoader(train, shuffle=True, **common), DataLoader(validation, **common)


def make_module(settings: Settings) -> GPTModule:
    """The model and how it learns."""
    return GPTModule(
        lr=settings.lr,
        warmup_steps=settings.warmup_steps,
        max_steps=settings.max_steps,
        weight_decay=settings.weight_decay,
        **settings.sizes,
    )


def make_trainer(settings: Settings, callbacks: list[Callback]) -> Trainer:
    """The Trainer; everything but ``strategy`` is as in any other script."""
    is_live = sys.stdout.isatty()
    callbacks = [*callbacks, TQDMProgressBar() if is_live else ProgressLines()]
    if settings.checkpoint:
        callbacks.append(ModelCheckpoint(settings.out / "checkpoints", filename="last", enable_version_counter=False))
    micro_batches = settings.max_steps * settings.accumulate
    return Trainer(
        strategy=make_strategy(settings),
        accelerator=settings.accelerator,
        devices=settings.num_devices,
        **make_precision(settings),
        max_steps=settings.max_steps,
        # A short run shows its own length in the progress bar, not that of an epoch it never ends.
        limit_train_batches=micro_batches,
        limit_val_batches=settings.val_batches,
        # Counted over epochs, so that validation also follows the very last step.
        val_check_interval=min(settings.val_every, settings.max_steps) * settings.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.clip,
        log_every_n_steps=1,
        logger=CSVLogger(settings.out.parent, name=settings.out.name, version=""),
        callbacks=callbacks,
        enable_checkpointing=settings.checkpoint,
        enable_progress_bar=is_live,
        enable_model_summary=False,
    )


def make_precision(settings: Settings) -> dict[str, Any]:
    """Arguments of the Trainer: it takes ``precision="64-true"`` only beside a strategy's name."""
    if settings.precision == "64-true":
        return {"plugins": [DoublePrecision()]}
    return {"precision": settings.precision}


def report(trainer: Trainer, settings: Settings, stopwatch: Stopwatch, timeline: Timeline) -> None:
    """Print the closing tables."""
    tokens = stopwatch.samples * settings.seq_len
    facts = {
        "optimizer steps": stopwatch.steps,
        "samples": f"{stopwatch.samples:,}",
        "tokens": f"{tokens:,}",
        "tokens/s": f"{tokens / stopwatch.seconds:,.0f}",
        "training time": f"{stopwatch.seconds:.1f} s",
        "metrics": settings.out / "metrics.csv",
    }
    print_report(replicas_of(trainer, settings), read_outcome(settings.out), facts, timeline.entries)
    write_timeline(timeline.entries, settings.out)


def main(settings: Settings) -> None:
    """Train, validate, report."""
    seed_everything(settings.seed, verbose=False)
    stopwatch = Stopwatch(lambda trainer: sum(replica.share for replica in replicas_of(trainer, settings)))
    timeline = Timeline()
    callbacks: list[Callback] = [stopwatch, timeline]
    if settings.pause and settings.faults:
        callbacks.append(WaitForReturns(settings.faults, settings.pause, stopwatch.leave_out))
    trainer = make_trainer(settings, callbacks)
    trainer.fit(make_module(settings), *make_loaders(settings))
    if trainer.is_global_zero:
        report(trainer, settings, stopwatch, timeline)


def quieten() -> None:
    """Leave out what Lightning says at each start and what does not matter here, once a process."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    # Small text in memory needs no loader processes, and replacing the old run is what `out` promises.
    for message in ("does not have many workers", "Experiment logs directory", "treespec, LeafSpec"):
        warnings.filterwarnings("ignore", message=f".*{message}.*")


if __name__ == "__main__":
    quieten()
    chosen = parse()
    if chosen.compare and chosen.faults:
        sys.exit(compare(chosen, sys.argv[1:]))
    main(chosen)
