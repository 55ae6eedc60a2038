"""Two jobs, one after the other: the run without its faults and with them, and how far apart they end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from gpt.faults import VARIABLE, missing_returns
from gpt.report import read_metrics
from gpt.settings import Settings

# Largest relative difference of the final losses: a replica of another degree adds the same numbers in another order,
# and every step begins with the rounding of those before. The demo was seen at up to 1e-14, in float32 at 1e-7.
BOUNDS = {"64-true": 1e-9, "32-true": 1e-4}


def compare(settings: Settings, arguments: Sequence[str], console: Console | None = None) -> int:
    """Run both jobs with the command line ``arguments``, and print their final losses side by side.

    Each is a job of its own, as ``fit`` ends the process that the user has started.

    Returns:
        0; the exit code of a job that failed; 1 if the runs end apart, or if a member did not return as planned; 2 in a
        process that a launcher has started.
    """
    if "LOCAL_RANK" in os.environ:
        print("--compare true starts jobs of its own: give --compare false under a launcher", file=sys.stderr)
        return 2
    console = console or Console()
    undisturbed, disturbed = settings.out / "undisturbed", settings.out / "disturbed"
    for title, faults, out in (("undisturbed", "", undisturbed), (settings.fault, settings.fault, disturbed)):
        console.rule(f"run: {title}", align="left")
        code = _run([*arguments, "--compare", "false", "--fault", faults, "--out", str(out)])
        if code:
            print(f"this run failed with exit code {code}", file=sys.stderr)
            return code
    wrong = [f"{seat} did not return before the end" for seat in missing_returns(settings.fault, disturbed)]
    differences = _print_losses(console, read_metrics(undisturbed), read_metrics(disturbed))
    bound = BOUNDS.get(settings.precision) if settings.global_batch == "constant" else None
    if bound is not None:
        print(f"allowed at {settings.precision}: {bound:.0e}")
        wrong += [f"{name} differs by {value:.1e}" for name, value in differences.items() if not value <= bound]
    for text in wrong:
        print(f"not as it should be: {text}", file=sys.stderr)
    return 1 if wrong else 0


def _run(arguments: Sequence[str]) -> int:
    """Run this script with other arguments, to its end."""
    sys.stdout.flush()
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run([sys.executable, sys.argv[0], *arguments], env=environment).returncode


def _print_losses(
    console: Console, undisturbed: dict[str, list[float]], disturbed: dict[str, list[float]]
) -> dict[str, float]:
    """Print the last losses of both runs; returns their relative differences."""
    table = Table(title=f"after step {len(disturbed['train_loss'])}", title_justify="left")
    for heading in ("nats a byte", "undisturbed", "with the faults", "relative difference"):
        table.add_column(heading, justify="left" if heading == "nats a byte" else "right")
    differences = {}
    for name, title in (("train_loss", "training loss"), ("val_loss", "validation loss")):
        one, other = undisturbed[name][-1], disturbed[name][-1]
        differences[title] = abs(other - one) / abs(one)
        table.add_row(title, f"{one:.12f}", f"{other:.12f}", f"{differences[title]:.1e}")
    console.print(table)
    return differences
