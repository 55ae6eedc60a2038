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

from lightning_ntp import FaultPlan, ParallelPlan
from lightning_ntp.cli.main import build_parser
from lightning_ntp.cli.main import main as run_verb
from lightning_ntp.run import _parser as run_parser
from tests.lightning.readme_runs import REPOSITORY, Tiny, parse, run_block, run_example, train_gpt

README = (REPOSITORY / "README.md").read_text()
EXAMPLES = (REPOSITORY / "examples" / "README.md").read_text()
FACTORY = (
    "from gpt.module import GPTModule\ndef make_model():\n    return GPTModule(width=32, ffn_width=48, layers=2)\n"
)


def blocks(text: str, language: str) -> list[str]:
    """Code blocks of a language ("" for those without)."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [code for name, code in found if name == language]


def example_commands() -> list[list[str]]:
    """Arguments of every ``python examples/train_gpt.py`` of the example's README."""
    lines = [shlex.split(line, comments=True) for block in blocks(EXAMPLES, "") for line in block.splitlines()]
    return [words[2:] for words in lines if words[:2] == ["python", "examples/train_gpt.py"]]


def test_nothing_in_the_readme_is_left_out():
    assert [len(blocks(README, language)) for language in ("bash", "python", "yaml", "text")] == [3, 3, 1, 1]
    assert README.count("```") == 2 * 8
    assert sorted(set(re.findall(r"`(lightning-ntp .*?)`", README))) == [
        "lightning-ntp drain",
        "lightning-ntp join",
        "lightning-ntp layout --units 64 --nominal 8 --degree 7",
        "lightning-ntp plan my_package.train:make_model",
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
    told = workers.run(run_block, 8, blocks(README, "python")[0])
    assert told == [((4, 4), (4, 4), 5)] * 8


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
    assert cli.trainer.strategy.degrees == (4, 4)


def test_verbs(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "train.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    for command in re.findall(r"`lightning-ntp (plan .*?|layout .*?)`", README):
        assert run_verb(shlex.split(command)) == 0
    told = capsys.readouterr().out
    assert '"model.layers.*.attn": "attention(num_heads=8, num_kv_heads=4)"' in told
    assert "every block runs at degrees 8 to 1" in told and "imbalance 1.094" in told
    [script] = [
        each for each in importlib.metadata.entry_points(group="console_scripts") if each.name == "lightning-ntp"
    ]
    assert script.load() is run_verb


@pytest.fixture
def running_job(tmp_path):
    """The README's script as a job of two replicas of degree 2, one of whose members dies in step 3."""
    script = REPOSITORY / "tests" / "lightning" / "scripts" / "readme_fit.py"
    env = os.environ | {"NTP_FAULTS": "kill r1.s1@3", "PYTHONUNBUFFERED": "1"}
    with (tmp_path / "errors").open("w") as errors:
        job = subprocess.Popen(
            [sys.executable, script, REPOSITORY / "README.md"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield job
    finally:
        job.kill() if job.poll() is None else None  # its members die with it
        job.wait()
        job.stdout.close()


def test_callback_and_commands_of_a_running_job(running_job, tmp_path):
    told = running_job.stdout.readline()
    said = (tmp_path / "errors").read_text()
    assert told == "step 2: lost ['r1.s1'], degrees {0: 2, 1: 1}\n", said
    [(store, token)] = re.findall(r"store (\S+), token in (\S+) ", said)
    lines = blocks(README, "bash")[2].splitlines()
    for verb, seat in (("join", "r1.s1"), ("drain", "r0.s1")):
        [command] = [line for line in lines if line.startswith(f"lightning-ntp {verb}")]
        words = command.replace("HOST:PORT", store).replace("FILE", token).replace("r1.s2", seat)
        assert run_verb(shlex.split(words, comments=True)[1:]) == 0
    assert re.fullmatch(r"step \d+: lost \['r0\.s1'\], degrees \{0: 1, 1: [12]\}\n", running_job.stdout.readline())
    running_job.terminate()
    assert running_job.wait(60) == 0, (tmp_path / "errors").read_text()
    assert not running_job.stdout.read(), "the leader alone speaks"


def test_other_commands_are_understood():
    lines = [shlex.split(line, comments=True) for block in blocks(README, "bash")[1:] for line in block.splitlines()]
    faults, fit, demo = lines[0][0], lines[0][1:], lines[1]
    name, _, plan = faults.partition("=")
    assert (name, fit) == ("NTP_FAULTS", ["python", "train.py"])
    FaultPlan.parse(plan).check((4, 4))
    assert demo[:2] == ["python", "examples/train_gpt.py"] and parse(demo[2:]).faults
    for program, *words in lines[2:]:
        if program == "lightning-ntp":
            assert build_parser().parse_args(words).token_file == "FILE"
        else:
            assert words[:2] == ["-m", "lightning_ntp.run"]
            options = run_parser().parse_args(words[2:])
            assert (options.join, options.command) == ("r1.s2", ["train.py"])


def test_the_demo(tmp_path):
    """``make demo`` with a smaller model on replicas of degrees 2 and 1: no make, no OMP_NUM_THREADS."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    sizes = "--layers 1 --width 32 --ffn_width 48 --seq_len 32 --max_steps 40 --val_every 20 --max_bytes 300000"
    faults = ["--degrees", "[2,1]", "--fault", "kill r0.s1@3, return r0.s1@5"]
    done = subprocess.run(
        [sys.executable, "examples/train_gpt.py", "--demo", *sizes.split(), *faults, "--out", str(tmp_path / "demo")],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    expected = ("[W", "lightning_ntp: ", "planned fault: ", "r0.s1 is started again")  # [W: torch's, on odd hosts
    assert [line for line in done.stderr.splitlines() if not line.startswith(expected)] == [], "nothing to wonder about"
    table = re.findall(r"│ \S+ │ +(\d+) │ (\S.*?) +│ ([\d ]*?) +│ ([\d ]*?) +│", done.stdout)
    assert [row[1:] for row in table] == [
        ("lost: r0.s1", "", ""), ("recovered", "1 1", "8 8"), ("returned: r0.s1", "2 1", "11 5"),
    ]  # fmt: skip
    assert [int(step) for step, *_ in table[:2]] == [3, 3] and 5 < int(table[2][0]) < 40
    for name in ("training loss", "validation loss"):
        one, other, difference = re.search(rf"│ {name} +│ +(\S+) │ +(\S+) │ +(\S+) │", done.stdout).groups()
        assert float(one) < 4.5 and float(other) == pytest.approx(float(one), rel=1e-11) and float(difference) < 1e-9
    for run in ("undisturbed", "disturbed"):
        assert len((tmp_path / "demo" / run / "metrics.csv").read_text().splitlines()) == 1 + 40 + 2


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
    " --fault ''"
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
        parse(["--demo", "--degrees", "[2,1]", "--fault", "kill r0.s1@5", "--print_config"])
    Path(tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert parse(["--config", str(tmp_path / "run.yaml")]) == parse(
        ["--demo", "--degrees", "[2,1]", "--fault", "kill r0.s1@5"]
    )
