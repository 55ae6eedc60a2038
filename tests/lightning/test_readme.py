"""The commands and the code of the two READMEs do what they say."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_ntp import ParallelPlan
from lightning_ntp.cli.main import main as run_verb
from tests.lightning.readme_runs import REPOSITORY, Tiny, parse, run_block, run_example, train_gpt

README = (REPOSITORY / "README.md").read_text()
EXAMPLES = (REPOSITORY / "examples" / "README.md").read_text()
FACTORY = (
    "from gpt.module import GPTModule\ndef make_model():\n    return GPTModule(width=32, ffn_width=48, layers=2)\n"
)


def blocks(text: str, language: str) -> list[str]:
    """Code blocks of a language ("" for those without)."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def example_commands() -> list[list[str]]:
    """Arguments of every ``python examples/train_gpt.py`` of the example's README."""
    lines = [shlex.split(line, comments=True) for block in blocks(EXAMPLES, "") for line in block.splitlines()]
    return [words[2:] for words in lines if words[:2] == ["python", "examples/train_gpt.py"]]


def test_nothing_in_the_readme_is_left_out():
    assert [len(blocks(README, language)) for language in ("bash", "python", "yaml")] == [1, 2, 1]
    assert README.count("```") == 2 * 4
    assert re.findall(r"`(lightning-ntp .*?)`", README) == [
        "lightning-ntp plan my_package.train:make_model",
        "lightning-ntp layout --units 64 --nominal 8 --degree 7",
    ]
    for path in re.findall(r"\]\(([^)]*)\)", README + EXAMPLES):
        assert "://" in path or (REPOSITORY / path).exists(), f"{path} is linked and missing"


@pytest.mark.parametrize("line", blocks(README, "bash")[0].splitlines())
def test_make_targets(line):
    """``make -n``, as the test runs inside one of them; the demo's own command follows below."""
    target = shlex.split(line, comments=True)
    command = [target[0], "-n", "--no-print-directory", *target[1:]]  # `make test` runs this inside of make
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    last = done.stdout.splitlines()[-1]
    expected = {
        "demo": r"\S+/python examples/train_gpt\.py --demo",
        "test": r"\S+/python -m pytest -m \"not slow and not parity and not exhaustive and not gpu\"",
    }
    assert re.fullmatch(expected[target[1]], last)


def test_python_that_trains(workers):
    told = workers.run(run_block, 7, blocks(README, "python")[0])
    assert told == [((4, 3), (5, 3), 5)] * 7


def test_python_that_plans():
    names: dict[str, dict[str, str]] = {}
    exec(blocks(README, "python")[1], names)
    module = train_gpt.make_module(parse(["--demo"]))
    assert ParallelPlan(names["ntp_plan"]).match(module) == ParallelPlan(module.ntp_plan).match(module)


@pytest.mark.filterwarnings("ignore")
def test_yaml(tmp_path):
    config = yaml.safe_load(blocks(README, "yaml")[0])
    config["trainer"] |= {"accelerator": "cpu", "logger": False}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    cli = LightningCLI(Tiny, args=["--config", str(tmp_path / "run.yaml")], run=False, save_config_callback=None)
    assert cli.trainer.strategy.degrees == (4, 3)


def test_verbs(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "train.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    for command in re.findall(r"`lightning-ntp (.*?)`", README):
        assert run_verb(shlex.split(command)) == 0
    told = capsys.readouterr().out
    assert '"model.layers.*.attn": "attention(num_heads=8, num_kv_heads=4)"' in told
    assert "every block runs at degrees 8 to 1" in told and "imbalance 1.094" in told
    [script] = [
        each for each in importlib.metadata.entry_points(group="console_scripts") if each.name == "lightning-ntp"
    ]
    assert script.load() is run_verb


def test_the_demo(tmp_path):
    """``make demo`` with fewer steps: seven processes, no make, no OMP_NUM_THREADS."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "examples/train_gpt.py", "--demo", "--max_steps", "6", "--val_every", "3"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "demo"), "--max_bytes", "300000"],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if not line.startswith("[W")]  # torch's C++ side, on odd hosts
    assert told == [], "nothing to wonder about"
    assert re.search(r"r0 .* 4 .* 9 .*\n.* r1 .* 3 .* 7 ", done.stdout)
    losses = [float(value) for value in re.findall(r"train_loss (\S+)", done.stdout)]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
    table = (tmp_path / "demo" / "metrics.csv").read_text().splitlines()
    assert len(table) == 1 + 6 + 2


@pytest.mark.parametrize("arguments", example_commands(), ids=" ".join)
def test_example_commands_are_understood(arguments, capsys):
    if "--help" in arguments:
        with pytest.raises(SystemExit) as caught:
            parse(arguments)
        assert caught.value.code == 0 and "--degrees" in capsys.readouterr().out
        return
    settings = parse(arguments)
    assert not settings.is_ntp or settings.num_devices == sum(settings.degrees)


SHORT = (
    "--layers 1 --width 32 --ffn_width 48 --seq_len 32 --max_steps 4 --val_every 4 --val_batches 1 --max_bytes 100000"
)


@pytest.mark.parametrize(
    ("arguments", "shares"),
    [
        ('--degrees "[2,2,1]" --accumulate 3', [29, 29, 14]),
        ('--degrees "[3,1]" --text book.txt --tied true --checkpoint true', [12, 4]),
        ('--degrees "[2,1]" --global_batch shrink --workers 2', [8, 4]),
        ("--strategy auto --batch_size 16", [16]),
    ],
)
def test_example_options(workers, tmp_path, arguments, shares):
    (tmp_path / "book.txt").write_text(README * 20)
    words = shlex.split(f"--demo {SHORT} {arguments} --out run")
    told = workers.run(run_example, parse(words).num_devices, words, cwd=tmp_path)
    assert not any(told[1:]), "the leader alone speaks"
    rows = re.findall(r"r\d\D+(\d+)\D+(\d+)\D+[\d.]+%", told[0])
    assert [int(share) for _, share in rows] == shares
    assert f"{4 * sum(shares)} " in told[0] and told[0].count("train_loss") == 4
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 1 + 4 + 1
    if "--checkpoint" in words:
        saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt")
        plain = train_gpt.make_module(parse(words))
        plain.load_state_dict(saved["state_dict"])


def test_printed_options_read_back(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(["--demo", "--degrees", "[2,1]", "--print_config"])
    Path(tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert parse(["--config", str(tmp_path / "run.yaml")]) == parse(["--demo", "--degrees", "[2,1]"])
