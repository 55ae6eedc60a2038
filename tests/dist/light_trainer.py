"""A member without Lightning that trains a small model through deaths, drains and joins, started by any launcher.

    python light_trainer.py DIRECTORY DEGREES

It writes ``DIRECTORY/SEAT.INCARNATION``, a journal of JSON lines, each with the time on the clock that all processes
of this machine share. It trains until ``DIRECTORY/go`` is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.support.light import skip_lightning

    skip_lightning()

import torch

from lightning_ntp.comm.rendezvous import INCARNATION_VARIABLE, SEAT_VARIABLE, connect_store, job_token
from lightning_ntp.config import Timeouts
from lightning_ntp.engine.events import Observer
from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.errors import Drained
from lightning_ntp.membership.exits import ExitCode, exit_code_of
from lightning_ntp.membership.founding import Founding
from lightning_ntp.membership.member import Membership
from lightning_ntp.membership.parse import parse_seat
from lightning_ntp.membership.store import JobStore
from lightning_ntp.parallel import ParallelPlan
from lightning_ntp.policy import deal
from lightning_ntp.topology import Topology
from tests.support.batches import batch
from tests.support.models import ModelConfig, build, loss_fn

GLOBAL_BATCH = 8
TIMEOUTS = Timeouts(
    beat_s=0.1, lease_s=3.0, lease_margin_s=0.5, classify_s=4.0, join_s=8.0, build_s=10.0, hang_s=12.0,
    slow_hang_s=15.0, shutdown_grace_s=2.0, start_s=30.0, collective_s=60.0,
)  # fmt: skip
_MODEL = ModelConfig(vocab=31, width=16, num_heads=4, num_kv_heads=2, ffn=12, layers=1)
_PLAN = {"embed": "vocab", "layers.*.attn": "attention(num_heads=4, num_kv_heads=2)", "layers.*.mlp": "ffn"}
_PAUSE_S = 0.03  # the machine has other things to do


class LightTrainer(Observer):
    """One process.

    Args:
        directory: Where it writes, and reads the word.
        founding: What it declares.
    """

    def __init__(self, directory: Path, founding: Founding) -> None:
        self.directory, self.founding = directory, founding
        seat = os.environ.get(SEAT_VARIABLE)
        self.seat = parse_seat(seat) if seat else founding.members[int(os.environ["RANK"])]
        self.incarnation = int(os.environ.get(INCARNATION_VARIABLE, "0"))
        path = directory / f"{self.seat}.{self.incarnation}"
        self._journal = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def run(self) -> int:
        self.write("up")
        store = JobStore(lambda: connect_store(timeout_s=TIMEOUTS.start_s), job_token())
        is_first = self.incarnation == 0
        if is_first:
            self.founding.declare(store)
        membership = Membership(
            store, self.seat, self.founding.view if is_first else None, incarnation=self.incarnation,
            timeouts=TIMEOUTS, end_process=self._end_at_once,
        )  # fmt: skip
        self.survivor = Survivor(
            membership, connect_store(timeout_s=TIMEOUTS.start_s), founding=self.founding.topology, joins=not is_first
        )
        self.survivor.observers.append(self)
        try:
            self._train()
        except Drained:
            self.write("left")
            return int(ExitCode.DRAINED)
        except RuntimeError as error:
            self.write("failed", text=f"{type(error).__name__}: {str(error)[:500]}")
            membership.close()
            return exit_code_of(error)
        return 0

    def _train(self) -> None:
        survivor = self.survivor
        model = build(_MODEL, seed=0 if self.seat == self.founding.members[0] else 1)  # all take the leader's
        survivor.join()
        member = survivor.new_member()
        if not survivor.is_alone:
            self._note_view()
            survivor.outside(lambda: member.copy_leaders([*model.parameters(), *model.buffers()]))
        member.cut(model, ParallelPlan(_PLAN))
        member.start_sync()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        survivor.own([optimizer])
        if survivor.is_alone:
            survivor.admit()
            self._note_view()
        while not survivor.agreed.stop:
            self._step(model, optimizer)
            time.sleep(_PAUSE_S)
        survivor.finish()
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        self.write("done", degree=member.topology.degrees[member.replica], slot=member.slot, digest=digest)

    def _step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        survivor, number, taken = self.survivor, self.survivor.applied + 1, []
        ids = range(number * GLOBAL_BATCH, (number + 1) * GLOBAL_BATCH)
        survivor.wants_stop = (self.directory / "go").exists()

        def run(shares: tuple[int, ...]) -> None:
            optimizer.zero_grad()
            first = sum(shares[: survivor.member.replica])
            taken[:] = ids[first : first + shares[survivor.member.replica]]
            tokens = batch(taken, _MODEL.vocab)
            survivor.member.sync.begin(len(taken) / len(ids), sync=True)
            loss_fn(model(tokens), tokens).backward()
            survivor.commit(optimizer, 1.0)

        survivor.run_step(run, lambda view: deal(GLOBAL_BATCH, view.topology.degrees))
        self.write("step", step=number, generation=survivor.view.generation, ids=taken)

    # As an observer

    def on_failure(self, event) -> None:
        self.write("failure", cause=event.cause)

    def on_view(self, event) -> None:
        self._note_view()

    def on_change(self, event) -> None:
        self.write("change", generation=event.generation)

    def _note_view(self) -> None:
        view = self.survivor.view
        self.write("view", generation=view.generation, step=view.step, members=[str(seat) for seat in view.members])

    def _end_at_once(self, code: int) -> None:
        self.write("ended", code=code)
        os._exit(code)

    def write(self, event: str, **fields) -> None:
        line = {"event": event, "t": time.monotonic(), **fields}
        os.write(self._journal, (json.dumps(line) + "\n").encode())


if __name__ == "__main__":
    where, degrees = sys.argv[1:]
    topology = Topology.start([int(degree) for degree in degrees.split(",")])
    code = LightTrainer(Path(where), Founding(topology, TIMEOUTS)).run()
    os._exit(code)  # as the Trainer's processes do: groups of a generation that has ended are not waited for
