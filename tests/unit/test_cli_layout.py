"""``lightning-ntp layout``: JSON, table, and what it says to bad input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lightning_ntp.cli.layout import describe
from lightning_ntp.cli.main import main


def arguments(units: object, nominal: object, degree: object, *more: str) -> list[str]:
    return ["layout", "--units", str(units), "--nominal", str(nominal), "--degree", str(degree), *more]


def test_json(capsys):
    assert main(arguments(64, 8, 7, "--json")) == 0
    text = capsys.readouterr().out
    facts = json.loads(text)
    assert list(facts) == ["units", "nominal", "degree", "slots", "loads", "imbalance", "moved_units"]
    assert text.startswith('{"units": 64, "nominal": 8, "degree": 7, "slots": [[0, 1, 2, 3, 4, 5, 6, 7, 56, 63], ')
    assert text.endswith('"loads": [10, 9, 9, 9, 9, 9, 9], "imbalance": 1.094, "moved_units": 8}\n')
    assert facts["slots"][6] == [48, 49, 50, 51, 52, 53, 54, 55, 62]


def test_the_degree_is_nominal_unless_given(capsys):
    assert main(["layout", "--units", "8", "--nominal", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == describe(8, 4, 4)


@pytest.mark.parametrize(("degree", "moved"), [(4, 0), (3, 2), (2, 5), (1, 8)])
def test_moved_units_are_those_of_the_slots_that_are_gone(degree, moved):
    """11 units at 4: loads 3, 3, 3, 2."""
    assert describe(11, 4, degree)["moved_units"] == moved


def test_table_has_a_row_per_slot_and_marks_arrivals(capsys):
    assert main(arguments(10, 4, 2)) == 0
    *table, summary = capsys.readouterr().out.splitlines()
    rows = [" ".join(line.split()) for line in table if line.startswith("│")]
    assert rows == ["│ 0 │ 0-2 +9 +7 │ 5 │", "│ 1 │ 3-5 +6 +8 │ 5 │"]
    assert summary == "10 units at degree 2 of 4: imbalance 1.0, moved units (+): 4"


def test_table_of_an_empty_slot(capsys):
    assert main(arguments(2, 4, 3)) == 0
    assert "│ 2    │ -     │ 0    │" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (arguments(64, 8, 9), "degree=9 is outside 1..8"),
        (arguments(64, 8, 0), "argument --degree: '0' is not a whole number in 1..576"),
        (arguments(64, -8, 7), "argument --nominal: '-8' is not a whole number in 1..576"),
        (arguments(64, 5000, 1), "argument --nominal: '5000' is not a whole number in 1..576"),
        (arguments("many", 8, 7), "argument --units: 'many' is not a whole number in 1..1000000"),
        (arguments(6.5, 8, 7), "argument --units: '6.5' is not"),
        (["layout", "--units", "64"], "required: --nominal"),
        (arguments(64, 8, 7, "--yaml"), "unrecognized arguments: --yaml"),
        (["fly"], "'fly'"),
        ([], "required: VERB"),
    ],
)
def test_bad_input_is_one_line_and_code_2(capsys, argv, text):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lightning-ntp: ") and text in err
    assert err.count("\n") == 1


def test_help_names_the_verb(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "layout" in capsys.readouterr().out


def test_as_a_process():
    command = [sys.executable, "-m", "lightning_ntp.cli.main"]
    good = subprocess.run([*command, *arguments(64, 8, 7, "--json")], capture_output=True, text=True, timeout=120)
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout) == describe(64, 8, 7)
    bad = subprocess.run([*command, *arguments(64, 8, 9)], capture_output=True, text=True, timeout=120)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "lightning-ntp: degree=9 is outside 1..8, the degrees of this family\n"
