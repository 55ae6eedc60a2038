"""A member without Lightning: trains the model of ``bare_model`` through failures, and logs what it sees."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import TCPStore

from lightning_ntp.comm.abort import collective_timeout
from lightning_ntp.comm.abortable import GenerationWorld
from lightning_ntp.comm.exchange import Exchange
from lightning_ntp.comm.groups import Channels, open_channels
from lightning_ntp.comm.tree import ControlTree
from lightning_ntp.config import Timeouts
from lightning_ntp.errors import Fenced, JobFailed, ShardsLost
from lightning_ntp.membership.agreement import Standing
from lightning_ntp.membership.exits import ExitCode
from lightning_ntp.membership.member import Membership
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.topology import Seat
from tests.dist.bare_model import LAYOUT, Shard, gradient, move, part_of_norm, place_of, plan, rows_of, wrong_by

TOKEN = "chaos"
TIMEOUTS = Timeouts(
    beat_s=0.05, lease_s=1.5, lease_margin_s=0.5, classify_s=2.5, join_s=4.0, build_s=10.0, hang_s=4.0, slow_hang_s=8.0,
    shutdown_grace_s=2.0, start_s=8.0, collective_s=30.0,
)  # fmt: skip
USER_ERROR = "the user's own mistake"


def connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))


class Journal:
    """Lines of JSON, each written at once: the writer may be killed at any moment."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def __call__(self, event: str, **fields) -> None:
        os.write(self._fd, (json.dumps({"event": event, "t": time.monotonic(), **fields}) + "\n").encode())


class BareMember:
    """One member's training loop.

    Args:
        port: Of the store.
        seat: This member's.
        founding: The view of the start; ``None`` for a joiner.
        incarnation: Which process at this seat.
        num_steps: How many steps to train.
        journal: Where to log.
    """

    def __init__(
        self, port: int, seat: Seat, founding: View | None, incarnation: int, num_steps: int, journal: Journal
    ) -> None:
        self.store, self.timeout = connect(port), collective_timeout(TIMEOUTS)
        self.seat, self.num_steps, self.journal = seat, num_steps, journal
        self.membership = Membership(
            JobStore(lambda: connect(port), TOKEN), seat, founding, incarnation=incarnation, timeouts=TIMEOUTS,
            end_process=self._end_at_once,
        )  # fmt: skip
        self.arrived = self.applied = -1
        self.vote: dict | None = None
        self.grad: Tensor | None = None
        self.shard = Shard(None)
        if founding is not None:
            place = place_of(founding, seat)
            self.shard.base = (place, torch.zeros(LAYOUT.local_extent(*place[1:]), dtype=torch.float64))
        self.world: GenerationWorld | None = None
        self.channels: Channels | None = None
        self.mistake = False
        self.helper: int | None = None

    def train(self) -> None:
        """Until all steps are done by all members, or the job ends."""
        self.membership.start()
        while True:
            try:
                view = self.membership.agree(self._standing())
                self._log_view(view)
                self._close()
                self._settle(view)
                self._change(view)
                if self._steps():
                    self.membership.finish()
                    break
            except (RuntimeError, ValueError) as error:
                self.journal("error", text=f"{type(error).__name__}: {str(error)[-150:]}", step=self.applied)
                self.membership.leave(error)
        place, weights = self.shard.base
        self.journal("done", wrong_by=wrong_by(weights, place, self.num_steps), steps=self.applied + 1)
        self._close()

    def _standing(self) -> Standing:
        return Standing(self.arrived, self.applied, self.vote, self.shard.tag(), fresh=self.shard.base is None)

    def _settle(self, view: View) -> None:
        """First half of a recovery: finish the committed step. No channel is open."""
        step = view.step
        plan(view)  # before anything else: all say ShardsLost alike
        if self.shard.base is None:
            self.arrived = self.applied = step
        vote, is_behind = view.vote, self.applied < step
        if vote is None and step >= 0 and view.holdings:
            # Nobody here has passed the vote: from the gradients in hand, each unit once, before anyone applies.
            behind = self.membership.exchange("behind", is_behind)
            if any(behind.values()):
                parts = self.membership.exchange("norm", part_of_norm(view, self.seat, self.grad))
                vote = {"step": step, "square": sum(parts.values())}
        if is_behind:
            self.vote = dict(vote)
            self._apply(step)
            self.journal("settled", step=step, recomputed=view.vote is None)
        self.shard.settle(step)
        self.arrived, self.grad = step, None

    def _change(self, view: View) -> None:
        """Second half: channels of the new view, and the weights that this member lacks."""
        abort, progress, topology = self.membership.abort, self.membership.progress, view.topology
        progress.phase = "change"
        self.world = GenerationWorld(
            view.generation, self.store, abort, timeout=self.timeout, build_s=TIMEOUTS.build_s
        )
        rank = view.rank(self.seat)
        self.world.open(rank, topology.world_size)
        self.channels = open_channels(topology, rank, world=self.world, progress=progress)
        self.journal("built", generation=view.generation)
        self.control, self.tensor = Exchange(self.channels.control), Exchange(self.channels.tensor_parallel)
        leaders = self.channels.leader_control
        self.tree = ControlTree(Exchange(self.channels.replica_control), leaders and Exchange(leaders))
        held = None if self.shard.base is None else self.shard.base[1]
        weights = move(view, self.seat, held, self.control)
        if self.shard.base is None:
            self.shard.base = (place_of(view, self.seat), weights)
        self.shard.new, self.shard.moved_at = (place_of(view, self.seat), weights), view.step
        self.membership.run()
        self.journal("ready", generation=view.generation)

    def _steps(self) -> bool:
        """Train; returns False if a joiner waits."""
        self.stepped = False
        while self.applied < self.num_steps - 1:
            if self._step(self.applied + 1):
                return False
        return True

    def _step(self, step: int) -> bool:
        view, progress = self.membership.view, self.membership.progress
        progress.step, progress.phase = step, "forward"
        self.membership.abort.check()
        if self.mistake:
            raise ValueError(USER_ERROR)
        activations = torch.ones(5000)
        for _ in range(3):
            self.tensor.all_reduce(activations)
        rows = rows_of(self.shard.current[0])
        dense = torch.zeros(LAYOUT.extent, dtype=torch.float64)
        dense[rows] = gradient(step)[rows]
        progress.phase = "sync"
        self.control.all_reduce(dense)
        self.grad = (dense / view.topology.num_replicas)[rows]
        self.arrived = step
        progress.phase = "vote"
        counts = view.topology.place(view.rank(self.seat))[0] == 0
        square = float(self.grad.square().sum()) if counts else 0.0
        ballot = torch.tensor([square, float(self.membership.joiner_waits)], dtype=torch.float64)
        square, joiners = self.tree.sum(ballot).tolist()
        self.vote = {"step": step, "square": square}
        progress.phase = "step"
        self._apply(step)
        if not self.stepped:
            self.journal("stepped", step=step, generation=view.generation)
            self.stepped = True
        return bool(joiners)

    def _apply(self, step: int) -> None:
        self.shard.apply(self.grad, self.vote["square"] ** 0.5)
        self.applied, self.grad = step, None

    def _close(self) -> None:
        if self.channels is not None:
            self.channels.forget()
            self.channels = self.control = self.tensor = self.tree = None
        if self.world is not None:
            self.world.close()
            self.world = None

    def _log_view(self, view: View) -> None:
        self.journal("view", view=view.to_json())

    def _end_at_once(self, code: int) -> None:
        self.journal("ended", code=code)
        os._exit(code)


