"""A parity case trained by ``Survivor`` members that kill themselves at planned moments; the zygote's rank is the launcher."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from lightning_ntp.comm.progress import Progress
from lightning_ntp.config import Timeouts
from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.membership.host import Host
from lightning_ntp.membership.member import Membership
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.errors import ShardsLost
from lightning_ntp.policy import deal
from lightning_ntp.topology import Seat, Topology
from tests.dist.bare import RankRun, plan_for, window
from tests.dist.bare_member import connect
from tests.dist.chaos_bare import fork
from tests.support.cases import Case
from tests.support.models import build
from tests.support.reference import make_optimizer

TOKEN, LIMIT_S = "survive", 60.0
# Deaths are told by the launcher at once; the limits for silence are wide, as a loaded machine is no fault.
TIMEOUTS = Timeouts(
    beat_s=0.1, lease_s=8.0, lease_margin_s=2.0, classify_s=12.0, join_s=20.0, build_s=20.0, hang_s=25.0, slow_hang_s=30.0,
    shutdown_grace_s=2.0, start_s=30.0, collective_s=40.0,
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """``seat`` kills itself in ``step``, the ``count``-th time that it is at ``moment``.

    A moment is a phase (``"forward"``, ``"backward"``, ``"vote"``, ``"step"``, ``"change"``) or the entry of a channel
    (``"data_parallel"``, ``"reshard"``, ``"replica_control"``, ``"world"`` ...).
    """

    seat: str
    step: int
    moment: str
    count: int = 1


class FaultyProgress(Progress):
    """Told of every phase and collective, it kills the process when its fault is due."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults, self._seen = faults, {}
        super().__init__()

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if name == "phase" and "step" in self.__dict__:
            self._at(value)

    def enter(self, channel: str, number: int) -> None:
        super().enter(channel, number)
        self._at(channel)

    def _at(self, moment: str) -> None:
        for fault in self._faults:
            if fault.step == self.step and fault.moment == moment:
                self._seen[fault] = self._seen.get(fault, 0) + 1
                if self._seen[fault] == fault.count:
                    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class MemberLog:
    """What one member reports at its end.

    Attributes:
        runs: One for every view in which it took steps: local weights and norms after each of them.
        samples: For each committed step the ids of its replica's samples.
        losses: For each committed step this replica's weighted part of the loss.
        lost: What this member said if part of the model was lost.
        leader: The leader of its last view.
        received_bytes: What each change of view brought it.
    """

    seat: str
    runs: list[RankRun] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    lost: str = ""
    leader: str = ""
    received_bytes: list[int] = field(default_factory=list)


def member_process(port: int, seat: Seat, founding: View, case: Case, steps: int, faults: list[Fault], out: Path) -> int:
    os.setsid()
    stacks = out.with_suffix(".stacks").open("w")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    store = connect(port)
    progress = FaultyProgress([fault for fault in faults if fault.seat == str(seat)])
    membership = Membership(JobStore(lambda: connect(port), TOKEN), seat, founding, timeouts=TIMEOUTS, progress=progress)
    survivor, log = Survivor(membership, store, founding=founding.topology), MemberLog(str(seat))
    code = 0
    try:
        _train(survivor, case, steps, log, progress)
    except ShardsLost as error:
        log.lost, code = str(error), int(ExitCode.SHARDS_LOST)
    log.leader, log.received_bytes = str(survivor.view.leader), [move.received_bytes for move in survivor.moves]
    out.write_bytes(pickle.dumps(log))
    return code


def _train(survivor: Survivor, case: Case, steps: int, log: MemberLog, progress: Progress) -> None:
    model = build(case.model, seed=0 if log.seat == "r0.s0" else 1)  # all take the leader's
    survivor.join()
    member = survivor.new_member()
    survivor.outside(lambda: member.copy_leaders([*model.parameters(), *model.buffers()]))
    member.cut(model, plan_for(case.model))
    member.start_sync(bucket_cap_mb=0.02)
    optimizer = make_optimizer(case.optimizer, model.parameters())
    survivor.own([optimizer])
    for step, ids in enumerate(case.global_batches(steps)):
        part: dict[str, float] = {}

        def run(shares: tuple[int, ...], ids: list[int] = ids, part: dict[str, float] = part) -> None:
            optimizer.zero_grad()
            progress.phase = "backward"
            part["loss"], part["ids"] = window(member, model, case, ids, shares)
            part["norm"] = survivor.commit(optimizer, 1.0).grad_norm

        survivor.run_step(run, lambda view: deal(case.global_batch_size, view.topology.degrees))
        if not log.runs or (log.runs[-1].replica, log.runs[-1].slot, log.runs[-1].degree) != (
            member.replica, member.slot, member.topology.degrees[member.replica],
        ):  # fmt: skip
            log.runs.append(RankRun.of(member))
            log.runs[-1].first = step
        log.runs[-1].norms.append(part["norm"])
        log.runs[-1].weights.append({p.name: p.parameter.detach().clone() for p in member.model.parameters()})
        log.samples.append(part["ids"])
        log.losses.append(part["loss"])
        progress.phase = "between"
    survivor.finish()


def launch(
    rank: int, world_size: int, store_address: str, case: Case, steps: int, faults: list[Fault], member=member_process
) -> tuple[dict[str, int], dict[str, MemberLog]]:
    """Run the case; returns exit codes and logs by seat. In the zygote's rank, which is no member.

    ``member`` is what each process runs; what it writes to its file is its log.
    """
    port = int(store_address.rsplit(":", 1)[1])
    founding = View.founding(Topology.start(case.degrees, case.nominal))
    running = {
        seat: fork(member, port, seat, founding, case, steps, faults, Path(str(seat)))
        for seat in founding.members
    }
    store = JobStore(lambda: connect(port), TOKEN)
    store.greet()

    def kill(seat: Seat) -> bool:
        if seat in running:
            os.kill(running[seat], signal.SIGUSR1)  # its stacks first: whoever is killed here was stuck
            time.sleep(0.2)
            os.killpg(running[seat], signal.SIGKILL)
        return True

    host, codes = Host(store, founding.members, TIMEOUTS, kill), {}
    until = time.monotonic() + LIMIT_S
    while running and time.monotonic() < until:
        for seat, pid in list(running.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            codes[str(seat)] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            del running[seat]
            host.ended(seat, f"exit code {codes[str(seat)]}")
        host.poll()
        time.sleep(0.002)
    for seat, pid in running.items():
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[str(seat)] = -999
    logs = {name: pickle.loads(Path(name).read_bytes()) for name in codes if Path(name).exists()}
    return codes, logs
