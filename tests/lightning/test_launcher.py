"""The launcher: ``python train.py``, ``python -m lightning_ntp.run``, torchrun; ends, signals, and what must not stay.

Most tests run the supervisor inside this process on members without torch, which start in a few milliseconds.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ntp import NTPStrategy, run
from lightning_ntp.comm.rendezvous import check_world_size, connect_store
from lightning_ntp.errors import ConfigError, LaunchError
from lightning_ntp.supervisor import AllOrNothing, Supervisor

SCRIPTS = pathlib.Path(__file__).parent / "scripts"
BEHAVE = str(SCRIPTS / "behave.py")


class Job:
    """Runs commands with a mark in their environment, by which every process they leave behind is found."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.env = {**os.environ, "NTP_TEST_MARK": self.mark, "OMP_NUM_THREADS": "1"}
        root = str(SCRIPTS.parents[2])
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))

    def start(self, *command: str, **kwargs) -> subprocess.Popen:
        default = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        return subprocess.Popen([sys.executable, *command], env=self.env, preexec_fn=_heed, **{**default, **kwargs})

    def finish(self, process: subprocess.Popen, stdin: str | None = None) -> tuple[int, str, str]:
        try:
            out, err = process.communicate(stdin, timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, out, err

    def ends(self, timeout_s: float) -> None:
        """Fails, and cleans up, if any process is left after the time."""
        end = time.monotonic() + timeout_s
        while left := self.processes():
            if time.monotonic() > end:
                for process in left:
                    process.kill()
                pytest.fail(f"processes left behind: {left}")
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            environment = process.environ()
            return environment.get("NTP_TEST_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def _heed() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background shell ignores it, and that is inherited


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.ends(timeout_s=2)


def until(condition: Callable[[], object], timeout_s: float = 40.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def members(directory: pathlib.Path) -> dict[int, list[int]]:
    """By rank: process id, group id, child's id, LOCAL_RANK, WORLD_SIZE."""
    return {int(path.stem): [int(word) for word in path.read_text().split()] for path in directory.glob("*.pid")}


def supervise(job: Job, directory: pathlib.Path, num_members: int, *orders: str, **kwargs) -> Supervisor:
    env = {"NTP_TEST_MARK": job.mark}
    return Supervisor([sys.executable, BEHAVE, str(directory), *orders], num_members, env=env, **kwargs)


def send_when_up(directory: pathlib.Path, num_members: int, *signals: signal.Signals) -> threading.Thread:
    """From a thread: signals to this process, once all members are up and have had a moment for each."""

    def send() -> None:
        until(lambda: len(members(directory)) == num_members)
        for signum in signals:
            os.kill(os.getpid(), signum)
            time.sleep(0.3)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.fixture
def heeds_signals() -> Iterator[None]:
    """Background shells ignore SIGINT, nohup ignores SIGHUP, and so would the supervisor in this process."""
    heeded = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {signum: signal.signal(signum, signal.SIG_DFL) for signum in heeded}
    yield
    for signum, handler in old.items():
        signal.signal(signum, handler)


# The supervisor


@pytest.mark.parametrize(
    ("orders", "code", "told"),
    [
        ([], 0, ""),
        (["1:3"], 3, "rank 1 (r0.s1) exited with code 3"),
        (["2:-9"], 137, "rank 2 (r1.s0) was ended by SIGKILL"),
        (["0:-15"], 143, "rank 0 (r0.s0) was ended by SIGTERM"),
    ],
)
def test_exit_code(job, tmp_path, capfd, orders, code, told):
    assert supervise(job, tmp_path, 3, *orders, seats=["r0.s0", "r0.s1", "r1.s0"]).run() == code
    error = capfd.readouterr().err
    assert told in error and ("lightning_ntp: the job failed" in error) == (code != 0) and error.count("\n") <= 1
    seen = members(tmp_path)
    assert [seen[rank][3:] for rank in range(3)] == [[rank, 3] for rank in range(3)]
    assert all(pid == group for pid, group, *_ in seen.values()), "each member leads a process group"
    job.ends(timeout_s=2)  # a member's children too


def test_the_rest_is_killed_after_the_grace_period(job, tmp_path, capfd):
    start = time.monotonic()
    supervisor = supervise(job, tmp_path, 3, "0:stubborn", "1:4", "2:sleep", policy=AllOrNothing(grace_s=0.5))
    assert supervisor.run() == 4
    assert 0.5 <= time.monotonic() - start < 5
    assert "rank 1 exited with code 4; then rank" in (error := capfd.readouterr().err)
    assert "rank 0 was killed by the supervisor" in error and "rank 2 was killed by the supervisor" in error


@pytest.mark.parametrize(
    ("how", "signals", "code"),
    [
        ("sleep", [signal.SIGINT], 130),
        ("sleep", [signal.SIGHUP], 129),
        ("tidy", [signal.SIGTERM], 0),  # its child must not have got the signal
        ("stubborn", [signal.SIGINT, signal.SIGTERM, signal.SIGINT], 130),
    ],
)
def test_signals(job, tmp_path, capfd, heeds_signals, how, signals, code):
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    sender = send_when_up(tmp_path, 2, *signals)
    assert supervise(job, tmp_path, 2, f"0:{how}", f"1:{how}").run() == code
    sender.join()
    assert (f"stopped by {signals[0].name}" in capfd.readouterr().err) == (code != 0)
    assert handlers == {signum: signal.getsignal(signum) for signum in handlers}, "handlers are given back"


def test_a_signal_that_the_caller_ignores_stays_ignored(job, tmp_path, heeds_signals):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sender = send_when_up(tmp_path, 1, signal.SIGINT, signal.SIGTERM)
    assert supervise(job, tmp_path, 1, "0:sleep").run() == 143
    sender.join()


def test_a_member_gets_its_share_of_the_threads_unless_the_user_says(monkeypatch):
    def threads(num_members: int) -> str:
        supervisor = Supervisor(["true"], num_members)
        return supervisor.member_env(0)["OMP_NUM_THREADS"]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (threads(1), threads(10_000)) == (str(len(os.sched_getaffinity(0))), "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(10_000) == "3"


def test_wrong_arguments():
    with pytest.raises(ConfigError, match="num_members=0"):
        Supervisor(["true"], 0)
    with pytest.raises(ConfigError, match="seats names 1 seats for num_members=2"):
        Supervisor(["true"], 2, seats=["r0.s0"])
    with pytest.raises(ConfigError, match="grace_s=-1"):
        AllOrNothing(grace_s=-1)
    with pytest.raises(LaunchError, match=r"rank 0 could not be started.*/nowhere"):
        Supervisor(["/nowhere"], 1).run()
    with pytest.raises(LaunchError, match="4 members.*2 processes"):
        check_world_size(4, {"NTP_WORLD_SIZE": "2", "WORLD_SIZE": "9"})
    check_world_size(4, {})
    with pytest.raises(LaunchError, match="MASTER_ADDR is not set"):
        connect_store({})
    with pytest.raises(ConfigError, match="NTP_STORE='nonsense'"):
        connect_store({"NTP_STORE": "nonsense"})


# python -m lightning_ntp.run


def test_run_command_line(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    commands = []
    monkeypatch.setattr(run.Supervisor, "run", lambda self: commands.append((self.command, self.num_members)) or 7)
    script = tmp_path / "train.py"
    script.touch()
    for arguments in (
        ["--nproc-per-node", "2", str(script), "--help", "--", "-m"],
        ["--nproc_per_node=2", "--", str(script), "--help", "--", "-m"],
    ):
        assert run.main(arguments) == 7
        assert commands.pop() == ([sys.executable, str(script), "--help", "--", "-m"], 2)
    assert run.main(["--nproc-per-node", "3", "-m", "package.train", "--lr=1"]) == 7
    assert commands.pop() == ([sys.executable, "-m", "package.train", "--lr=1"], 3)
    for arguments, told in (
        (["--nproc-per-node", "2"], "script to run is missing"),
        (["--nproc-per-node", "2", "nowhere.py"], "no such script: 'nowhere.py'"),
        ([str(script)], "--nproc-per-node is missing"),
        (["--nproc-per-node", "two", str(script)], "invalid int value: 'two'"),
    ):
        with pytest.raises(SystemExit):
            run.main(arguments)
        assert told in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run.main(["--nproc-per-node", "2", str(script)]) == 2
    assert "member already (LOCAL_RANK=0)" in capsys.readouterr().err


def test_a_script_without_a_trainer_finds_the_store(job):
    launch = ["-m", "lightning_ntp.run", "--nproc-per-node", "2", str(SCRIPTS / "gloo_sum.py"), "--lr", "3"]
    code, out, err = job.finish(job.start(*launch))
    assert code == 0, err
    assert sorted(out.split("\n"))[-2:] == [f"rank {rank} of 2: 3 ['--lr', '3']" for rank in range(2)]


def test_torchrun(job, tmp_path):
    """The agent's store, no launcher of ours, and our `run` makes way for the script."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "lightning_ntp.run", str(SCRIPTS / "fit.py"), str(tmp_path), "once"]
    code, _, err = job.finish(job.start(*command))
    assert code == 0, err
    assert {path.name: path.read_text() for path in tmp_path.glob("after.*")} == {
        "after.0": "2 (1, 1)",
        "after.1": "2 (1, 1)",
    }
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]


def other_number_of_devices(rank: int, world_size: int, store: str) -> str:
    with pytest.raises(LaunchError) as caught:
        Trainer(accelerator="cpu", devices=4, strategy="ntp", logger=False).fit(BoringModel())
    return str(caught.value)


def test_another_number_of_devices_than_processes(workers):
    for told in workers.run(other_number_of_devices, 2):
        assert "the Trainer asks for 4 members (devices x num_nodes), but 2 processes were started" in told
        assert "start 4 (--nproc-per-node) or pass devices=2" in told


def test_wrong_degrees_are_told_before_any_process_starts(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=r"degrees=\[4, 4\] sum to 8, but the Trainer has 7 devices: pass devices=8"):
        Trainer(accelerator="cpu", devices=7, strategy=NTPStrategy(degrees=[4, 4]))


def test_sigkill_of_the_supervisor_leaves_nobody(job, tmp_path):
    process = job.start(
        "-m", "lightning_ntp.run", "--nproc-per-node", "2", str(SCRIPTS / "loader_workers.py"), tmp_path
    )
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    assert len(job.processes()) >= 1 + 2 + 4
    process.kill()
    job.finish(process)
    job.ends(timeout_s=15)


# python train.py


def test_script_runs_in_members_and_once_in_the_supervisor(job, tmp_path):
    """Several fits in one script, the last of which fails in one rank."""
    code, out, err = job.finish(job.start(str(SCRIPTS / "fit.py"), str(tmp_path), "several"))
    ended = time.time()
    assert code == 1
    assert err.count("Traceback") == err.count("[rank1]: Traceback") == 1, "only the member's whose error it is"
    told = "r1.s0 ended the job: ValueError: rank 1 has had enough"
    summary = err.splitlines()[-1]
    assert summary.startswith("lightning_ntp: the job failed after") and told in summary
    assert err.count(told) == 2, "the other member's last line, and the summary"
    assert ended - (tmp_path / "exception.1").stat().st_mtime < 10
    assert (tmp_path / "exception.1").read_text() == "ValueError"
    hooks = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert {name for name in hooks if name.endswith("main")} == {"before.main"}
    assert {f"{what}.{rank}" for what in ("before", "setup", "after") for rank in range(2)} <= hooks
    assert not any(name.startswith("never") for name in hooks)
    assert (tmp_path / "after.0").read_text() == "4 (1, 1)"
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]


def test_ctrl_c_reaches_the_members(job, tmp_path):
    process = job.start(str(SCRIPTS / "fit.py"), str(tmp_path), "forever")
    until(lambda: (tmp_path / "batch.0").exists() and (tmp_path / "batch.1").exists())
    process.send_signal(signal.SIGINT)
    code, out, err = job.finish(process)
    assert code == 130 and "stopped by SIGINT" in err  # as a shell tells it
    assert {path.name: path.read_text() for path in tmp_path.glob("exception.*")} == {
        "exception.0": "KeyboardInterrupt",
        "exception.1": "KeyboardInterrupt",
    }


def test_code_without_a_file_is_refused(job, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); from standin import *\n"
        f"build_trainer({str(tmp_path)!r})[0].fit(Boring())\n"
    )
    from_argument = job.start("-c", code)
    from_stdin = job.start("-", stdin=subprocess.PIPE)
    interactive = job.start("-i", "-c", code)
    for process, stdin in ((from_argument, None), (from_stdin, code), (interactive, None)):
        _, _, err = job.finish(process, stdin)
        assert "LaunchError: strategy='ntp' runs the script again" in err
        assert "put the code into a file and run `python file.py`" in err
    assert not list(tmp_path.glob("setup.*")) and not (tmp_path / "lightning_logs").exists()


def test_a_notebook_is_refused(job, tmp_path):
    """Jupyter and IPython put a name into the builtins; a kernel runs from a file of its own."""
    script = tmp_path / "kernel.py"
    script.write_text(
        f"import builtins, sys; builtins.__IPYTHON__ = True; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        f"from standin import *\nbuild_trainer({str(tmp_path)!r})[0].fit(Boring())\n"
    )
    code, _, err = job.finish(job.start(str(script)))
    assert code == 1 and "LaunchError: strategy='ntp' runs the script again" in err and "a notebook" in err
    assert "put the code into a file and run `python file.py`" in err
    assert not list(tmp_path.glob("setup.*")) and not (tmp_path / "lightning_logs").exists()


def test_hydra_job_keeps_directory_and_overrides(job, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    script = os.path.relpath(SCRIPTS / "hydra_fit.py", tmp_path)
    overrides = [f"directory={notes}", "lr=0.25", "names=[x,'y z']"]
    code, _, err = job.finish(job.start(script, *overrides, cwd=tmp_path))
    assert code == 0, err
    main, *ranks = (json.loads((notes / f"before.{who}").read_text()) for who in ("main", 0, 1))
    assert main["cwd"].startswith(str(tmp_path / "outputs")) and main["original"] == str(tmp_path)
    assert main["lr"] == 0.25 and main["names"] == ["x", "y z"]
    assert ranks == [main, {**main, "job": "train_ddp_process_1"}]
    assert sorted(path.name for path in notes.glob("after.*")) == ["after.0", "after.1"]
    saved = pathlib.Path(main["cwd"], ".hydra", "overrides.yaml").read_text()
    assert "hydra.run.dir" not in saved and "lr=0.25" in saved