def run_member(
    port: int, seat: Seat, founding: View | None, incarnation: int, num_steps: int, path: Path, holds_sockets: bool
) -> int:
    """The whole life of a member's process; returns its exit code.

    SIGUSR1 makes its main thread hang for ever, SIGUSR2 makes the user's code raise in the next step.
    """
    os.setsid()
    journal = Journal(path)
    member = BareMember(port, seat, founding, incarnation, num_steps, journal)
    signal.signal(signal.SIGUSR1, lambda *_: _hang())
    signal.signal(signal.SIGUSR2, lambda *_: setattr(member, "mistake", True))
    if holds_sockets:
        _child_with_our_sockets(member)
    try:
        member.train()
        return 0
    except ShardsLost as error:
        journal("lost", text=str(error))
        return int(ExitCode.SHARDS_LOST)
    except Fenced as error:
        journal("fenced", text=str(error))
        return int(ExitCode.FENCED)
    except JobFailed as error:
        journal("failed", text=str(error)[:3000])
        return int(ExitCode.JOB_FAILED)
    except ValueError as error:
        journal("own", text=str(error))
        return 1


def _hang() -> None:
    while True:
        time.sleep(1)


def _child_with_our_sockets(member: BareMember) -> None:
    """Once channels are open, fork a child that lives on with their sockets, as a DataLoader worker does."""
    change = member._change

    def change_and_fork(view: View) -> None:
        change(view)
        if member.helper is None:
            member.helper = os.fork()
            if member.helper == 0:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
                while True:
                    time.sleep(1)

    member._change = change_and_fork
