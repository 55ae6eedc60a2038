"""Chaos on the Trainer: 8 members train while they are killed, stopped and stuck; every step equals the dense run's.

    python -m tests.chaos --runs 200 --seed 0              # a line for every run, and a line of JSON at the end
    python -m tests.chaos --runs 200 --seed 0 --only 17    # run 17 alone, as it was among the others

Times are those of this machine. ``recovery_s`` counts from the last death, as its launcher saw it, to the slowest
survivor's readiness to step; where somebody was stopped or stuck, ``recovery_hang_s`` counts from the fault itself, so
the time limits that found it are in it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

MODULES = ("tests.lightning.survive_runs", "tests.chaos.plan", "lightning_ntp.strategies.trainer")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one run")
    parser.add_argument("--logs", type=Path, help="keep what every process wrote here, one folder a run")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from tests.chaos.run import run_plans
    from tests.support.zygote import PRELOAD, Zygote

    torch.set_num_threads(1)
    numbers = range(options.runs) if options.only is None else [options.only]
    logs = options.logs and options.logs.absolute()
    with Zygote([*PRELOAD, *MODULES]) as zygote:
        return int(not run_plans(zygote, options.seed, numbers, lambda line: print(line, flush=True), logs))


if __name__ == "__main__":
    sys.exit(main())
