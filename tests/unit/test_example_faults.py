"""The example's timeline, its pauses, and its comparison of two runs, without any member that dies."""

from __future__ import annotations

import io
import os
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

# The example is a script beside the package, not part of it.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt.compare import compare
from gpt.faults import VARIABLE, WaitForReturns, missing_returns
from gpt.report import Outcome, print_report
from gpt.settings import parse
from gpt.timeline import Entry, Timeline, write_timeline

from lightning_ntp import ViewEvent
from lightning_ntp.topology import Seat, Topology

LOST = ViewEvent(
    generation=1, step=19, cause="r1.s2 is gone", gone=(Seat(1, 2),), joined=(), leader=Seat(0, 0),
    degrees_before={0: 4, 1: 4}, degrees_after={0: 4, 1: 3}, seconds={"total": 0.254},
)  # fmt: skip
BACK = replace(LOST, generation=2, step=44, cause="planned", gone=(), joined=(Seat(1, 2),), degrees_after={0: 4, 1: 4})
DEMO = ["--demo", "--max_steps", "50"]


def told(*hooks: tuple[str, ViewEvent, tuple[int, ...]]) -> list[Entry]:
    """What the timeline has after these hooks, each with the shares at that time."""
    timeline = Timeline()
    for name, event, shares in hooks:
        getattr(timeline, name)(SimpleNamespace(strategy=SimpleNamespace(shares=shares)), None, event)
    return timeline.entries


def test_timeline_tells_who_went_and_who_came() -> None:
    entries = told(
        ("on_ntp_view", LOST, (8, 8)),
        ("on_ntp_recovered", LOST, (9, 7)),
        ("on_ntp_view", BACK, (9, 7)),
        ("on_ntp_rejoin", BACK, (8, 8)),
    )
    assert [replace(entry, time="") for entry in entries] == [
        Entry("", 20, "lost: r1.s2"),
        Entry("", 20, "recovered", "4 3", "9 7", "0.25"),
        Entry("", 45, "returned: r1.s2", "4 4", "8 8", "0.25"),
    ]


def test_timeline_tells_other_changes() -> None:
    drained = replace(LOST, cause="planned")
    whole = replace(LOST, gone=(Seat(1, 0), Seat(1, 1)), degrees_after={0: 4})
    entries = told(
        ("on_ntp_view", drained, (8, 8)),
        ("on_ntp_view", replace(LOST, gone=()), (8, 8)),
        ("on_ntp_recovered", whole, (16, 0)),
    )
    assert [entry.event for entry in entries] == ["left: r1.s2", "interrupted: r1.s2 is gone", "recovered"]
    assert (entries[2].degrees, entries[2].shares) == ("4 0", "16 0")


def test_report_has_a_timeline_if_something_happened() -> None:
    for entries, words in (([], []), ([Entry("12:00:01", 20, "lost: r1.s2")], ["timeline", "12:00:01", "lost: r1.s2"])):
        out = io.StringIO()
        print_report([], Outcome(5.5, 2.25, 10, 2.5), {}, entries, Console(file=out, width=100))
        assert all(word in out.getvalue() for word in words)
        assert ("timeline" in out.getvalue()) == bool(entries)


def test_missing_returns_are_found(tmp_path: Path) -> None:
    faults = "kill r1.s2@20, return r1.s2@40, kill r0.s1@21, return r0.s1@41"
    write_timeline(told(("on_ntp_rejoin", BACK, (8, 8))), tmp_path)
    assert missing_returns(faults, tmp_path) == ["r0.s1"]
    assert missing_returns("return r1@40, return r1.s20@40, return r0@40", tmp_path) == ["r1.s20", "r0"]


def test_members_pause_from_the_return_until_it_is_there() -> None:
    paused: list[float] = []
    callback = WaitForReturns("kill r1.s2@2, return r1.s2@4", 0.01, paused.append)
    full = Topology.start([4, 4])
    reduced = Topology(4, (full.seats[0], full.seats[1][:2] + full.seats[1][3:]))
    began = time.monotonic()
    for step, topology in enumerate([full, full, reduced, reduced, reduced, reduced, reduced, full, full, reduced]):
        trainer = SimpleNamespace(strategy=SimpleNamespace(topology=topology), global_step=step)
        callback.on_train_batch_start(trainer, None)
    assert paused == [0.01, 0.01], "in steps 5 and 6"
    assert time.monotonic() - began >= 0.02


SCRIPT = """
    import os, sys
    from pathlib import Path
    assert "NTP_FAULTS" not in os.environ
    words = dict(zip(sys.argv, sys.argv[1:]))
    assert words["--compare"] == "false" and words["--demo"] == "--max_steps"
    out = Path(words["--out"])
    out.mkdir(parents=True)
    is_disturbed = bool(words["--fault"])
    loss = 2.5 * (1 + {difference} * is_disturbed)
    (out / "metrics.csv").write_text(f"train_loss,val_loss\\n5.5,\\n{{loss}},\\n,2.5\\n")
    (out / "timeline.csv").write_text("time,step,event\\n" + is_disturbed * "12:00:01,45,{event}\\n")
    sys.exit({code} * is_disturbed)
"""


@pytest.mark.parametrize(
    ("difference", "event", "code", "more", "expected", "words"),
    [
        (1e-12, "returned: r1.s2", 0, (), 0, ""),
        (1e-8, "returned: r1.s2", 0, (), 1, "training loss differs by 1.0e-08"),
        (float("nan"), "returned: r1.s2", 0, (), 1, "training loss differs by nan"),
        (1e-8, "returned: r1.s2", 0, ("--precision", "32-true"), 0, ""),
        (0.5, "returned: r1.s2", 0, ("--global_batch", "shrink"), 0, ""),
        (0.0, "lost: r1.s2", 0, (), 1, "r1.s2 did not return before the end"),
        (0.0, "returned: r1.s2", 83, (), 83, "exit code 83"),
    ],
)
def test_comparison(tmp_path, monkeypatch, capsys, difference, event, code, more, expected, words) -> None:
    """The two jobs are those of a script that writes what a run would have written."""
    script = tmp_path / "script.py"
    text = textwrap.dedent(SCRIPT).format(difference=f"float('{difference}')", event=event, code=code)
    script.write_text(text)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setitem(os.environ, VARIABLE, "kill r0.s0@1")
    monkeypatch.delitem(os.environ, "LOCAL_RANK", raising=False)
    arguments = [*DEMO, *more, "--out", str(tmp_path / "run")]
    out = io.StringIO()
    assert compare(parse(arguments), arguments, Console(file=out, width=100)) == expected
    assert words in capsys.readouterr().err
    assert ("2.5000" in out.getvalue()) == (code == 0)


def test_comparison_is_for_a_process_of_its_own(monkeypatch, capsys) -> None:
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "0")
    assert compare(parse(["--demo"]), ["--demo"]) == 2
    assert "give --compare false" in capsys.readouterr().err
