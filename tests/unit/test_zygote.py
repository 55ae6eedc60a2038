"""The test infrastructure itself: ranks from the zygote, and the guard against leaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import conftest
from tests.support import processes
from tests.support.gloo import connect, gloo_world
from tests.support.zygote import Zygote, ZygoteError
from tests.support.zygote_failures import WorkerError, WorkerTimeout


def echo(rank, world_size, store_address, *arguments):
    return rank, world_size, arguments


def describe(rank, world_size, store_address):
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.utilities import rank_zero_only

    return {
        "externally": LightningEnvironment().creates_processes_externally,
        "rank_zero_only": rank_zero_only.rank,
        "store_matches": os.environ["NTP_STORE"] == store_address,
        "environ": {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "EXTRA", "NODE_RANK")},
        "cwd": os.getcwd(),
        "torch_threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "pid": os.getpid(),
        "session": os.getsid(0),
    }


def all_reduce_ranks(rank, world_size, store_address):
    with gloo_world(rank, world_size, store_address):
        total = torch.tensor([float(rank + 1)], dtype=torch.float64)
        dist.all_reduce(total)
        return total


def all_reduce_by_environment(rank, world_size, store_address):
    dist.init_process_group("gloo")
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return total.item()


def fit_with_ddp(rank, world_size, store_address, num_workers):
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    loader = torch.utils.data.DataLoader(RandomDataset(32, 64), num_workers=num_workers)
    model = BoringModel()
    trainer.fit(model, loader)
    return trainer.global_rank, trainer.global_step, model.layer.weight.detach()


def one_raises(rank, world_size, store_address):
    with gloo_world(rank, world_size, store_address):
        print(f"output of rank {rank}")
        if rank == 2:
            time.sleep(0.2)
            raise ValueError("wrong head count")
        dist.all_reduce(torch.ones(1))


def raises_odd(rank, world_size, store_address):
    raise OddError(1, 2)


class OddError(Exception):
    """Cannot be unpickled: its ``args`` do not fit its ``__init__``."""

    def __init__(self, a, b):
        super().__init__(f"odd {a} {b}")


def wait_for_nobody(rank, world_size, store_address):
    if rank == 1:
        connect(store_address).wait(["never"])


def sleep_after_reset_signals(rank, world_size, store_address):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    time.sleep(60)


def kill_self(rank, world_size, store_address, victim):
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def leave(rank, world_size, store_address, code):
    if rank == 0:
        sys.exit(code)


def leave_child(rank, world_size, store_address):
    return subprocess.Popen(["sleep", "60"], start_new_session=True).pid


def hold(rank, world_size, store_address):
    connect(store_address).set(f"here/{rank}", "1")
    time.sleep(60)


def test_results_come_back_by_rank(workers):
    weights = torch.arange(6.0).view(2, 3).t()
    results = workers.run(echo, 3, "text", weights)
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert all(result[2][0] == "text" and torch.equal(result[2][1], weights) for result in results)


def test_large_results_do_not_block(workers):
    large = torch.arange(1_000_000, dtype=torch.float64)  # far more than a pipe holds
    assert all(torch.equal(result[2][0], large) for result in workers.run(echo, 2, large))


def test_ranks_look_externally_launched(workers):
    before = dict(os.environ)
    first, second = workers.run(describe, 2, env={"EXTRA": "1", "NODE_RANK": None})
    assert dict(os.environ) == before
    for rank, result in enumerate((first, second)):
        assert result["externally"] and result["store_matches"]
        assert result["rank_zero_only"] == rank
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "EXTRA": "1", "NODE_RANK": None}
        assert result["environ"] == expected
        assert (result["torch_threads"], result["seed"]) == (1, 0)
        assert result["session"] == result["pid"]
        assert not Path(result["cwd"]).exists()


def test_cwd(workers, tmp_path):
    assert [result["cwd"] for result in workers.run(describe, 2, cwd=tmp_path)] == [str(tmp_path)] * 2


def test_gloo_among_four(workers):
    assert workers.run(all_reduce_ranks, 4) == [torch.tensor([10.0], dtype=torch.float64)] * 4


def test_plain_init_process_group(workers):
    assert workers.run(all_reduce_by_environment, 3) == [3, 3, 3]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lightning_trainer_in_ranks(workers, num_workers):
    (rank, steps, weight), (other_rank, _, other_weight) = workers.run(fit_with_ddp, 2, num_workers)
    assert (rank, other_rank, steps) == (0, 1, 2)
    assert torch.equal(weight, other_weight)


def test_exception_shows_cause_first(workers):
    with pytest.raises(WorkerError) as caught:
        workers.run(one_raises, 4)
    text = str(caught.value)
    assert text.startswith("rank 2 raised ValueError: wrong head count (4 of 4 ranks failed)")
    assert 'raise ValueError("wrong head count")' in text
    assert "output of rank 0" in text
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.errors[2].type_name == "ValueError"


def test_exception_that_does_not_pickle(workers):
    with pytest.raises(WorkerError, match="OddError: odd 1 2") as caught:
        workers.run(raises_odd, 1)
    assert caught.value.__cause__ is None


def test_other_ranks_are_stopped_after_the_grace(workers):
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="rank 0 ended with exit code 3 and no result") as caught:
        workers.run(leave_others_waiting, 2, grace_s=1.0)
    assert time.monotonic() - begin < 10
    assert "rank 1 was still running and was killed" in str(caught.value)
    assert "in leave_others_waiting" in str(caught.value)  # the stack that faulthandler wrote


def leave_others_waiting(rank, world_size, store_address):
    if rank == 0:
        os._exit(3)
    time.sleep(60)


@pytest.mark.parametrize("function", [wait_for_nobody, sleep_after_reset_signals])
def test_timeout_shows_stacks(workers, function):
    with pytest.raises(WorkerTimeout) as caught:
        workers.run(function, 2, timeout_s=1.0)
    text = str(caught.value)
    assert f"{function.__name__} reached the time limit of 1 s" in text
    assert f"in {function.__name__}" in text
    assert "rank 1 was still running and was killed" in text


def test_expected_death(workers):
    assert workers.run(kill_self, 3, 1, expect_exit={1: -9}) == [0, None, 2]


def test_unexpected_death(workers):
    with pytest.raises(WorkerError, match="rank 1 ended with exit code -9 and no result"):
        workers.run(kill_self, 2, 1)


def test_expected_death_that_does_not_happen(workers):
    with pytest.raises(WorkerError, match="rank 0 ended with exit code 0 where -9 was expected"):
        workers.run(kill_self, 2, 1, expect_exit={0: -9, 1: -9})


def test_exit_codes(workers):
    assert workers.run(leave, 2, 7, expect_exit={0: 7}) == [None, None]
    with pytest.raises(WorkerError, match="rank 0 ended with exit code 7 and no result"):
        workers.run(leave, 2, 7)


def test_leftover_processes_fail_and_are_killed(workers):
    with pytest.raises(WorkerError, match="left processes behind: sleep 60"):
        workers.run(leave_child, 1)
    (pid,) = workers.run(leave_child, 1, allow_leftovers=True)
    assert not processes.is_running(pid)
    assert processes.children(workers.pid) == []


def test_function_must_be_importable(workers):
    with pytest.raises(ZygoteError, match="top level of a module"):
        workers.run(lambda rank, world_size, store_address: None, 1)


def test_run_can_be_watched_and_killed_from_outside(workers):
    run = workers.start(hold, 2, expect_exit={0: -9, 1: -9})
    connect(run.store_address).wait(["here/0", "here/1"])
    with pytest.raises(ZygoteError, match="run in progress"):
        workers.run(echo, 1)
    for pid in run.pids:
        os.kill(pid, signal.SIGKILL)
    assert run.wait() == [None, None]


def test_failed_import_is_reported():
    with Zygote(preload=["no_such_module"]) as zygote, pytest.raises(ZygoteError, match="No module named"):
        zygote.run(echo, 1)


def test_nothing_survives_the_test_process(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "from tests.support.zygote import Zygote\n"
        "from tests.unit import test_zygote\n"
        "with Zygote(preload=['torch']) as zygote:\n"
        "    run = zygote.start(test_zygote.hold, 2)\n"
        "    print(zygote.pid, *run.pids, flush=True)\n"
        "    run.wait()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3 and all(processes.is_running(pid) for pid in pids)
        process.kill()
    until = time.monotonic() + 10
    while any(processes.is_running(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(processes.is_running(pid) for pid in pids)


def test_guard_finds_leaks(workers):
    release = threading.Event()
    before = set(threading.enumerate())
    thread = threading.Thread(target=release.wait, name="forgotten")
    thread.start()
    child = subprocess.Popen(["sleep", "60"])
    # Its own parent ends at once, so it is nobody's child; only the environment tells that it is ours.
    orphan = int(subprocess.check_output(["sh", "-c", "sleep 61 >/dev/null & echo $!"], text=True))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    leaks = conftest.find_leaks(before, workers.pid, grace_s=0.1)
    release.set()
    thread.join()
    child.wait()
    assert leaks[0] == "an initialised default process group" and leaks[-1] == "thread forgotten"
    assert sorted(leaks[1:-1]) == sorted([f"process {child.pid}: sleep 60", f"process {orphan}: sleep 61"])
    assert not dist.is_initialized()
    assert conftest.find_leaks(before, workers.pid) == []


def test_guard_restores_state(tmp_path, monkeypatch):
    state = conftest.GlobalState()
    environ, cwd, noise = dict(os.environ), os.getcwd(), torch.get_rng_state()
    os.environ["LOCAL_RANK"] = "3"
    del os.environ["PATH"]
    os.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    conftest.fabric_rank_zero.rank_zero_only.rank = 5
    torch.rand(1)
    state.restore()
    assert dict(os.environ) == environ and os.getcwd() == cwd
    assert torch.get_default_dtype() == torch.float32
    assert conftest.fabric_rank_zero.rank_zero_only.rank == 0
    assert torch.equal(torch.get_rng_state(), noise)


def test_skips_fail_in_ci(tmp_path, monkeypatch):
    (tmp_path / "test_skips.py").write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.filterwarnings('ignore')\n"
        "def test_skips(): pytest.skip('no reason')\n"
        "@pytest.mark.gpu\n"
        "def test_gpu(): pytest.skip('no GPU')\n"
        "@pytest.mark.xfail\n"
        "def test_xfails(): assert False\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.ci", "-p", "no:cacheprovider", "-c", "/dev/null"]
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    for ci, summary in (({}, "3 skipped, 1 xfailed"), ({"CI": "1"}, "1 error")):
        environment = {name: value for name, value in os.environ.items() if name != "CI"} | ci
        outcome = subprocess.run([*command, tmp_path], cwd=root, env=environment, capture_output=True, text=True)
        assert summary in outcome.stdout, outcome.stdout + outcome.stderr
