"""What it costs to be able to survive: vote, snapshot and hash in one step of the demo, timed in a run of it.

    make bench                                                  or, with other numbers of steps and other hashes,
    PYTHONPATH=.:examples python benchmarks/surviving.py --steps 60 --every 10

Without a failure a step takes, for the sake of failures: the vote (whoever comes last to it does not wait, so that
one's time counts), a snapshot of what a second run of the step must find, the look for a new view, and every so many
steps the hash of an eighth of the weights. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import train_gpt
from gpt.settings import Settings, parse
from lightning.pytorch import Callback, Trainer

from lightning_ntp.engine.fingerprint import Fingerprint
from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.strategies import windows

FOLDER, EVERY = "NTP_BENCHMARK_FOLDER", "NTP_BENCHMARK_EVERY"
WARM_UP = 10
"""Steps that do not count."""
PARTS = ("step", "vote", "snapshot", "view", "hash")

Seconds = dict[str, list[float]]


def measure(arguments: Sequence[str]) -> int:
    """Run the demo's training with timers, and print what they say."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="verify_every_n_steps")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        demo = ["--demo", "--compare", "false", "--fault", "", "--val_every", "100000"]
        command = [sys.executable, __file__, *demo, f"--max_steps={chosen.steps}", "--out", f"{folder}/run"]
        environment = {**os.environ, FOLDER: folder, EVERY: str(chosen.every)}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        members = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    print(json.dumps(summarize(members, chosen.every)))
    return 0


def summarize(members: Sequence[Seconds], every: int) -> dict[str, Any]:
    """Milliseconds of a step, medians over the steps, and the ratio of all parts to the step."""

    def typical(name: str, over: Callable[[Sequence[float]], float]) -> float:
        return median(map(over, zip(*(member[name][WARM_UP:] for member in members), strict=True)))

    parts = {
        "vote": typical("vote", min),
        "snapshot": typical("snapshot", median),
        "view": typical("view", median),
        "hash": median(value for member in members for value in member["hash"][WARM_UP:] if value) / every,
    }
    step = typical("step", median)
    shown = {f"{name}_ms": round(1000 * seconds, 3) for name, seconds in {"step": step, **parts}.items()}
    return {"members": len(members), **shown, "ratio": round(sum(parts.values()) / step, 4)}


class Timers(Callback):
    """Adds up what each part takes in every step, and leaves it in a file."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._steps: Seconds = {part: [] for part in PARTS}
        for owner, name, part in (
            (Survivor, "vote", "vote"),
            (Survivor, "enter_step", "view"),
            (Survivor, "enter_run", "view"),
            (Fingerprint, "of", "hash"),
            (windows, "StepSnapshot", "snapshot"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._spent[part] += time.perf_counter() - began

        return run

    def on_train_batch_start(self, *arguments: Any) -> None:
        self._spent.clear()
        self._began = time.perf_counter()

    def on_train_batch_end(self, *arguments: Any) -> None:
        self._spent["step"] = time.perf_counter() - self._began
        self._spent["vote"] -= self._spent["hash"]  # it is hashed inside the vote
        for part in PARTS:
            self._steps[part].append(self._spent[part])

    def on_train_end(self, *arguments: Any) -> None:
        Path(os.environ[FOLDER], f"{os.getpid()}.json").write_text(json.dumps(self._steps))


def train() -> None:
    """One member of the demo, with timers."""
    make_trainer = train_gpt.make_trainer

    def with_timers(settings: Settings, callbacks: list[Callback]) -> Trainer:
        trainer = make_trainer(settings, [*callbacks, Timers()])
        strategy = trainer.strategy
        strategy.config = replace(strategy.config, verify_every_n_steps=int(os.environ[EVERY]))
        return trainer

    train_gpt.make_trainer = with_timers
    train_gpt.quieten()
    train_gpt.main(parse())


if __name__ == "__main__":
    if FOLDER in os.environ:
        train()
    else:
        sys.exit(measure(sys.argv[1:]))
