"""Planned faults: their text, whose they are, and that they really happen, once and when planned."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp import faults as module
from lightning_ntp.errors import ConfigError
from lightning_ntp.faults import CHANNELS, PHASES, Fault, FaultActions, FaultKind, FaultPlan, Injector
from lightning_ntp.topology import Seat

HERE = Seat(0, 1)
LIMIT_S = 20.0


@st.composite
def any_fault(draw) -> Fault:
    numbers = st.integers(0, 10**6 - 1)
    kind = draw(st.sampled_from(FaultKind))
    moment = None if kind is FaultKind.RETURN else draw(st.sampled_from((None, *PHASES, *CHANNELS)))
    return Fault(
        kind,
        draw(numbers | st.builds(Seat, numbers, numbers)),
        draw(st.integers(0, 10**15 - 1)),
        moment,
        1 if moment is None else draw(st.integers(1, 10**15 - 1)),
        draw(st.floats(0, 86_400, exclude_min=True) | st.integers(1, 86_400)) if kind is FaultKind.SLOW else None,
    )


def one(text: str) -> Fault:
    (fault,) = FaultPlan.parse(text)
    return fault


# Text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kill r1.s2@20", Fault(FaultKind.KILL, Seat(1, 2), 20)),
        ("kill r0.s0@3:data_parallel#2", Fault(FaultKind.KILL, Seat(0, 0), 3, "data_parallel", 2)),
        ("slow r0.s1@5:forward 0.5s", Fault(FaultKind.SLOW, Seat(0, 1), 5, "forward", argument=0.5)),
        ("return r1.s2@40", Fault(FaultKind.RETURN, Seat(1, 2), 40)),
        ("hang r0.s1@7:backward", Fault(FaultKind.HANG, Seat(0, 1), 7, "backward")),
        ("raise r0.s1@7:tensor_parallel", Fault(FaultKind.RAISE, Seat(0, 1), 7, "tensor_parallel")),
        ("oom r0.s1@7:backward", Fault(FaultKind.OOM, Seat(0, 1), 7, "backward")),
        ("flip r0.s1@9", Fault(FaultKind.FLIP, Seat(0, 1), 9)),
        ("drop r0.s1@0:start", Fault(FaultKind.DROP, Seat(0, 1), 0, "start")),
        ("kill r1@20:change", Fault(FaultKind.KILL, 1, 20, "change")),
    ],
)
def test_what_a_text_means(text, expected):
    assert one(text) == expected
    assert str(expected) == text


@given(st.lists(any_fault(), max_size=4))
def test_text_and_back(faults):
    plan = FaultPlan(tuple(faults))
    assert FaultPlan.parse(str(plan)) == plan
    assert [one(str(fault)) for fault in faults] == list(plan) == faults
    assert bool(plan) == bool(faults)


@given(any_fault(), st.lists(st.sampled_from(("", " ", "\n", "\t ")), min_size=8, max_size=8))
def test_spaces_do_not_matter(fault, spaces):
    text = str(fault).replace(" ", "  ")
    for mark, before, after in zip("@:#", spaces, spaces[3:], strict=False):
        text = text.replace(mark, before + mark + after)
    assert one(spaces[6] + text + spaces[7]) == fault
    if fault.kind is FaultKind.SLOW:
        assert one(f"{text.removesuffix('s')} s") == fault


def test_several_faults_keep_their_order():
    assert str(FaultPlan.parse("kill r1@20 ,return r1@40,\n slow r0@5 1s")) == "kill r1@20, return r1@40, slow r0@5 1s"
    assert FaultPlan.parse("  ") == FaultPlan.parse("") == FaultPlan()
    assert not FaultPlan()


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        ("kil r1.s2@20", "'kil' is no kind, which are kill, hang"),
        ("r1.s2@20", "'r1.s2@20' is no kind"),
        ("kill", "does not say where and when"),
        ("", "nothing between two commas"),
        ("kill r1.s2", "'r1.s2' names no step: write e.g. r1.s2@20"),
        ("kill @20", "'' is no seat"),
        ("kill r01.s2@20", "'r01.s2' is no seat"),
        ("kill r1.s2@", "step '' is no whole number"),
        ("kill r1.s2@-1", "step '-1' is no whole number"),
        ("kill r1.s2@٣", "step '٣' is no whole number"),
        ("kill r1.s2@20:fwd", "moment='fwd' is neither a phase"),
        ("kill r1.s2@20:forward#0", "count=0 must be a whole number, 1 or more"),
        ("kill r1.s2@20#2", "count=2 needs a moment that is counted, e.g. forward#2"),
        ("kill r1.s2@20 0.5s", "argument=0.5: kill takes none"),
        ("slow r1.s2@20", "slow needs seconds"),
        ("slow r1.s2@20 0s", "slow needs seconds, above 0"),
        ("slow r1.s2@20 1e6s", "at most 86400"),
        ("slow r1.s2@20 0.5", "argument '0.5' is no time in seconds, such as 0.5s"),
        ("slow r1.s2@20 nans", "'nans' is no time"),
        ("slow r1.s2@20 1 2s", "'1 2s' is no time"),
        ("return r1.s2@20:vote", "moment='vote': a return belongs to a whole step"),
    ],
)
def test_a_bad_piece_is_quoted_with_the_way_out(piece, reason):
    with pytest.raises(ConfigError) as caught:
        FaultPlan.parse(f"kill r0.s0@1, {piece}, hang r0.s1@2", "--fault")
    message = str(caught.value)
    assert message.startswith(f"--fault: {piece!r} is no fault: ")
    assert reason in message
    assert message.endswith("Write " + module.GRAMMAR)


def test_the_examples_in_the_message_are_right():
    examples = module.GRAMMAR.split("'")[1::2]
    assert [str(one(example)) for example in examples] == examples != []


@given(st.text("kil slow@:#r.,0129 forward\n", max_size=40))
def test_any_other_text_is_a_config_error(text):
    with contextlib.suppress(ConfigError):
        plan = FaultPlan.parse(text)
        assert FaultPlan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (dict(kind="kill"), "kind='kill'"),
        (dict(seat="1.s2"), "seat='1.s2'"),
        (dict(seat=Seat(0, 10**6)), "seat=Seat"),
        (dict(step=-1), "step=-1"),
        (dict(step=1.0), "step=1.0"),
        (dict(step=10**15), "step=1000000000000000"),
        (dict(moment="vote", count=0), "count=0"),
        (dict(count=2), "count=2"),
        (dict(argument=1.0), "argument=1.0"),
        (dict(kind=FaultKind.SLOW, argument=float("nan")), "argument=nan"),
        (dict(kind=FaultKind.SLOW, argument="1s"), "argument='1s'"),
    ],
)
def test_a_fault_that_no_text_means_is_refused(values, named):
    with pytest.raises(ConfigError) as caught:
        Fault(**{"kind": FaultKind.KILL, "seat": HERE, "step": 3, **values})
    assert named in str(caught.value)


def test_texts_and_faults_are_told_apart():
    with pytest.raises(ConfigError, match="faults=None must be a text"):
        FaultPlan.parse(None)
    with pytest.raises(ConfigError, match="is no Fault: texts are read by FaultPlan.parse"):
        FaultPlan(("kill r0.s0@1",))


# Whose faults


def test_the_environment_is_asked_by_name_only(monkeypatch):
    monkeypatch.delenv("NTP_FAULTS", raising=False)
    assert FaultPlan.from_env() == FaultPlan()
    monkeypatch.setenv("NTP_FAULTS", "kill r1.s2@20")
    assert str(FaultPlan.from_env()) == "kill r1.s2@20"
    assert FaultPlan.from_env({"NTP_FAULTS": " "}) == FaultPlan.from_env({}) == FaultPlan()
    with pytest.raises(ConfigError, match="^NTP_FAULTS: 'boom' is no fault"):
        FaultPlan.from_env({"NTP_FAULTS": "boom"})


def test_a_member_gets_its_own_faults_and_no_returns():
    plan = FaultPlan.parse("kill r1.s2@20, return r1.s2@40, hang r0.s1@3, kill r1@50, return r0@30, return r0.s1@10")
    assert FaultPlan(plan.at_seat(Seat(1, 2))) == FaultPlan.parse("kill r1.s2@20, kill r1.s2@50")
    assert FaultPlan(plan.at_seat(Seat(1, 0))) == FaultPlan.parse("kill r1.s0@50")
    assert FaultPlan(plan.at_seat(Seat(0, 1))) == FaultPlan.parse("hang r0.s1@3")
    assert plan.at_seat(Seat(2, 1)) == ()
    assert FaultPlan(plan.returns()) == FaultPlan.parse("return r0.s1@10, return r0@30, return r1.s2@40")
    whole = plan.returns()[1]
    assert whole.covers(Seat(0, 0)) and whole.covers(Seat(0, 3)) and not whole.covers(Seat(1, 0))


def test_a_process_that_came_back_does_not_repeat_the_fault_that_ended_the_first():
    plan = FaultPlan.parse("kill r1@20, kill r1.s2@45, kill r1.s2@60")
    seat = Seat(1, 2)
    assert [fault.step for fault in plan.at_seat(seat, incarnation=0)] == [20, 45, 60]
    assert plan.at_seat(seat, incarnation=1) == ()  # it does not know yet when it joins
    assert [fault.step for fault in plan.at_seat(seat, incarnation=1, from_step=20)] == [45, 60]
    assert [fault.step for fault in plan.at_seat(seat, incarnation=2, from_step=45)] == [60]


def test_places_that_the_job_does_not_have():
    FaultPlan.parse("kill r1.s3@20, kill r0@3").check([4, 4])
    for text in ("kill r2.s0@20", "return r1.s4@20", "kill r2@20"):
        with pytest.raises(ConfigError, match=f"'{text}' never happens: .* r0.s0 to s3, r1.s0 to s3"):
            FaultPlan.parse(f"kill r0.s0@1, {text}").check([4, 4])
    with pytest.raises(ConfigError, match="r1.s0 to s2"):
        FaultPlan.parse("kill r1.s3@20").check([4, 3])


# When


class Told:
    """An injector at r0.s1 whose three actions are noted."""

    def __init__(self, text: str) -> None:
        self.happened: list[str] = []
        note = self.happened.append
        actions = FaultActions(lambda: note("drain"), lambda: note("flip"), lambda: note("drop"))
        self.injector = Injector(FaultPlan.parse(text).at_seat(HERE), actions)

    def at(self, step: int, *moments: str) -> list[str]:
        """What happens meanwhile."""
        self.happened.clear()
        for moment in moments:
            self.injector.at(step, moment)
        return self.happened.copy()


def test_without_a_moment_it_is_the_beginning_of_the_step():
    told = Told("flip r0.s1@2, drain r0.s0@2")
    assert told.at(1, "forward", "backward", "vote", "step", "between") == []
    assert told.at(2, "change") == []
    assert told.at(2, "forward") == ["flip"]
    assert told.at(2, "forward", "backward") == []  # the step is run again: it has happened


def test_moments_are_counted_within_the_step():
    told = Told("flip r0.s1@2:data_parallel#3, drop r0.s1@2:data_parallel, drain r0@3:data_parallel#2")
    assert told.at(1, *["data_parallel"] * 5) == []
    assert told.at(2, "backward", "data_parallel", "reshard") == ["drop"]
    assert told.at(3, "data_parallel") == []
    assert told.at(2, "data_parallel") == []
    assert list(map(str, told.injector.pending)) == ["flip r0.s1@2:data_parallel#3", "drain r0.s1@3:data_parallel#2"]
    assert told.at(2, "data_parallel") == ["flip"]
    assert told.at(3, "data_parallel") == ["drain"]
    assert told.injector.pending == ()
    assert told.at(2, *["data_parallel"] * 5) == told.at(3, *["data_parallel"] * 5) == []


def test_threads_that_come_by_together():
    counts = range(1, 401)
    told, interval = Told(",".join(f"flip r0.s1@0:world#{count}" for count in counts)), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: told.injector.at(0, "world"), counts))
    finally:
        sys.setswitchinterval(interval)
    assert told.happened == ["flip"] * 400 and not told.injector.pending


def test_nothing_due_costs_next_to_nothing():
    told, start = Told("flip r0.s1@7:vote"), time.process_time()
    for step in range(100_000):
        told.injector.at(step, "forward")
    assert (time.process_time() - start) / 100_000 < 10e-6  # 0.1 us where nothing else runs


# What


@pytest.mark.parametrize("kind", ["drain", "flip", "drop"])
def test_an_action_that_is_missing_is_told_before_the_job_runs(kind):
    fault = one(f"{kind} r0.s1@9")
    with pytest.raises(ConfigError, match=f"'{kind} r0.s1@9' cannot be done here: actions.{kind} is not given"):
        Injector([fault])
    Injector([fault], FaultActions(**{kind: lambda: None}))
    with pytest.raises(ConfigError, match="'return r0.s1@9' is done by whoever leads"):
        Injector([one("return r0.s1@9")])


def test_raise_is_the_error_of_a_collective_and_comes_last():
    told = Told("raise r0.s1@2:vote, flip r0.s1@2:vote")
    with pytest.raises(RuntimeError, match="planned fault: raise r0.s1@2:vote") as caught:
        told.at(2, "vote")
    assert type(caught.value) is RuntimeError
    assert told.happened == ["flip"]
    assert told.at(2, "vote") == []


def test_oom_raises_torchs_error_and_slow_sleeps():
    injector = Injector([one("oom r0.s1@4:backward")])
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory.* oom r0.s1@4:backward"):
        injector.at(4, "backward")
    injector, start = Injector([one("slow r0.s1@3 0.05s")]), time.monotonic()
    injector.at(3, "forward")
    assert time.monotonic() - start >= 0.05


@contextlib.contextmanager
def child(body: Callable[[], None]) -> Iterator[int]:
    """A forked process that runs ``body`` and ends with 0, or with 1 if it raises; killed at the latest at the end."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        with contextlib.suppress(ChildProcessError):  # reaped by the test: the number may be another's by now
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def wait(pid: int, options: int = 0) -> int:
    """The status of a child, within ``LIMIT_S``."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        found, status = os.waitpid(pid, options | os.WNOHANG)
        if found == pid:
            return status
        time.sleep(0.002)
    pytest.fail(f"nothing happened to the child within {LIMIT_S} s")


def test_kill_really_kills():
    reading, writing = os.pipe()
    injector = Injector([one("kill r0.s1@3:data_parallel#2")])

    def body() -> None:
        for moment in ("forward", "data_parallel", "data_parallel", "backward"):
            os.write(writing, moment[:1].encode())
            injector.at(3, moment)

    with child(body) as pid:
        assert os.waitstatus_to_exitcode(wait(pid)) == -signal.SIGKILL
    os.close(writing)
    assert os.read(reading, 10) == b"fdd"
    os.close(reading)


@pytest.mark.parametrize("in_thread", [False, True])
def test_hang_really_stops_the_whole_process(in_thread):
    reading, writing = os.pipe()
    injector = Injector([one("hang r0.s1@3")])

    def meet() -> None:
        os.write(writing, b"a")
        injector.at(3, "forward")
        os.write(writing, b"b")

    def body() -> None:
        if not in_thread:
            return meet()
        thread = threading.Thread(target=meet)
        thread.start()
        thread.join()

    with child(body) as pid:
        os.close(writing)
        status = wait(pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
        assert os.read(reading, 10) == b"a"
        tasks = Path(f"/proc/{pid}/task").iterdir()
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]
        assert states == ["T"] * (1 + in_thread)
        os.kill(pid, signal.SIGKILL)  # as a host does with a silent member; a stopped process can be killed
        assert os.waitstatus_to_exitcode(wait(pid)) == -signal.SIGKILL
    assert os.read(reading, 10) == b""
    os.close(reading)


def test_the_file_needs_little():
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    names = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    ours = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert ours == {"lightning_ntp.errors", "lightning_ntp.topology"}


def test_an_import_with_the_variable_set_does_nothing():
    def body() -> None:
        os.environ["NTP_FAULTS"] = "kill r0.s0@0:start, kill r0@0"
        fresh = importlib.reload(module)
        for moment in (*PHASES, *CHANNELS):
            fresh.Injector(fresh.FaultPlan().at_seat(Seat(0, 0))).at(0, moment)
            fresh.Injector(()).at(0, moment)

    with child(body) as pid:
        assert os.waitstatus_to_exitcode(wait(pid)) == 0
