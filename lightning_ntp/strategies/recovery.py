"""What a Trainer's parts have to do when a failure is seen and when a new view is entered."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ntp.compat import loops
from lightning_ntp.engine.events import Observer, ViewEvent
from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.strategies.dowry import TrainerDowry, make_dowry, settle_dowry, take_dowry
from lightning_ntp.strategies.loaders import ReplicaLoaders
from lightning_ntp.strategies.process import end_job
from lightning_ntp.strategies.steps import StepRunner
from lightning_ntp.strategies.takeover import LeaderDuties
from lightning_ntp.strategies.votes import Votes
from lightning_ntp.strategies.windows import WindowReplay

log = logging.getLogger(__name__)

_NOT_SAVED = "no checkpoint is saved on this exception: the members were stopped at different places"


class TrainerRecovery(Observer):
    """Lets the parts of a Trainer follow the views; an observer of its engine.

    Args:
        trainer: The Trainer.
        engine: Recovers.
        loaders: Follow with shares.
        steps: Follow with the weights of micro-batches.
        keeping_states_here: Inside, the strategy gathers no weights and optimizer states.

    Attributes:
        windows: Replays training windows; there once a fit is set up.
        votes: Forget what belongs to the old view; there once a fit is set up.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: Survivor,
        loaders: ReplicaLoaders,
        steps: StepRunner,
        keeping_states_here: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._trainer, self._engine, self._loaders, self._steps = trainer, engine, loaders, steps
        self._keeping_states_here = keeping_states_here
        self.windows: WindowReplay | None = None
        self.votes: Votes | None = None
        self._duties: LeaderDuties | None = None
        self._was_leader = engine.is_leader
        engine.observers.append(self)
        self._may_save = True
        loops.wrap(trainer, "", "save_checkpoint", self._around_save)
        loops.wrap(trainer, "", "_run_stage", self._around_stage)

    def start_fit(self, votes: Votes, broadcast: Callable[[Any], Any]) -> None:
        """Once optimizers and gradient sync are set up."""
        self.votes = votes
        self.windows = WindowReplay(self._trainer, self._engine, self._loaders, self._steps)
        epoch_loop = "fit_loop.epoch_loop"
        if self._trainer.lightning_module.automatic_optimization:
            loops.wrap(self._trainer, f"{epoch_loop}.automatic_optimization", "run", self.windows.around_automatic)
        else:
            loops.wrap(self._trainer, f"{epoch_loop}.manual_optimization", "run", self.windows.around_manual)
        self.windows.before_window = self._stop_if_agreed  # where Lightning does not ask: a single member is left
        loops.wrap(self._trainer, epoch_loop, "_broadcast_sigterm_tensor", lambda _: self._stop_if_agreed)
        loops.wrap(self._trainer, epoch_loop, "run", self._around_epoch)
        loops.wrap(self._trainer, "_signal_connector", "_sigterm_notifier_fn", lambda _: self._ask_to_stop)
        duties = LeaderDuties(self._trainer)
        if self._engine.is_alone:
            self._join(duties)
        else:
            duties.share(broadcast)
        self._duties = duties
        self._engine.make_dowry = self._make_dowry

    def _join(self, duties: LeaderDuties) -> None:
        """A joiner that is ready gets in. What is slow comes before: from the admission on, all wait for it."""
        loops.set_up_training_data(self._trainer)
        self._loaders.check_can_join()
        dowry = self._engine.admit()
        take_dowry(dowry, self._trainer, self._loaders, self._steps)
        duties.adopt(dowry.loggers)
        self.windows.before_first = lambda: settle_dowry(dowry, self._trainer)

    def _make_dowry(self) -> TrainerDowry:
        self._loaders.follow(self._engine.view.topology)
        with self._keeping_states_here():
            return make_dowry(self._trainer, self._loaders, self._steps, self._duties.state())

    def close(self) -> None:
        """The Trainer's run is over."""
        if self._duties is not None:
            self._duties.close()
        loops.unwrap(self._trainer)
        self._engine.observers.remove(self)

    def step_taken(self) -> None:
        """After every committed step."""
        if self._duties is not None:
            self._duties.flush()

    # As an observer

    def on_change(self, event: ViewEvent) -> None:
        self._loaders.follow(self._engine.member.topology)
        self._loaders.split(self._engine.splits)
        if self.windows is not None:
            self._steps.start_sync()
            self.votes.forget()
            self.windows.view_changed()
            loops.refresh_train_length(self._trainer, self._loaders.length)
        loops.refresh_evaluation_lengths(self._trainer)
        self._change_leader()

    def on_leave(self) -> None:
        """This member is drained: whoever leads next goes on with its loggers."""
        if self._was_leader and self._duties is not None:
            self._duties.hand_over()

    # Private

    def _around_epoch(self, run: Callable[..., None]) -> Callable[..., None]:
        """An epoch may have another number of micro-batches than the one before, whose number Lightning knows."""

        def run_epoch(data_fetcher: Any) -> None:
            self._loaders.begin_epoch()
            loops.refresh_train_length(self._trainer, self._loaders.length, at_start=True)
            run(data_fetcher)

        return run_epoch

    def _around_save(self, save: Callable[..., None]) -> Callable[..., None]:
        def save_checkpoint(*arguments: Any, **options: Any) -> None:
            if not self._may_save:
                log.warning(_NOT_SAVED)
                return
            self._engine.outside(lambda: save(*arguments, **options))

        return save_checkpoint

    def _around_stage(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Tell of an error before callbacks hear of it, and let none of them save: each member stopped elsewhere.

        A stop that all have agreed on is no such error.
        """

        def run_stage() -> Any:
            try:
                return run()
            except BaseException as error:
                if not self._engine.agreed.stop:
                    end_job(self._engine, error)
                    self._may_save = False
                    if loops.forbid_saving_on_exception(self._trainer):
                        log.warning(_NOT_SAVED)
                raise

        return run_stage

    def _change_leader(self) -> None:
        is_leader, was_leader = self._engine.is_leader, self._was_leader
        self._was_leader = is_leader
        if self._duties is None or is_leader == was_leader:
            return
        if is_leader:
            self._duties.take_over()
        else:
            self._duties.hand_over()

    def _stop_if_agreed(self) -> None:
        """In the place of Lightning's own broadcast, which would be one more collective for every batch."""
        if self._engine.agreed.stop:
            loops.note_sigterm(self._trainer)
            raise SIGTERMException

    def _ask_to_stop(self, signum: int, frame: Any) -> None:
        """In the place of Lightning's own handler, which broadcasts inside the signal: the vote carries the wish."""
        self._engine.wants_stop = True
