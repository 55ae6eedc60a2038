"""The training loader of one replica: every global batch cut by shares, every share into micro-batches.

Position is counted in samples of the epoch's order (the *cursor*), and a window only ever advances it by what it took.
So shares may change between any two windows, and a run may be resumed at any micro-batch, without a sample lost or seen
twice.

Two things the caller has to know:

* ``len()`` is live: the micro-batches yielded in this epoch plus those still to come under the present shares.
  Lightning asks once, at the start; after a ``reshare`` that changes the length in mid-epoch its number must be
  refreshed.
* Shares are samples of a full global batch. When ``accumulate_grad_batches`` changes, the caller gives new shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_ntp.data.batch import MicroBatch
from lightning_ntp.data.cut import CutRule, Window, count_micro_batches
from lightning_ntp.data.fetch import Fetcher, refuse_unknown_loader
from lightning_ntp.data.order import EpochOrders, Order
from lightning_ntp.data.position import Position, cut_passes, plan_requests
from lightning_ntp.errors import ConfigError, DataError
from lightning_ntp.policy import whole_shares


class ShareLoader:
    """Yields the micro-batches of one replica; the same ones on all its tensor-parallel ranks.

    Iterates itself: there is one position, and ``iter()`` puts it to the epoch's start, or leaves it where
    ``load_state_dict`` has put it.

    A full window has k micro-batches on every replica. The epoch's partial window is dealt in proportion to the shares
    and has as many as are needed at the usual size. With ``drop_last=True`` on the user's loader it is dropped, except
    for its whole per-replica batches where all shares are equal and k divides them.

    A user's batch sampler decides what comes together: a global batch is the next ``replicas * k`` lists, joined, dealt
    in proportion to the shares (so there ``"shrink"`` does not make it smaller).

    Args:
        loader: The user's DataLoader over a map-style dataset. Its sampler, or batch sampler, decides the order; its
            dataset, collate_fn and worker settings load the data.
        replica: Number of this replica.
        shares: Samples of a full global batch that each replica takes.
        seed: Seed of the run, the same in every process.
        micro_batches: k, or a function that returns it; read at every window.
        max_micro_batch: Cap on the samples of one pass; a bigger micro-batch is split into several
            (``MicroBatch.extra``).
        limit: Micro-batches after which the trainer ends an epoch (``limit_train_batches``, as a number), so that a
            window which it cuts short is weighted by what is run of it. None for the whole epoch.

    Attributes:
        current: Facts about the micro-batch last yielded; None before the first.

    Raises:
        ConfigError: for shares, a replica or a cap that cannot be.
        DataError: for a loader that cannot be cut, or a dataset without a single whole batch under ``drop_last=True``.
    """

    def __init__(
        self,
        loader: DataLoader,
        *,
        replica: int,
        shares: Iterable[int],
        seed: int,
        micro_batches: Callable[[], int] | int,
        max_micro_batch: int | None = None,
        limit: int | None = None,
    ) -> None:
        refuse_unknown_loader(loader)
        self.current: MicroBatch | None = None
        self._loader = loader
        self._replica = replica
        self._shares = whole_shares(shares)
        self._micro_batches = micro_batches
        self._max_micro_batch = max_micro_batch
        self._limit = limit
        self._check_arguments()
        self._orders = EpochOrders(loader, seed)
        self._fetcher = Fetcher(loader, replica)
        # A batch sampler of the user's has its own way with an incomplete last list.
        self._drop_last = bool(getattr(loader.batch_sampler, "drop_last", False)) and not self._orders.has_lists
        self._epoch = 0
        self._to_epoch_start()
        self._check_not_empty()

    # -- iteration

    def __len__(self) -> int:
        """Micro-batches yielded in this epoch plus those to come, the same on all replicas."""
        extent, position = self._order.extent, self._position
        if position.index == 0:
            return position.yielded + count_micro_batches(self._rule(), extent, position.cursor)
        window = position.cut(self._window_rule(), self._order, limit=None)
        assert window is not None  # it was begun
        return position.yielded + window.count - position.index + count_micro_batches(self._rule(), extent, window.stop)

    def __iter__(self) -> ShareLoader:
        if not self._is_resumed:
            self._to_epoch_start()
        self._is_resumed = False
        return self

    def __next__(self) -> Any:
        window = self._open_window() if self._open is None else self._open
        passes = cut_passes(window.sizes[self._replica][self._position.index], self._max_micro_batch)
        batches = [self._fetcher.fetch() for _ in passes]
        self.current = self._describe(window, passes, batches[:-1])
        self._position = self._position.after(window)
        if self._position.index == 0:
            self._open = self._begun_rule = None
        return batches[-1]

    def _open_window(self) -> Window:
        rule = self._window_rule()
        window = self._position.cut(rule, self._order, self._limit)
        if window is None:
            self._fed_rule = None
            self._fetcher.stop()
            raise StopIteration
        if rule != self._fed_rule:
            # What was prefetched was cut by other shares, or at another position: load anew from here.
            self._start_fetching(rule)
        self._open, self._begun_rule = window, rule
        return window

    def _start_fetching(self, rule: CutRule) -> None:
        key = (self._orders.seed, self._epoch)
        requests = plan_requests(
            self._order,
            rule,
            self._position,
            replica=self._replica,
            key=key,
            cap=self._max_micro_batch,
            limit=self._limit,
        )
        self._fetcher.start(requests, *key, self._position.window)
        self._fed_rule = rule

    def _describe(self, window: Window, passes: tuple[int, ...], earlier: list[Any]) -> MicroBatch:
        span = window.span(self._replica, self._position.index)
        return MicroBatch(
            epoch=self._epoch,
            window=window.index,
            index=self._position.index,
            count=window.count,
            sample_ids=tuple(self._order.at(span)),
            num_samples=len(span),
            global_samples=window.samples,
            is_dummy=len(span) == 0,
            passes=passes,
            extra=tuple(zip(earlier, passes, strict=False)),
        )

    # -- shares and position

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares from the next window on."""
        return self._shares

    @property
    def limit(self) -> int | None:
        """Micro-batches after which the trainer ends an epoch; None for the whole epoch."""
        return self._limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._limit = limit
        self._fed_rule = None

    def reshare(self, shares: Iterable[int]) -> None:
        """Take new shares from the next window on; prefetched micro-batches of later windows are dropped.

        Raises:
            ConfigError: for shares that cannot be, or for another number of replicas.
        """
        shares = whole_shares(shares)
        if len(shares) != len(self._shares):
            raise ConfigError(
                f"shares={shares} has {len(shares)} entries, but this loader cuts for {len(self._shares)} replicas: "
                "give one share a replica"
            )
        self._shares = shares

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; nothing happens if it is the present one."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._to_epoch_start()

    def state_dict(self) -> dict[str, Any]:
        """The position behind the micro-batch last yielded. The same on all replicas; prefetching does not move it."""
        rule = self._window_rule()
        return {
            "version": 1,
            "seed": self._orders.seed,
            "epoch": self._epoch,
            **asdict(self._position),
            "total": self._order.extent.total,
            "shares": list(rule.shares),
            "micro_batches": rule.micro_batches,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position: the next ``iter()`` continues with the next sample, in the saved run's order.

        Inside a window the rest of it is cut as it was begun, and the present shares follow with the next window. Where
        that cannot be (another number of replicas, or of micro-batches), the window is begun again.

        Raises:
            DataError: if the position lies inside an epoch of another length: the dataset has changed.
        """
        self._orders.seed, self._epoch = state["seed"], state["epoch"]
        self._to_epoch_start()
        total = self._order.extent.total
        if state["yielded"] and total != state["total"]:
            raise DataError(
                f"the saved position is inside an epoch of {state['total']} samples, but the loader now has {total}: "
                "resume with the dataset of the saved run, or from a checkpoint at the end of an epoch"
            )
        self._position = Position(state["cursor"], state["window"], state["index"], state["yielded"])
        self._is_resumed = True
        if self._position.index:
            self._resume_in_window(tuple(state["shares"]), state["micro_batches"])

    def _resume_in_window(self, shares: tuple[int, ...], micro_batches: int) -> None:
        now, position = self._rule(), self._position
        if (len(shares), micro_batches) == (len(now.shares), now.micro_batches):
            self._begun_rule = CutRule(shares, micro_batches, self._drop_last)
            return
        rank_zero_warn(
            f"The checkpoint lies inside a global batch that was cut for {len(shares)} replicas and {micro_batches} "
            f"micro-batches, not {len(now.shares)} and {now.micro_batches}: this global batch is begun again."
        )
        self._position = Position(position.cursor, position.window, 0, position.yielded - position.index)

    def _to_epoch_start(self) -> None:
        self._position = Position()
        self._is_resumed = False
        self._open: Window | None = None
        # Two rules: of the window that is begun (it keeps its shares), and of the micro-batches being prefetched.
        self._begun_rule: CutRule | None = None
        self._fed_rule: CutRule | None = None

    # -- what is cut, and how

    @property
    def _order(self) -> Order:
        return self._orders.of(self._epoch)

    def _rule(self) -> CutRule:
        return CutRule(self._shares, self._count_per_window(), self._drop_last)

    def _window_rule(self) -> CutRule:
        return self._begun_rule or self._rule()

    def _count_per_window(self) -> int:
        return self._micro_batches() if callable(self._micro_batches) else self._micro_batches

    def _check_arguments(self) -> None:
        if not 0 <= self._replica < len(self._shares):
            raise ConfigError(
                f"replica={self._replica} is outside 0..{len(self._shares) - 1}, by shares={self._shares}"
            )
        if self._max_micro_batch is not None and self._max_micro_batch < 1:
            raise ConfigError(f"max_micro_batch={self._max_micro_batch}: use at least 1 sample, or None for no cap")
        if self._count_per_window() < 1:
            raise ConfigError(f"micro_batches={self._count_per_window()}: a window needs at least 1 micro-batch")

    def _check_not_empty(self) -> None:
        if self._drop_last and len(self) == 0:
            raise DataError(
                f"drop_last=True drops the whole epoch: its {self._order.extent.total} samples are less than one batch "
                f"on every replica (shares={self._shares}): set drop_last=False or a smaller batch_size"
            )

    # -- what Lightning looks for on a loader

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def sampler(self) -> ShareLoader:
        """Lightning announces the epoch through ``loader.sampler.set_epoch``."""
        return self

    @property
    def _iterator(self) -> Any:
        return self._fetcher.iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        # Lightning has shut down the workers; go on from the position if iterated again.
        self._fetcher.iterator = iterator
        self._open = self._fed_rule = None
