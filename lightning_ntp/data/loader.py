"""The training loader of one replica: every global batch cut by shares, every share into micro-batches.

Position is counted in samples of the epoch's order (the *cursor*), and a window only ever advances it by what it took.
So shares may change between any two windows, a window may be begun again at other shares, and a run may be resumed at
any micro-batch, without a sample lost or seen twice.

Two things the caller has to know:

* ``len()`` is live: the micro-batches yielded in this epoch plus those still to come under the present shares.
  Lightning asks once, at the start; after a ``reshare`` or ``begin_again`` that changes the length in mid-epoch its
  number must be refreshed.
* Shares are samples of a full global batch. When ``accumulate_grad_batches`` changes, the caller gives new shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_ntp.data.batch import MicroBatch
from lightning_ntp.data.cut import CutRule, Window, count_micro_batches, cut_again
from lightning_ntp.data.order import EpochOrders, Order
from lightning_ntp.data.position import Position, cut_passes, plan_requests
from lightning_ntp.data.saved import pack_state, unpack_state
from lightning_ntp.data.wrapper import FetchingWrapper
from lightning_ntp.errors import ConfigError, DataError
from lightning_ntp.policy import whole_shares


class ShareLoader(FetchingWrapper):
    """Yields the micro-batches of one replica; the same ones on all its tensor-parallel ranks.

    Iterates itself: there is one position, and ``iter()`` puts it to the epoch's start, or leaves it where
    ``load_state_dict`` has put it.

    A full window has k micro-batches on every replica. The epoch's partial window is dealt in proportion to the shares
    and has as many as are needed at the usual size. With ``drop_last=True`` on the user's loader it is dropped, except
    for its whole per-replica batches where all shares above 0 are equal and k divides them.

    A replica whose members are all dead has share 0, and the others keep their numbers. A live replica with share 0
    runs dummies.

    A user's batch sampler decides what comes together: a global batch is the next ``replicas * k`` lists, joined, dealt
    in proportion to the shares (so there ``"shrink"`` does not make it smaller).

    Args:
        loader: The user's DataLoader over a map-style dataset. Its sampler, or batch sampler, decides the order; its
            dataset, collate_fn and worker settings load the data.
        replica: Number of this replica among those that the job was founded with.
        shares: Samples of a full global batch that each of these replicas takes.
        seed: Seed of the run, the same in every process.
        micro_batches: k, or a function that returns it; read at every window.
        max_micro_batch: Cap on the samples of one pass; a bigger micro-batch is split into several
            (``MicroBatch.extra``).
        limit: Micro-batches after which the trainer ends an epoch (``limit_train_batches``, as a number), so that a
            window which it cuts short takes, and is weighted by, what is run of it. None for the whole epoch.

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
        super().__init__(loader, replica)
        self._replica = replica
        self._shares = whole_shares(shares)
        self._micro_batches = micro_batches
        self._max_micro_batch = max_micro_batch
        self._limit = limit
        self._check_arguments()
        self._orders = EpochOrders(loader, seed)
        # A batch sampler of the user's has its own way with an incomplete last list.
        self._drop_last = bool(getattr(loader.batch_sampler, "drop_last", False)) and not self._orders.has_lists
        self._to_epoch_start()
        self._check_not_empty()

    # -- iteration

    def __len__(self) -> int:
        """Micro-batches yielded in this epoch plus those to come, the same on all replicas."""
        position, window = self._position, self._window
        coming, cursor = (0, position.cursor) if window is None else (window.count, window.stop)
        return position.begin().yielded + coming + count_micro_batches(self._rule(), self._order.extent, cursor)

    def __iter__(self) -> ShareLoader:
        if not self._is_resumed:
            self._to_epoch_start()
        self._is_resumed = False
        return self

    def __next__(self) -> Any:
        window = self._window if self._is_fed else None
        if window is None:
            window = self._open_window()
        passes = cut_passes(window.sizes[self._replica][self._position.index], self._max_micro_batch)
        batches = [self._fetcher.fetch() for _ in passes]
        self.current = self._describe(window, passes, batches[:-1])
        self._begun = (self._position.begin(), window)
        self._position = self._position.after(window)
        if self._position.index == 0:
            self._window = None
        return batches[-1]

    def _open_window(self) -> Window:
        rule = self._rule()
        window = self._window or self._position.cut(rule, self._order, self._limit)
        if window is None:
            self._fed_rule = None
            self._fetcher.stop()
            raise StopIteration
        if not self._is_fed or rule != self._fed_rule:
            # What was prefetched was cut by other shares, or at another position: load anew from here.
            self._start_fetching(window, rule)
        self._window = window
        return window

    @property
    def _is_fed(self) -> bool:
        """Whether the fetcher loads what comes next. Lightning may have stopped it."""
        return self._fed_rule is not None and self._fetcher.iterator is not None

    def _start_fetching(self, window: Window, rule: CutRule) -> None:
        key = (self._orders.seed, self._epoch)
        requests = plan_requests(
            self._order,
            rule,
            self._position,
            window,
            replica=self._replica,
            key=key,
            cap=self._max_micro_batch,
            limit=self._limit,
        )
        in_same_pass = self._fed_epoch == self._epoch
        self._fetcher.start(requests, *key, self._position.window, in_same_pass=in_same_pass)
        self._fed_rule, self._fed_epoch = rule, self._epoch

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
    def max_micro_batch(self) -> int | None:
        """Cap on the samples of one pass."""
        return self._max_micro_batch

    @max_micro_batch.setter
    def max_micro_batch(self, samples: int | None) -> None:
        self._max_micro_batch = samples
        self._check_arguments()
        self._fed_rule = None

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
        self._shares = self._whole(shares)

    def begin_again(self, shares: Iterable[int]) -> None:
        """Go back to the first micro-batch of the window in hand, cut anew by ``shares``, which then stay.

        The window in hand is that of ``current``, also when ``current`` was its last micro-batch. It keeps its number
        of micro-batches (Lightning has counted them) and its samples: only who takes which of them changes. If the new
        shares add up to fewer, the window takes fewer and the others come later in the epoch; the epoch's last window
        keeps its samples even then, so its micro-batches may be bigger than usual (``max_micro_batch`` splits them).
        If they add up to more, that begins with the next window.

        All live members must call it for the same window, each after at least one micro-batch of it. A process that
        joins takes a ``state_dict`` made after the call. Before the first micro-batch of an epoch it does what
        ``reshare`` does. What was prefetched is dropped; a sample loaded again meets the same random numbers.

        Raises:
            ConfigError: for shares that cannot be, or for another number of replicas.
        """
        self._shares = self._whole(shares)
        position, window = (self._position.begin(), self._window) if self._window else self._begun
        if window is None:
            return
        rule, extent = self._rule(), self._order.extent
        # By the window's own shares, as Lightning has counted.
        is_last = count_micro_batches(replace(rule, shares=window.shares), extent, window.stop) == 0
        self._position, self._window = position, cut_again(rule, extent, window, is_last)
        self._fed_rule = None

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; nothing happens if it is the present one."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._to_epoch_start()

    def state_dict(self) -> dict[str, Any]:
        """The position behind the micro-batch last yielded. The same on all replicas; prefetching does not move it."""
        facts = {"seed": self._orders.seed, "epoch": self._epoch, "total": self._order.extent.total}
        return pack_state(facts, self._position, self._window, self._rule())

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
        self._position, window = unpack_state(state)
        self._is_resumed = True
        if window is not None:
            self._resume_in_window(window, state["micro_batches"])

    def _resume_in_window(self, window: Window, micro_batches: int) -> None:
        now, room = self._rule(), self._position.room(self._limit)
        count = window.whole if room is None else min(window.whole, room)
        saved = (len(window.shares), micro_batches, window.count)
        if saved == (len(now.shares), now.micro_batches, count):
            self._window = window
            return
        rank_zero_warn(
            f"The checkpoint lies inside a global batch that was cut for {saved[0]} replicas and {saved[2]} of "
            f"{saved[1]} micro-batches, not {len(now.shares)} and {max(count, 0)} of {now.micro_batches}: this global "
            "batch is begun again."
        )
        self._position = self._position.begin()

    def _to_epoch_start(self) -> None:
        self._position = Position()
        self._is_resumed = False
        # The window under way keeps its cut whatever the shares do; None between two windows.
        self._window: Window | None = None
        # The window of the micro-batch last yielded, and the position of its start.
        self._begun: tuple[Position, Window | None] = (self._position, None)
        # What the micro-batches being prefetched were cut by.
        self._fed_rule: CutRule | None = None
        self._fed_epoch: int | None = None

    # -- what is cut, and how

    @property
    def _order(self) -> Order:
        return self._orders.of(self._epoch)

    def _rule(self) -> CutRule:
        return CutRule(self._shares, self._count_per_window(), self._drop_last)

    def _count_per_window(self) -> int:
        return self._micro_batches() if callable(self._micro_batches) else self._micro_batches

    def _whole(self, shares: Iterable[int]) -> tuple[int, ...]:
        shares = whole_shares(shares)
        if len(shares) != len(self._shares):
            raise ConfigError(
                f"shares={shares} has {len(shares)} entries, but this loader cuts for {len(self._shares)} replicas: "
                "give one share a replica, 0 for one without members"
            )
        return shares

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
