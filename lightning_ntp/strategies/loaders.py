"""The user's loaders, wrapped for one replica."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import Trainer
from torch.utils.data import IterableDataset

from lightning_ntp.compat.lightning import active_loaders, batch_on_device
from lightning_ntp.compat.loops import refresh_train_length
from lightning_ntp.config import NTPConfig
from lightning_ntp.data import (
    EvaluationLoader,
    EvaluationStreamLoader,
    MicroBatch,
    ShareLoader,
    StreamLoader,
    nominal_batch_size,
    prepare_evaluation_loader,
    prepare_train_loader,
)
from lightning_ntp.data.fetch import refuse_unknown_loader
from lightning_ntp.errors import DataError, UnsupportedError
from lightning_ntp.policy import check_shares, shares_after, shares_by_degree
from lightning_ntp.policy.decision import Situation, decide
from lightning_ntp.policy.shares import ShareMode
from lightning_ntp.topology import Topology


class ReplicaLoaders:
    """Wraps loaders as the Trainer asks for them.

    Args:
        trainer: The Trainer that iterates them.
        config: Shares, global batch, cap on micro-batches.
        founding: Replicas that the job was founded with; their numbers stay.
        topology: Live members.
        replica: Number of this member's replica.
    """

    def __init__(
        self, trainer: Trainer, config: NTPConfig, founding: Topology, topology: Topology, replica: int
    ) -> None:
        self._trainer, self._config, self._replica = trainer, config, replica
        self._founding, self._topology = founding, topology
        self.train: ShareLoader | InStep | None = None
        self._evaluation: WeakSet[Any] = WeakSet()
        self._shares: tuple[int, ...] = ()
        self._judged = founding.degrees  # the degrees whose global batch was told of
        self._accumulate, self._splits = trainer.accumulate_grad_batches, 0
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a full global batch that each replica takes.

        Raises:
            DataError: before the training loader is known.
        """
        if self.train is None:
            raise DataError("shares are known once the training loader is: inside or after Trainer.fit")
        return tuple(getattr(self.train, "shares", self._shares))  # a stream's stay as they were given

    def wrap(self, loader: Any) -> Any:
        """The wrapper for ``loader`` in the Trainer's present stage."""
        if not self._trainer.training:
            wrapped = prepare_evaluation_loader(
                loader,
                replica=self._numbers.index(self._replica),
                num_replicas=self._topology.num_replicas,
                seed=self._seed,
                fill=not self._trainer.predicting,
            )
            if hasattr(wrapped, "redeal"):
                self._evaluation.add(wrapped)
            return _in_step(wrapped)
        refuse_unknown_loader(loader)
        self._per_replica = self._samples_per_replica(loader)
        shares = self._shares_of(loader)
        train = prepare_train_loader(
            loader,
            replica=self._replica,
            shares=shares,
            seed=self._seed,
            micro_batches=self._micro_batches,
            max_micro_batch=self._config.max_micro_batch,
        )
        train.limit = self._limit(train)
        self.train, self._shares = _in_step(train), shares
        return self.train

    def current_training(self) -> MicroBatch:
        """Facts about the batch that the training loop has in hand; once for each batch."""
        if isinstance(self.train, InStep):
            self.train.advance()
        return self.train.current

    def current_evaluation(self, dataloader_idx: int) -> MicroBatch | None:
        """The same for the evaluation loop."""
        loaders = active_loaders(self._trainer)
        loader = loaders[dataloader_idx] if dataloader_idx < len(loaders) else None
        if isinstance(loader, InStep):
            loader.advance()
        return loader.current if isinstance(loader, (InStep, EvaluationLoader)) else None

    def check_single(self) -> None:
        """Called when training starts.

        Raises:
            DataError: if the training data are several loaders.
        """
        if len(active_loaders(self._trainer)) > 1:
            raise DataError(
                "the training data are several loaders: only one can be cut into shares; combine the datasets "
                "(torch.utils.data.ConcatDataset, StackDataset) and return one DataLoader"
            )

    @property
    def length(self) -> int | None:
        """Micro-batches of the training epoch, as the shares are now; ``None`` if nobody knows."""
        return None if self.train is None else sized_len(self.train)

    def follow(self, topology: Topology) -> None:
        """Deal to the members of a new view: training from the window in hand on, evaluation from the next pass."""
        self._topology = topology
        if self.train is not None:
            self._shares = self._shares_of(self.train)
            self.train.reshare(self._shares)
        for loader in self._evaluation:
            loader.redeal(self._numbers.index(self._replica), topology.num_replicas)

    def begin_epoch(self) -> None:
        """At the start of a training epoch: a limit that is a fraction follows the epoch's length."""
        if isinstance(self.train, ShareLoader) and isinstance(self._trainer.limit_train_batches, float):
            limit = self._limit(self.train)
            if limit != self.train.limit:
                self.train.limit = limit

    def check_can_join(self) -> None:
        """Called by a joiner before it asks to be let in.

        Raises:
            UnsupportedError: for a stream, which cannot be entered in the middle.
        """
        if not isinstance(self.train, ShareLoader):
            raise UnsupportedError("a member cannot join a run over an iterable dataset: use a map-style dataset")

    def in_hand(self) -> MicroBatch:
        """Facts about the batch that the training loop has in hand, as often as one asks."""
        return self.train.upcoming() if isinstance(self.train, InStep) else self.train.current

    def draw_again(self, kept: Sequence[OrderedDict]) -> Iterator[OrderedDict]:
        """The arguments of a window's micro-batches once more, by the present shares.

        Args:
            kept: Arguments of the window's micro-batches so far, but for the batches themselves.
        """
        self.train.begin_again(self.train.shares)
        refresh_train_length(self._trainer, self.length)  # the window in hand has other samples than at the change
        for kwargs in kept:
            batch = self.train.draw() if isinstance(self.train, InStep) else next(self.train)
            yield OrderedDict(kwargs, batch=batch_on_device(self._trainer, batch))

    def position(self) -> dict[str, Any]:
        """Position at the start of the window in hand, cut by the present shares; for a joiner."""
        self.train.begin_again(self.train.shares)
        return self.train.state_dict()

    def go_to(self, position: dict[str, Any]) -> None:
        """Go on from another member's ``position``."""
        self.train.load_state_dict(position)

    @property
    def can_split(self) -> bool:
        """Whether a micro-batch can run in smaller passes than now."""
        is_automatic = self._trainer.lightning_module.automatic_optimization
        return isinstance(self.train, ShareLoader) and is_automatic and self._cap(self._splits) > 1

    def split(self, splits: int) -> None:
        """Halve the passes of a micro-batch so often, from the window in hand on."""
        self._splits = splits
        if isinstance(self.train, ShareLoader):
            given = self._config.max_micro_batch
            cap = min(self._cap(splits), given or self._cap(0)) if splits else given
            if cap != self.train.max_micro_batch:
                self.train.max_micro_batch = cap

    def _cap(self, splits: int) -> int:
        largest = -(-self.train.shares[self._replica] // self._accumulate)
        return max(1, -(-largest // 2**splits))

    @property
    def _numbers(self) -> list[int]:
        """Numbers of the live replicas."""
        return [seats[0].replica for seats in self._topology.seats]

    @property
    def _degrees(self) -> tuple[int, ...]:
        """Degree of every replica that the job was founded with; 0 where nobody is left."""
        live = dict(zip(self._numbers, self._topology.degrees, strict=True))
        return tuple(live.get(number, 0) for number in range(self._founding.num_replicas))

    def _samples_per_replica(self, loader: Any) -> int | None:
        """Samples of a global batch over the replicas; ``None`` for a batch sampler of the user's."""
        batch_size = nominal_batch_size(loader)
        return None if batch_size is None else batch_size * self._trainer.accumulate_grad_batches

    def _shares_of(self, loader: Any) -> tuple[int, ...]:
        """Shares of the live replicas; of a stream, which cannot be cut, equal ones once some have been lost."""
        stream = loader.dataset if hasattr(loader, "dataset") else None
        if not isinstance(stream, IterableDataset) or self._degrees == self._founding.degrees:
            return self._shares_now()
        return tuple((self._per_replica or 1) * (degree > 0) for degree in self._degrees)

    def _shares_now(self) -> tuple[int, ...]:
        per_replica, mode = self._per_replica, self._mode()
        replicas, degrees, given = self._founding.num_replicas, self._degrees, self._config.shares
        if given is not None:
            if per_replica is not None:
                check_shares(given, per_replica * replicas, replicas, mode)
            return shares_after(given, self._founding.degrees, degrees, mode)
        if per_replica is None:  # shares are proportions
            return degrees
        return shares_by_degree(per_replica, degrees, self._topology.nominal_degree, mode)

    def _mode(self) -> ShareMode:
        """How the global batch is sized at the present degrees; ``"auto"`` asks the policy, and says what it found."""
        wanted, per_replica = self._config.global_batch, self._per_replica
        if wanted != "auto":
            return wanted
        if per_replica is None or self._config.shares is not None:
            return "constant"  # shares by hand, or proportions of batches of the user's: there is nothing to compare
        decision = decide(Situation(self._degrees, self._topology.nominal_degree, per_replica, global_batch="auto"))
        if self._degrees != self._judged:
            self._judged = self._degrees
            rank_zero_info("; ".join(decision.reasons))
        return decision.mode

    def _micro_batches(self) -> int:
        if self._trainer.accumulate_grad_batches != self._accumulate:
            raise UnsupportedError(
                f"accumulate_grad_batches was changed from {self._accumulate} to "
                f"{self._trainer.accumulate_grad_batches} during fit, but shares are dealt for one number of "
                "micro-batches: set it on the Trainer, once"
            )
        return self._accumulate

    def _limit(self, loader: Any) -> int | None:
        limit = self._trainer.limit_train_batches
        if isinstance(limit, int):
            return limit
        if limit is None or limit == 1.0:
            return None
        length = sized_len(loader)
        return None if length is None else int(length * limit)  # without a length Lightning refuses a fraction


class InStep:
    """A stream's loader whose ``current`` is about the batch in use, although Lightning reads one batch ahead.

    It does so where a loader has no length, to know which batch is the last.

    Args:
        loader: Says in its ``current`` what it has yielded last. All other attributes are reached as before.

    Attributes:
        current: Facts about the batch in use; None before the first ``advance``.
    """

    def __init__(self, loader: StreamLoader | EvaluationStreamLoader) -> None:
        self.current: MicroBatch | None = None
        self._loader = loader
        self._ahead: deque[MicroBatch] = deque()
        self._behind = 0  # batches that Lightning has read behind the one in hand

    def __iter__(self) -> Iterator[Any]:
        self._ahead.clear()
        for batch in self._loader:
            self._ahead.append(self._loader.current)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def upcoming(self) -> MicroBatch:
        """Facts about the batch in hand, to which ``advance`` will go."""
        self._behind = len(self._ahead) - 1
        return self._ahead[0]

    def begin_again(self, shares: tuple[int, ...]) -> None:
        """Go back to the first micro-batch of the window in hand; what Lightning has read behind it stays read."""
        self._loader.begin_again(shares, ahead=self._behind)
        self._ahead = deque(self._loader.look_back(self._behind - 1 - number) for number in range(self._behind))

    def draw(self) -> Any:
        """The next micro-batch of a window that is begun again; ``advance`` goes to it."""
        batch = next(self._loader)
        self._ahead.appendleft(self._loader.current)
        return batch

    def advance(self) -> None:
        """Go to the next batch."""
        self.current = self._ahead.popleft()


def _in_step(loader: Any) -> Any:
    return InStep(loader) if isinstance(loader, (StreamLoader, EvaluationStreamLoader)) else loader
