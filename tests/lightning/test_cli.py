"""LightningCLI: every argument of the strategy from YAML and from the command line."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

import lightning_ntp  # noqa: F401  (registers "ntp")
from lightning_ntp import NTPStrategy, ParallelPlan, Timeouts
from lightning_ntp.errors import ConfigError
from tests.lightning.scripts.cli import Net, is_healthy

pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter"),
    pytest.mark.filterwarnings("ignore:No seed found"),
    pytest.mark.filterwarnings("ignore:data_parallel_size=1"),
]
TRAINER = ["--trainer.accelerator=cpu", "--trainer.devices=7", "--trainer.logger=false"]
YAML = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 3
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_ntp.NTPStrategy
    init_args:
      degrees: [2, 1]
      tensor_parallel_size: 2
      plan:
        embed: vocab
        up: colwise
        down: rowwise
      shares: [3, 1]
      grad_reduce_dtype: float64
      timeouts: {start_s: 60, collective_s: 120}
"""


def strategy_of(*arguments: str) -> NTPStrategy:
    """The strategy that a command line makes; no process starts."""
    return LightningCLI(Net, args=[*TRAINER, *arguments], run=False, save_config_callback=None).trainer.strategy


def ours(**arguments: str) -> list[str]:
    """Command line arguments of the strategy."""
    return ["--trainer.strategy=lightning_ntp.NTPStrategy"] + [
        f"--trainer.strategy.{name}={value}" for name, value in arguments.items()
    ]


def test_by_name():
    assert strategy_of("--trainer.strategy=ntp").degrees == (7,)


def test_by_class_on_the_command_line():
    strategy = strategy_of(
        *ours(
            degrees="[4,3]",
            plan='{"up": "colwise", "down": "rowwise"}',
            global_batch="shrink",
            max_micro_batch="2",
            bucket_cap_mb="1",
            min_tensor_parallel_size="2",
        ),
        "--trainer.strategy.timeouts.start_s=10",
    )
    assert strategy.degrees == (4, 3) and strategy.topology.nominal_degree == 4
    config = strategy.config
    assert (config.global_batch, config.max_micro_batch, config.bucket_cap_mb) == ("shrink", 2, 1.0)
    assert config.min_tensor_parallel_size == 2 and config.timeouts == Timeouts(start_s=10)
    as_object = '{"class_path": "lightning_ntp.ParallelPlan", "init_args": {"styles": {"embed": "vocab"}}}'
    plan = strategy_of("--trainer.strategy=NTPStrategy", f"--trainer.strategy.plan={as_object}")._plan
    assert isinstance(plan, ParallelPlan) and plan.as_strings() == {"embed": "vocab"}


def test_every_argument_has_a_default_and_a_type_that_can_be_filled():
    given = {
        "data_parallel_size": ("2", 2),
        "tensor_parallel_size": ("5", 5),
        "degrees": ("[4,3]", (4, 3)),
        "plan": ('{"embed": "vocab"}', {"embed": "vocab"}),
        "global_batch": ("shrink", "shrink"),
        "shares": ("[3,1]", (3, 1)),
        "max_micro_batch": ("2", 2),
        "bucket_cap_mb": ("1.5", 1.5),
        "grad_reduce_dtype": ("bfloat16", "bfloat16"),
        "min_tensor_parallel_size": ("1", 1),
        "fault_tolerance": ("false", False),
        "respawn": ("once", "once"),
        "verify_every_n_steps": ("50", 50),
        "detectors": ('["tests.lightning.scripts.cli.is_healthy"]', (is_healthy,)),
        "xid_policy": ("{43: note}", {43: "note"}),
        "timeouts": ("{start_s: 60}", Timeouts(start_s=60)),
        "process_group_backend": ("gloo", "gloo"),
    }
    arguments = dict(list(inspect.signature(NTPStrategy.__init__).parameters.items())[1:])
    assert arguments.keys() == given.keys(), "a new argument belongs here too"
    for argument in arguments.values():
        assert argument.default is not inspect.Parameter.empty and argument.annotation is not inspect.Parameter.empty
    strategy = strategy_of(*ours(**{name: text for name, (text, _) in given.items()}))
    for name, (_, value) in given.items():
        holder = strategy.config if hasattr(strategy.config, name) else strategy
        assert getattr(holder, "_plan" if name == "plan" else name) == value, name


def test_printed_config_reads_back(tmp_path, capsys):
    given = tmp_path / "given.yaml"
    given.write_text(YAML)
    with pytest.raises(SystemExit):
        LightningCLI(Net, args=["--config", str(given), "--print_config"], run=False)
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    first, second = (
        LightningCLI(Net, args=["--config", str(path)], run=False).trainer.strategy for path in (given, printed)
    )
    assert first.config == second.config and first._plan == second._plan == {
        "embed": "vocab",
        "up": "colwise",
        "down": "rowwise",
    }
    assert first.config.shares == (3, 1) and first.config.timeouts == Timeouts(start_s=60, collective_s=120)
    assert first.config.reduce_dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"degrees": "4"}, "Expected a <class 'list'>"),
        ({"degrees": "[4,x]"}, "degrees"),
        ({"global_batch": "huge"}, "Expected a typing.Literal['constant', 'shrink', 'auto']. Got value: huge"),
        ({"degree": "[4,3]"}, "Option 'degree' is not accepted"),
        ({"plan": "something"}, 'Parser key "plan"'),
        ({"timeouts": "{start: 1}"}, "timeouts"),
    ],
)
def test_values_of_a_wrong_type(capsys, arguments, told):
    with pytest.raises(SystemExit):
        strategy_of(*ours(**arguments))
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"degrees": "[4,4]"}, r"degrees=\[4, 4\] sum to 8, but the Trainer has 7 devices: pass devices=8"),
        (
            {"tensor_parallel_size": "2"},
            "data_parallel_size=3 x tensor_parallel_size=2 is not the number of devices, 7",
        ),
        ({"degrees": "[4,3]", "min_tensor_parallel_size": "5"}, "min_tensor_parallel_size=5 is above"),
    ],
)
def test_values_that_do_not_fit(arguments, told):
    with pytest.raises(ConfigError, match=told):
        strategy_of(*ours(**arguments))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"timeouts.start_s": "1"}, r"timeouts.*start_s=1\.0"),
        ({"bucket_cap_mb": "-3"}, "bucket_cap_mb=-3.0 must be a positive number of mebibytes"),
    ],
)
def test_values_that_the_constructor_refuses(arguments, told):
    """jsonargparse wraps our error into one of its own; the text is in it."""
    with pytest.raises(ValueError, match=told):
        strategy_of(*ours(**arguments))


def test_a_real_run(tmp_path):
    """The script does not import lightning_ntp: a class path in YAML is enough."""
    (tmp_path / "run.yaml").write_text(YAML)
    script = Path(__file__).parent / "scripts" / "cli.py"
    done = subprocess.run(
        [sys.executable, script, "fit", "--config", "run.yaml", "--trainer.max_steps=3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told = sorted(line for line in done.stdout.splitlines() if " of " in line)
    assert told == [f"{seat} of (2, 1), shares (3, 1), step 3" for seat in ("r0.s0", "r0.s1", "r1.s0")]
    assert (tmp_path / "config.yaml").exists() or (tmp_path / "lightning_logs").exists()
