"""A ``Trainer.fit`` on members that die by plan; each writes a journal of what it does."""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, get_worker_info

from lightning_ntp import NTPStrategy
from lightning_ntp.config import Timeouts
from lightning_ntp.engine.events import Observer
from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.errors import Drained
from lightning_ntp.membership.exits import exit_code_of
from lightning_ntp.membership.view import View
from lightning_ntp.strategies import process
from lightning_ntp.topology import Seat, Topology
from tests.chaos.journal import Journal, MemberReport, Pass, StepState, Summary, Told
from tests.lightning.runs import Language, Scenario, quiet_trainer
from tests.support.batches import TokenDataset
from tests.support.job import TIMEOUTS, TOKEN, End, Job, process_name
from tests.support.zygote_worker import environment

Options = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One job.

    Attributes:
        scenario: What is trained.
        faults: Text of the fault plan.
        timeouts: All time limits.
        limit_s: After so long the job counts as hung.
        checkpoints: Whether a checkpoint is written at the end of every epoch.
        states: Whether optimizer states are told, too.
        trainer: More arguments of the members' Trainers.
        callbacks: Makes more callbacks.
    """

    scenario: Scenario
    faults: str = ""
    timeouts: Timeouts = TIMEOUTS
    limit_s: float = 60.0
    checkpoints: bool = False
    states: bool = False
    trainer: Options = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list


@dataclass
class Outcome:
    """What became of a job.

    Attributes:
        ends: Of its processes, in order.
        reports: By the name of the process.
        saved: State of the model in each checkpoint, by global step.
        written: What those wrote that ended ill.
    """

    ends: list[End]
    reports: dict[str, MemberReport]
    saved: dict[int, dict[str, Tensor]]
    written: str

    @property
    def codes(self) -> dict[str, int]:
        """Exit code of the last process at each seat."""
        return {end.name.rsplit(".", 1)[0]: end.code for end in self.ends}


class Reporter(Callback, Observer):
    """Fills the journal of its process."""

    def __init__(self, journal: Journal, states: bool) -> None:
        self.journal, self._states = journal, states
        self._steps_seen = 0
        self._norm = 0.0
        self._ready_in = -1

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self._survivor = survivor = process.ProcessMember.current
        if not survivor.is_alone:
            self.on_view(None)
        survivor.observers.append(self)
        survivor.before_step.append(self._step_begins)
        module.register_load_state_dict_pre_hook(lambda *_: self._loads("module"))

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._loads("optimizer"))

    def _loads(self, what: str) -> None:
        self.journal.write(Told("load", what))

    def on_failure(self, event: Any) -> None:
        self.journal.write(Told("failure", event))

    def on_view(self, event: Any) -> None:
        self.journal.write(Told("view", self._survivor.view.to_json()))

    def on_change(self, event: Any) -> None:
        if self._survivor.membership.incarnation:  # a joiner is told of no view
            self.on_view(None)
        self.journal.write(Told("change", event))

    def _step_begins(self, step: int) -> None:
        generation = self._survivor.view.generation
        if generation != self._ready_in:
            self._ready_in = generation
            self.journal.write(Told("ready", (generation, step)))

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._steps_seen = trainer.global_step  # a joiner's first is not 0
        self.journal.write(Told("layouts", {p.name: p.layout for p in module._ntp_model.parameters()}))

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self._norm = trainer.strategy._votes.of(optimizer).grad_norm

    def on_train_batch_end(self, trainer: Trainer, module: Language, *args: Any) -> None:
        if trainer.global_step == self._steps_seen:
            return
        self._steps_seen = trainer.global_step
        member, optimizer = trainer.strategy.member, trainer.optimizers[0]
        weights = {p.name: p.parameter.detach().numpy() for p in module._ntp_model.parameters()}
        state = StepState(
            trainer.global_step - 1,
            weights,
            member.topology.degrees[member.replica],
            member.slot,
            self._norm,
            optimizer.param_groups[0]["lr"],
        )
        if self._states:
            self._add_states(state, trainer, module)
        self.journal.write(state)

    @staticmethod
    def _add_states(state: StepState, trainer: Trainer, module: Language) -> None:
        optimizer = trainer.optimizers[0]
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        schedulers = [entry.scheduler.state_dict() for entry in trainer.lr_scheduler_configs]
        scalars: list[Any] = [trainer.global_step, options, schedulers]
        for param in module._ntp_model.parameters():
            for key, value in optimizer.state[param.parameter].items():
                if isinstance(value, Tensor) and value.shape == param.parameter.shape:
                    state.states.setdefault(param.name, {})[key] = value.numpy()
                else:
                    scalars.append((param.name, key, value))
        state.scalars = repr(scalars)

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loads("checkpoint")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loads("callback")

    def state_dict(self) -> dict[str, Any]:
        return {"saved": True}  # Lightning asks nobody to load an empty state

    def close(self, trainer: Trainer, module: Language, error: BaseException | None) -> None:
        survivor = process.ProcessMember.current
        self.journal.write(
            Summary(
                {name: float(value) for name, value in trainer.callback_metrics.items()},
                trainer.global_step,
                survivor is not None and survivor.is_leader,
                "" if error is None else f"{type(error).__name__}: {error}",
                module.notes,
            )
        )


class Recorded(Language):
    """Notes which micro-batch and generation a pass belongs to, as a pass may be run again."""

    journal: Journal

    def note(self, batch: tuple[Tensor, Tensor], batch_idx: int, loss: Tensor, weight: float) -> Tensor:
        micro = self.micro_batch()
        if micro is None:
            return super().note(batch, batch_idx, loss, weight)
        ids = [] if micro.is_dummy else batch[0].tolist()
        part = self.trainer.strategy._steps._pass
        index = micro.index, part[0] if part else 0
        generation = process.ProcessMember.current.view.generation
        key, counts = (micro.epoch, micro.window), weight if ids else 0.0
        self.journal.write(Pass(key, index, generation, ids, loss.item(), counts, self.notes))
        return loss


class Scheduled(Recorded):
    """Its learning rate changes at every third step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Dropping(Recorded):
    """Drops what every slot of a replica has alike: embeddings, before the first layer. It notes what is left."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.model.layers[0].register_forward_pre_hook(self._drop)

    def _drop(self, layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        dropped = nn.functional.dropout(inputs[0], 0.2, self.training)
        self.notes = hashlib.sha256(dropped.detach().numpy().tobytes()).hexdigest()
        return dropped


class Deadly(TokenDataset):
    """A member dies while it loads a sample, itself or its DataLoader worker.

    Args:
        size: Samples.
        victims: Seat, and which of the samples that this process loads is deadly, from 1.
    """

    def __init__(self, size: int, victims: tuple[tuple[str, int], ...]) -> None:
        super().__init__(size, with_index=True)
        self._left = dict(victims)

    def __getitem__(self, index: int) -> Any:
        seat = os.environ.get("NTP_SEAT", "")
        if seat in self._left and os.environ["NTP_INCARNATION"] == "0":
            self._left[seat] -= 1
            if self._left[seat] == 0:
                os.kill(os.getpid() if get_worker_info() is None else os.getppid(), signal.SIGKILL)
        return super().__getitem__(index)


def deadly_loader(
    size: int, batch_size: int, victims: tuple[tuple[str, int], ...] = (), num_workers: int = 0, **options: Any
) -> DataLoader:
    """Loads training data from ``Deadly``; the few samples of the validation are harmless."""
    return DataLoader(Deadly(size, victims if size > 7 else ()), batch_size, num_workers=num_workers, **options)


class _FaultLog(logging.Handler):
    """Tells of planned faults as they happen."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        self._journal.write(Told("fault", str(record.args[0])))


