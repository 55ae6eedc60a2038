"""The example's parts on one process: model, text, command line, and a short dense run."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from torch import nn

# The example is a script beside the package, not part of it.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_gpt
from gpt import settings as command_line
from gpt.model import GPT, Attention, GPTConfig, rotary_angles, rotate
from gpt.module import GPTModule, warmup_cosine
from gpt.parallel import Replica
from gpt.report import Outcome, print_report, read_outcome
from gpt.text import ByteChunks, read_text, source_files, split

SMALL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48, "vocab_size": 64}


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (2, 10), generator=torch.Generator().manual_seed(0))


def small_gpt(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**SMALL | changes)).double()


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_gets_a_gradient(tokens: torch.Tensor, tied: bool) -> None:
    model = small_gpt(tied=tied)
    logits = model(tokens)
    assert logits.shape == (2, 10, 64)
    logits.square().mean().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model.parameters())


def test_logits_depend_on_no_later_token(tokens: torch.Tensor) -> None:
    model, changed = small_gpt(), tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 64
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_tied_head_is_the_embedding() -> None:
    tied, untied = small_gpt(tied=True), small_gpt()
    assert tied.lm_head.weight is tied.embed.weight
    assert sum(1 for _ in untied.parameters()) == sum(1 for _ in tied.parameters()) + 1


def test_forward_runs_on_the_meta_device() -> None:
    with torch.device("meta"):
        logits = GPT(GPTConfig(**SMALL))(torch.zeros(2, 10, dtype=torch.long))
    assert logits.is_meta and logits.shape == (2, 10, 64)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    cos, sin = rotary_angles(12, 8, 10_000.0, torch.device("cpu"))
    query, key = (torch.randn(8).expand(12, 8) for _ in range(2))
    turned_query, turned_key = rotate(query, cos, sin), rotate(key, cos, sin)
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm(dim=-1))
    products = turned_query @ turned_key.T
    torch.testing.assert_close(products[3, 1], products[9, 7])


def slot_of(attention: Attention, query_heads: range, kv_heads: range) -> Attention:
    """The attention as a slot holds it: the same code, narrower projections."""
    slot = Attention(GPTConfig(**SMALL)).double()
    size = attention.head_size
    for name, heads in (("q_proj", query_heads), ("k_proj", kv_heads), ("v_proj", kv_heads), ("o_proj", query_heads)):
        weight = getattr(attention, name).weight.detach()
        cut = slice(heads.start * size, heads.stop * size)
        getattr(slot, name).weight = nn.Parameter(weight[:, cut] if name == "o_proj" else weight[cut])
    return slot


def test_attention_code_serves_slots_of_any_number_of_heads() -> None:
    attention = small_gpt().layers[0].attn
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    angles = rotary_angles(10, attention.head_size, 10_000.0, x.device)
    slots = [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 2)), (range(3, 4), range(1, 2)), (range(0), range(0))]
    total = sum(slot_of(attention, *heads)(x, *angles) for heads in slots)
    torch.testing.assert_close(total, attention(x, *angles), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"kv_heads": 3}, "kv_heads=3"), ({"width": 36}, "width=36"), ({"layers": 0}, "layers=0")],
)
def test_config_names_the_size_that_does_not_fit(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GPTConfig(**SMALL | changes)


def test_plan_names_modules_that_exist() -> None:
    module = GPTModule(**SMALL)
    names = dict(module.named_modules())
    for pattern in module.ntp_plan:
        assert pattern.replace("*", "0") in names
    assert module.ntp_plan["model.layers.*.attn"] == "attention(num_heads=4, num_kv_heads=2)"


def test_optimizer_decays_matrices_only_and_holds_each_parameter_once() -> None:
    module = GPTModule(**SMALL, tied=True)
    matrices, vectors = module.configure_optimizers()["optimizer"].param_groups
    assert {weight.dim() for weight in matrices["params"]} == {2} and matrices["weight_decay"] > 0
    assert {weight.dim() for weight in vectors["params"]} == {1} and vectors["weight_decay"] == 0
    assert len(matrices["params"]) + len(vectors["params"]) == sum(1 for _ in module.parameters())


def test_schedule_rises_then_falls_to_the_floor() -> None:
    factors = [warmup_cosine(step, 10, 100) for step in range(101)]
    assert factors[:10] == sorted(factors[:10]) and factors[0] > 0
    assert factors[10] == max(factors) == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True) and factors[100] == pytest.approx(0.1)


def test_text_is_the_same_at_every_reading() -> None:
    text = read_text(200_000)
    assert len(text) == 200_000 and text == read_text(200_000) and b"import" in text


def test_text_leaves_out_foreign_code_tests_and_build_files(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "a.txt", "_sysconfigdata_x.py", "sub/c.py", "site-packages/d.py", "sub/test/e.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    assert [str(file.relative_to(tmp_path)) for file in source_files(tmp_path)] == ["a.py", "b.py", "sub/c.py"]


def test_pieces_overlap_by_one_byte_and_miss_none() -> None:
    pieces = ByteChunks(bytes(range(50)), seq_len=7)
    assert len(pieces) == 7
    assert [piece.tolist() for piece in map(pieces.__getitem__, (0, 6))] == [list(range(8)), list(range(42, 50))]
    assert pieces[0].dtype == torch.long
    with pytest.raises(IndexError):
        pieces[7]
    with pytest.raises(ValueError, match="seq_len=50"):
        ByteChunks(bytes(50), seq_len=50)


def test_split_keeps_training_and_validation_apart() -> None:
    train, validation = split(bytes(range(200)) * 5, seq_len=9)
    assert (len(train), len(validation)) == (105, 5)
    assert train[104].tolist()[-1] < 950 and validation[0].tolist() == list(range(150, 160))


def test_command_line_demo_is_a_set_of_defaults() -> None:
    demo = command_line.parse(["--demo", "--max_steps", "7", "--degrees", "[2,1]", "--fault", ""])
    assert (demo.max_steps, demo.degrees, demo.num_devices) == (7, [2, 1], 3)
    assert (demo.accelerator, demo.out, demo.width) == ("cpu", Path("runs/demo"), 128)
    assert command_line.parse(["--demo"]).degrees == [4, 4]
    assert command_line.parse(["--demo"]).max_steps >= 60
    assert command_line.parse(["--strategy", "auto"]).num_devices == 1
    assert not command_line.parse(["--demo", "--strategy", "auto", "--max_steps", "7"]).faults
    assert command_line.parse([]).out == Path("runs/gpt")


def test_command_line_reads_a_config_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"degrees": [3, 2], "tied": True, "text": "book.txt"}))
    settings = command_line.parse(["--config", str(file), "--lr", "0.01"])
    assert (settings.degrees, settings.tied, settings.text, settings.lr) == ([3, 2], True, Path("book.txt"), 0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--degrees", "[4,0]"], "--degrees [4, 0]"),
        (["--accumulate", "0"], "--accumulate 0"),
        (["--kv_heads", "3"], "kv_heads=3"),
        (["--no_such_option", "1"], "no_such_option"),
        (["--fault", "kil r1.s2@20"], "'kil' is no kind"),
        (["--fault", "kill r1.s4@20"], "'kill r1.s4@20' never happens"),
        (["--demo", "--max_steps", "20"], "'kill r1.s2@20' never happens, as the run has 20 steps"),
    ],
)
def test_command_line_refuses_by_name(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(arguments)
    assert words in capsys.readouterr().err


def test_report_shows_replicas_and_losses() -> None:
    out = io.StringIO()
    replicas = [Replica("r0", 4, 9), Replica("r1", 3, 7)]
    print_report(replicas, Outcome(5.5, 2.25, 10, 2.5), {"samples": 16}, console=Console(file=out, width=100))
    for words in ("r0", "r1", "56.2%", "43.8%", "5.500", "last 10 steps", "2.250", "2.500", "samples"):
        assert words in out.getvalue()


def dense_run(out: Path, *more: str) -> tuple[list[str], Outcome]:
    """Run the example densely for a few steps; its metrics file and losses."""
    sizes = "--layers 1 --width 32 --ffn_width 48 --heads 4 --kv_heads 2 --seq_len 32 --max_bytes 100000"
    length = "--max_steps 6 --warmup_steps 1 --lr 0.01 --val_every 3 --val_batches 1"
    arguments = f"--demo --strategy auto {sizes} {length}".split() + ["--out", str(out), *more]
    train_gpt.main(command_line.parse(arguments))
    return (out / "metrics.csv").read_text().splitlines(), read_outcome(out)


@pytest.mark.filterwarnings("ignore")
def test_dense_run_learns_reports_and_repeats_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, outcome = dense_run(tmp_path / "run")
    # A header, a line for each of six optimizer steps, and one for each of two validations.
    assert len(lines) == 1 + 6 + 2
    assert outcome.last_loss < outcome.first_loss - 0.1
    assert outcome.num_last == 6
    told = capsys.readouterr().out
    assert "tokens/s" in told and "loss, last 6 steps" in told
    assert told.count("train_loss") == 6 and told.count("val_loss") == 2, "no progress bar where nobody looks"
    again, _ = dense_run(tmp_path / "run")
    assert again == lines


@pytest.mark.filterwarnings("ignore")
def test_dense_run_accumulates_and_saves(tmp_path: Path) -> None:
    lines, _ = dense_run(tmp_path / "run", "--accumulate", "2", "--checkpoint", "true")
    assert len(lines) == 1 + 6 + 2
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 6
