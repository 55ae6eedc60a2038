"""The command line: the fields of one dataclass, a preset for the demo, and the parser made from both."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jsonargparse import ArgumentParser

from gpt.faults import check_faults
from gpt.model import GPTConfig
from gpt.text import VOCAB_SIZE

# Small enough that eight processes share two CPU cores; each value can still be given on the command line. In float64
# the two runs that are compared can be told from two that only look alike.
DEMO = MappingProxyType(
    {
        "degrees": [4, 4],
        "fault": "kill r1.s2@20, return r1.s2@40",
        "compare": True,
        "pause": 1.5,
        "precision": "64-true",
        "accelerator": "cpu",
        "layers": 2,
        "width": 128,
        "ffn_width": 256,
        "seq_len": 64,
        "max_steps": 80,
        "val_every": 40,
        "val_batches": 4,
        "max_bytes": 4_000_000,
        "out": "runs/demo",
    }
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train a small GPT on the source of Python's standard library.

    Attributes:
        strategy: ``ntp`` for nonuniform tensor parallelism; any other name goes to the Trainer as it is, with
            ``devices``: ``auto`` trains the same model densely in one process.
        degrees: Degree of each replica, used by ``ntp``; the highest is the nominal degree.
        fault: What is to go wrong, used by ``ntp``: ``kill r1.s2@20, return r1.s2@40`` kills the member at seat r1.s2
            in step 20 and has a process started there again in step 40.
        respawn: Whether a process is started again wherever one has died, used by ``ntp``: ``never``, ``once`` or
            ``always``.
        pause: Seconds to pause before each step while a process that ``fault`` brings back starts: where members share
            few CPU cores it would get too little of them.
        compare: Whether to run without ``fault`` first, as a job of its own, and to compare how the two runs end.
        devices: Number of processes where the strategy is not ``ntp``, whose number is the sum of its degrees.
        accelerator: ``cpu``, ``gpu`` or ``auto``.
        global_batch: What a reduced replica does to the global batch, used by ``ntp``: ``constant`` or ``shrink``.
        layers: Number of blocks.
        width: Size of the residual stream.
        heads: Number of query heads.
        kv_heads: Number of key/value heads.
        ffn_width: Inner size of the feed-forward.
        tied: Whether embedding and head share one weight.
        seq_len: Bytes of one sequence.
        batch_size: Sequences of one micro-batch of one replica; the global batch has
            ``batch_size * replicas * accumulate``.
        accumulate: Micro-batches of one optimizer step.
        max_steps: Optimizer steps.
        lr: Highest learning rate.
        warmup_steps: Optimizer steps until it is reached.
        weight_decay: AdamW's weight decay.
        clip: Largest norm of the gradient.
        precision: A Trainer precision, like ``32-true``, ``64-true``, ``bf16-mixed``.
        val_every: Optimizer steps between validations; one always follows the last step.
        val_batches: Batches of one validation.
        text: A file of your own to learn instead of the standard library.
        max_bytes: Most bytes of text to read.
        workers: Processes of each DataLoader.
        seed: Seed of weights and sample order.
        checkpoint: Whether to save ``last.ckpt`` below ``out``.
        out: Folder of the run; an old run in it is replaced.
    """

    strategy: str = "ntp"
    degrees: list[int] = field(default_factory=lambda: [4, 3])
    fault: str = ""
    respawn: str = "never"
    pause: float = 0.0
    compare: bool = False
    devices: int = 1
    accelerator: str = "auto"
    global_batch: str = "constant"
    layers: int = 4
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    ffn_width: int = 768
    tied: bool = False
    seq_len: int = 256
    batch_size: int = 8
    accumulate: int = 1
    max_steps: int = 1000
    lr: float = 3e-3
    warmup_steps: int = 10
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: str = "32-true"
    val_every: int = 100
    val_batches: int = 20
    text: Path | None = None
    max_bytes: int = 16_000_000
    workers: int = 0
    seed: int = 1
    checkpoint: bool = False
    out: Path = Path("runs/gpt")

    def __post_init__(self) -> None:
        for name in ("devices", "seq_len", "batch_size", "accumulate", "max_steps", "val_every", "val_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must be at least 1")
        if not self.degrees or min(self.degrees) < 1:
            raise ValueError(f"--degrees {self.degrees}: give one degree of at least 1 for each replica, like [4,3]")
        if self.faults:
            check_faults(self.faults, self.degrees, self.max_steps)

    @property
    def sizes(self) -> dict[str, Any]:
        """The fields of ``GPTConfig``."""
        names = ("layers", "width", "heads", "kv_heads", "ffn_width", "tied")
        return {name: getattr(self, name) for name in names} | {"vocab_size": VOCAB_SIZE}

    @property
    def is_ntp(self) -> bool:
        return self.strategy == "ntp"

    @property
    def faults(self) -> str:
        """What is to go wrong in this run."""
        return self.fault if self.is_ntp else ""

    @property
    def num_devices(self) -> int:
        return sum(self.degrees) if self.is_ntp else self.devices


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from a command line (``sys.argv`` when None); ``--demo`` changes the defaults to ``DEMO``."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = ArgumentParser(prog="train_gpt.py", description="Train a small GPT on the source of Python's library.")
    parser.add_argument("--config", action="config", help="a YAML file of these arguments")
    parser.add_argument("--demo", action="store_true", help="a small run on the CPU, without faults and with them")
    parser.add_class_arguments(Settings, as_group=False)
    if "--demo" in arguments:
        parser.set_defaults(dict(DEMO))
    values = parser.parse_args(arguments)
    try:
        settings = Settings(**{name: getattr(values, name) for name in Settings.__dataclass_fields__})
        GPTConfig(**settings.sizes)
    except ValueError as error:
        parser.error(str(error))
    return settings