def run_member(port: int, trial: Trial, seat: Seat, incarnation: int) -> int:
    """One process of a seat; the working directory is the run's."""
    name, scenario = process_name(seat, incarnation), trial.scenario
    errors = os.open(f"{name}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    faulthandler.enable(errors)
    faulthandler.register(signal.SIGUSR1, errors, all_threads=True)
    topology = Topology.start(scenario.degrees)
    rank = topology.members.index(seat)
    os.environ |= environment(rank, topology.world_size, f"127.0.0.1:{port}")
    os.environ |= {
        "NTP_STORE": f"127.0.0.1:{port}", "NTP_TOKEN": TOKEN, "NTP_SEAT": str(seat),
        "NTP_INCARNATION": str(incarnation), "NTP_FAULTS": trial.faults,
    }  # fmt: skip
    journal = Journal(Path(f"{name}.log"))
    logging.getLogger("lightning_ntp.faults").addHandler(_FaultLog(journal))
    torch.set_default_dtype(scenario.dtype)
    # All take the leader's weights; which leader's, is open if one may die before it has handed them out.
    seed = 0 if str(seat) == "r0.s0" or "@0" in trial.faults else 1 + rank
    module = scenario.module(scenario.config, seed=seed, **scenario.options)
    module.journal = journal
    reporter = Reporter(journal, trial.states)
    trainer = _trainer(trial, topology, reporter)
    error: BaseException | None = None
    try:
        trainer.fit(module, scenario.data(scenario.size, scenario.batch_size), scenario.data(7, 2))
    except BaseException as raised:
        error = raised
        if not isinstance(raised, Drained):
            sys.excepthook(type(raised), raised, raised.__traceback__)
            sys.last_value = raised  # as Python has it when exit functions run
    reporter.close(trainer, module, error)
    return _exit_code(process.ProcessMember.current, error)


def _exit_code(survivor: Survivor | None, error: BaseException | None) -> int:
    if survivor is not None:
        process._end(survivor)
    return 0 if error is None else exit_code_of(error)


def _trainer(trial: Trial, topology: Topology, reporter: Reporter) -> Trainer:
    scenario = trial.scenario
    strategy = NTPStrategy(
        degrees=list(scenario.degrees), bucket_cap_mb=0.02, timeouts=trial.timeouts, **scenario.strategy
    )
    strategy.register_failure_callback(lambda hook, event: reporter.journal.write(Told(hook, event)))
    strategy.register_failure_callback(lambda hook, event: print(hook, event, file=sys.stderr))
    options: Options = {"accumulate_grad_batches": scenario.accumulate} if scenario.accumulate > 1 else {}
    callbacks = [reporter, *trial.callbacks()]
    if trial.checkpoints:
        callbacks.append(ModelCheckpoint("checkpoints", save_top_k=-1))
        options["enable_checkpointing"] = True
    return quiet_trainer(
        topology.world_size, strategy, callbacks=callbacks, **options, **scenario.trainer, **trial.trainer
    )


def run_job(rank: int, world_size: int, store_address: str, trial: Trial) -> Outcome:
    """Run a job. To be called in the zygote's rank."""
    port = int(store_address.rsplit(":", 1)[1])
    founding = View.founding(Topology.start(trial.scenario.degrees))
    ends = Job(port, founding, partial(run_member, port, trial), trial.limit_s, trial.timeouts).run()
    reports = {path.stem: MemberReport.read(path) for path in sorted(Path().glob("*.log"))}
    ill = [end.name for end in ends if end.code not in (0, -signal.SIGKILL)]
    written = [f"-- {name}\n{Path(f'{name}.err').read_text()[-9000:]}" for name in ill]
    return Outcome(ends, reports, _saved(), "\n".join(written))


def _saved() -> dict[int, dict[str, Tensor]]:
    found = {}
    for path in Path("checkpoints").glob("*.ckpt"):
        try:
            checkpoint = torch.load(path, weights_only=False)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise AssertionError(f"the checkpoint {path} is damaged") from error
        found[checkpoint["global_step"]] = checkpoint["state_dict"]
    return found
