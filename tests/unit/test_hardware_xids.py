"""What XIDs mean: the table, overrides, and application errors that repeat, with a clock of our own."""

from __future__ import annotations

import pytest

from lightning_ntp.errors import ConfigError
from lightning_ntp.hardware.findings import Verdict
from lightning_ntp.hardware.xids import XIDS, Action, XidHistory, XidPolicy

BY_ACTION = {
    Action.DRAIN: [46, 48, 62, 64, 79, 95, 110, 119, 120, 140, 143, 155, 156, 158, 167, 169, 172],
    Action.APP: [8, 13, 31, 32, 43, 45, 68, 69, 94, 109, 39, 40, 41, 70, 71, 72, 75, 76, 77]
    + [82, 83, 84, 85, 86, 88, 89, *range(96, 106), *range(126, 136), 139],
    Action.NOTE: [44, 63, 66, 67, 92, 93, 121, 137, 141, 154, 157, 160, 161, 162, 163, 164, 165, 168, 171]
    + [14, 37, 38, 106, 107, 108, 142, 152, 153],
    Action.PROBE: [54, 61, 74, 78, 136, 144, 145, 146, 147, 148, 149, 150, 151],
}
"""The policy once more, by what is done: a slip in the table has to be made twice."""


@pytest.mark.parametrize("action", Action)
def test_the_table(action):
    policy = XidPolicy()
    assert sorted(xid for xid in XIDS if policy.action(xid) is action) == sorted(BY_ACTION[action])
    assert all(policy.name(xid) not in ("", "unknown") for xid in BY_ACTION[action])


def test_what_is_not_known_is_probed():
    assert XidPolicy().action(999) is Action.PROBE and XidPolicy().name(999) == "unknown"


def test_single_entries_can_be_overridden():
    policy = XidPolicy({94: "drain", 79: Action.NOTE, 999: "app"})
    assert [policy.action(xid).value for xid in (94, 79, 999, 48)] == ["drain", "note", "app", "drain"]
    assert XidHistory(policy).judge(94, 0.0).verdict is Verdict.LOST
    assert XidHistory(policy).judge(79, 0.0).verdict is Verdict.NOTE


@pytest.mark.parametrize("arguments", [{"overrides": {94: "kill"}}, {"repeats": 0}, {"within_s": 0}, {"burst_s": -1}])
def test_bad_arguments(arguments):
    name, value = next(iter(arguments.items()))
    with pytest.raises(ConfigError, match=r"overrides\[94\]='kill'" if name == "overrides" else f"{name}={value}"):
        XidPolicy(**arguments)


def verdicts(history: XidHistory, *events: tuple[int, float]) -> str:
    """First letters of the verdicts of (XID, time) events."""
    return "".join(history.judge(xid, at_s).verdict.value[0] for xid, at_s in events)


def test_an_application_error_drains_at_its_third_time_in_an_hour():
    assert verdicts(XidHistory(XidPolicy()), (31, 0), (31, 1800), (31, 3600)) == "nnl"
    assert verdicts(XidHistory(XidPolicy()), (31, 0), (31, 1800), (31, 3601)) == "nnn"
    assert verdicts(XidHistory(XidPolicy()), (31, 0), (31, 1800), (31, 3601), (13, 3700)) == "nnnl"
    assert verdicts(XidHistory(XidPolicy(repeats=2, within_s=10)), (31, 0), (43, 11), (94, 21)) == "nnl"
    assert verdicts(XidHistory(XidPolicy(repeats=1)), (31, 0)) == "l"


def test_a_crash_told_as_several_xids_counts_once():
    history = XidHistory(XidPolicy())
    assert verdicts(history, (13, 0), (43, 0.1), (45, 0.2), (45, 0.9)) == "nnnn"
    assert verdicts(history, (31, 60), (45, 60.5), (31, 120)) == "nnl"
    stream = [(31, tenths / 2) for tenths in range(7)]
    assert verdicts(XidHistory(XidPolicy()), *stream) == "nnnnnnl", "a stream of errors is no single crash"


def test_notes_and_probes_do_not_count():
    events = [(xid, at_s) for at_s, xid in enumerate((63, 74, 999, 63, 74, 999, 31))]
    assert verdicts(XidHistory(XidPolicy()), *events) == "n" * 7


def test_a_process_that_was_started_again_remembers():
    assert verdicts(XidHistory(XidPolicy(), seen=[2000.0, 100.0]), (31, 2500)) == "l"
    assert verdicts(XidHistory(XidPolicy(), seen=[2000.0, 100.0]), (31, 3800)) == "n"


def test_the_text_says_what_and_how_often():
    history = XidHistory(XidPolicy())
    first, second = history.judge(31, 5.0, "GPU-1"), history.judge(31, 65.0, "GPU-1")
    assert str(first) == "GPU-1: note: XID 31 (memory page fault)"
    assert second.text == "XID 31 (memory page fault), application error 2 within 3600 s"
    assert (first.source, first.xid, first.at_s) == ("xid", 31, 5.0)
