"""The training loader of one replica for an IterableDataset. It has no sample ids to cut by: whole batches are dealt.

Every rank iterates the user's loader in full and takes its replica's batches, so the stream must be the same in every
process: a dataset that splits itself by rank does not belong here. Reading costs as many times one replica's part as
there are live replicas. There is no position to save: a resumed run starts the stream anew.

What a failure costs here. Batches of the window under way are kept (those of this replica, on the host), so a replica
that lives on replays its own. Those of a replica that dies are kept nowhere: its batches of the window under way and of
the next one are lost. (The next one, because with a stream of unknown length Lightning reads one batch ahead, so some
members may have read that window already.) After that the stream is dealt to the live replicas alone and nothing is
lost. A global batch is smaller by the replicas that are missing, whatever ``global_batch`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_ntp.data.batch import MicroBatch
from lightning_ntp.data.stream_reader import StreamReader, read_alike, stream_batch_size
from lightning_ntp.data.wrapper import LoaderWrapper
from lightning_ntp.errors import ConfigError, DataError
from lightning_ntp.policy import whole_shares


@dataclass
class _Window:
    """One window as it was read: this replica's batches.

    Attributes:
        number: Its number in the epoch.
        first: Number of its first micro-batch in the epoch.
        batches: One a micro-batch; where this replica was dealt none, one of another replica's, for a dummy.
        dealt: Replicas that were dealt a batch of every micro-batch.
        counted: Those of them whose batches count.
    """

    number: int
    first: int
    batches: list[Any]
    dealt: tuple[int, ...]
    counted: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + len(self.batches)


@dataclass(frozen=True)
class _Replay:
    """Micro-batches are yielded again up to ``last``; then it goes on with ``then``."""

    window: _Window
    last: int
    then: int


class StreamLoader(LoaderWrapper):
    """Yields every L-th batch of an IterableDataset's loader as the micro-batches of one of L live replicas.

    Of every group of L consecutive batches the j-th live replica takes the j-th. An incomplete last group is dropped,
    with a warning. The size of a batch is taken to be the loader's ``batch_size`` (1 if the dataset makes the batches),
    so all micro-batches weigh the same; ``drop_last=True`` on the user's loader keeps that true to the end.

    The batches of one window are read ahead, so that a window which the stream's end cuts short is weighted right. They
    are kept until the window is past.

    Args:
        loader: The user's DataLoader over an IterableDataset.
        replica: Number of this replica among those that the job was founded with.
        shares: Samples of a global batch that each of these replicas takes: all equal, or 0 for one without members.
        seed: Seed of the run, the same in every process.
        micro_batches: Micro-batches of a window, or a function that returns it; read at every window.
        limit: Micro-batches after which the trainer ends an epoch; None for the whole stream.

    Attributes:
        current: Facts about the micro-batch last yielded; None before the first.

    Raises:
        ConfigError: for shares or a replica that cannot be.
        DataError: for unequal shares above 0.
    """

    def __init__(
        self,
        loader: DataLoader,
        *,
        replica: int,
        shares: Iterable[int],
        seed: int,
        micro_batches: Callable[[], int] | int,
        limit: int | None = None,
    ) -> None:
        super().__init__(loader)
        self.limit = limit
        self._shares = whole_shares(shares)
        if _are_unequal(self._shares):
            raise DataError(
                f"shares={self._shares} are unequal, but the batches of an IterableDataset cannot be cut: use a "
                "map-style dataset, or equal shares (every replica then takes as long as the slowest)"
            )
        if not 0 <= replica < len(self._shares):
            raise ConfigError(f"replica={replica} is outside 0..{len(self._shares) - 1}, by shares={self._shares}")
        self._replica = replica
        self._seed = seed
        self._micro_batches = micro_batches
        self._told: set[str] = set()
        read_alike(loader)
        self._to_epoch_start()

    # -- iteration

    def __len__(self) -> int:
        """Micro-batches yielded in this epoch plus those to come.

        TypeError if the dataset does not know its length, as for a plain DataLoader.
        """
        left, number, end = len(self._loader), self._num_windows, self._end
        if self._reader is not None:
            left = 0 if self._reader.at_end else left - self._reader.num_read
        while number < self._deals[-1][0]:  # dealt otherwise than those behind it
            count, replicas = self._count_per_window(), len(self._dealt(number))
            if left < count * replicas:
                break  # the stream ends in this window
            left, number, end = left - count * replicas, number + 1, end + count
        return end + max(left, 0) // len(self._dealt(number))

    def __iter__(self) -> Iterator[Any]:
        self._to_epoch_start()
        reader = self._open()
        try:
            while True:
                try:
                    batch = next(self)
                except StopIteration:
                    return
                yield batch
        finally:
            reader.close()  # whoever breaks off must not keep workers

    def __next__(self) -> Any:
        if self._next == self._end:
            self._read_window()
        window, number = self._window_of(self._next), self._next
        self.current = self._describe(window, number)
        self._next += 1
        if self._replay is not None and number == self._replay.last:
            self._next, self._replay = self._replay.then, None
        # Lightning may be one batch ahead of the one in use, whose window may have to be begun again.
        self._windows = [window for window in self._windows if window.end >= self._next - 1]
        return window.batches[number - window.first]

    # -- shares and position

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares as they were given last. Only which of them are 0 matters."""
        return self._shares

    def reshare(self, shares: Iterable[int]) -> None:
        """Deal to the replicas with a share above 0 from the next window that is read.

        All live members must call it at the same micro-batch. Unequal shares are taken, with a warning: a run that has
        lost members goes on at equal batches.

        Raises:
            ConfigError: for shares that cannot be, or for another number of replicas.
        """
        self._take(shares)
        self._deal_from(self._num_windows)

    def begin_again(self, shares: Iterable[int], ahead: int = 0) -> None:
        """Go back to the first micro-batch of the window in hand. Batches stay with the replica that has them.

        The window in hand is that of the micro-batch in use. What is yielded now is this window up to the micro-batch
        in use, then whatever would have come next. Batches of a replica whose share is 0 now no longer count; what is
        lost with them, and from when on the others take all, is said at the top of this file.

        Args:
            shares: As for ``reshare``.
            ahead: Micro-batches that were yielded behind the one in use: 1 where Lightning has read ahead, else 0.
                They stay with the reader and are not yielded again. Their facts may have changed: ``look_back``.

        Raises:
            ConfigError: for shares that cannot be, or for another number of replicas.
            DataError: if no replica is left that has batches of the window.
        """
        self._take(shares)
        in_use = self._num_yielded - 1 - ahead
        window = self._replay.window if self._replay else self._window_of(in_use) if in_use >= 0 else None
        self._deal_from((-1 if window is None else window.number) + 2)
        lost: set[int] = set()
        for kept in self._windows:
            if window is None or kept.number >= window.number:
                lost |= set(kept.counted) - set(self._live)
                kept.counted = self._counted(kept.dealt)
        if lost:
            self._warn_once(
                "lost",
                f"The batches of the IterableDataset that replicas {sorted(lost)} had in the present window and the "
                "next one are lost: nobody else has kept them. From then on its batches are dealt to replicas "
                f"{list(self._live)}. A map-style dataset loses nothing.",
            )
        if window is not None:
            self._replay = self._replay or _Replay(window, in_use, self._num_yielded)
            self._next = window.first

    def look_back(self, count: int) -> MicroBatch:
        """Facts about the micro-batch yielded ``count`` before the last one, as they are now; 0 or 1."""
        number = self._num_yielded - 1 - count
        return self._describe(self._window_of(number), number)

    # -- windows

    def _to_epoch_start(self) -> None:
        self._reader: StreamReader | None = None
        self._windows: list[_Window] = []
        self._num_windows = 0  # read so far
        self._end = 0  # micro-batches read so far
        self._next = 0  # number of the micro-batch that is yielded next
        self._replay: _Replay | None = None
        # From which window on the stream is dealt to which replicas.
        self._deals: list[tuple[int, tuple[int, ...]]] = [(0, self._live)]

    def _open(self) -> StreamReader:
        if self._reader is None:
            self._reader = StreamReader(self._loader, self._seed, self._epoch)
        return self._reader

    @property
    def _num_yielded(self) -> int:
        """Micro-batches yielded in this epoch, each counted once."""
        return self._replay.then if self._replay else self._next

    @property
    def _live(self) -> tuple[int, ...]:
        return tuple(replica for replica, share in enumerate(self._shares) if share)

    def _take(self, shares: Iterable[int]) -> None:
        counts = whole_shares(shares)
        if len(counts) != len(self._shares):
            raise ConfigError(
                f"shares={counts} has {len(counts)} entries, but this loader deals to {len(self._shares)} replicas: "
                "give one share a replica, 0 for one without members"
            )
        self._shares = counts
        if _are_unequal(counts):
            self._warn_once(
                "unequal",
                f"shares={counts} are unequal, but the batches of an IterableDataset are not cut: every live replica "
                "takes the same number, so all take as long as the slowest. A map-style dataset would be shared out.",
            )

    def _deal_from(self, number: int) -> None:
        self._deals = [deal for deal in self._deals if deal[0] < number] + [(number, self._live)]

    def _dealt(self, number: int) -> tuple[int, ...]:
        """The replicas to which window ``number`` is dealt."""
        return next((live for start, live in reversed(self._deals) if start <= number), self._deals[0][1])

    def _counted(self, dealt: tuple[int, ...]) -> tuple[int, ...]:
        counted = tuple(replica for replica in dealt if replica in self._live)
        if not counted:
            raise DataError(
                f"the window under way was dealt to replicas {list(dealt)}, and none of them is left: start again from "
                "a checkpoint, or use a map-style dataset, whose samples any replica can load"
            )
        return counted

    def _read_window(self) -> None:
        """Read the next window.

        Raises:
            StopIteration: at the stream's end, or the trainer's limit.
        """
        count = self._count_per_window()
        if self.limit is not None:
            count = min(count, self.limit - self._end)
        dealt = self._dealt(self._num_windows)
        mine = dealt.index(self._replica) if self._replica in dealt else 0
        batches = []
        while len(batches) < count and (group := self._open().read(len(dealt))):
            if len(group) < len(dealt):
                rank_zero_warn(
                    f"The IterableDataset ended with {len(group)} batches for {len(dealt)} replicas: these are "
                    "dropped. Give it a number of batches that the replicas divide to use all."
                )
                break
            batches.append(group[mine])
        if not batches:
            raise StopIteration
        self._windows.append(_Window(self._num_windows, self._end, batches, dealt, self._counted(dealt)))
        self._num_windows += 1
        self._end += len(batches)

    def _count_per_window(self) -> int:
        return self._micro_batches() if callable(self._micro_batches) else self._micro_batches

    def _window_of(self, number: int) -> _Window:
        for window in self._windows:
            if window.first <= number < window.end:
                return window
        raise AssertionError(f"micro-batch {number} of the epoch is not kept")

    def _describe(self, window: _Window, number: int) -> MicroBatch:
        size, count = stream_batch_size(self._loader), len(window.batches)
        own = size if self._replica in window.counted else 0
        total = size * len(window.counted) * count
        return MicroBatch(
            self._epoch, window.number, number - window.first, count, (), own, total, is_dummy=not own, passes=(own,)
        )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            rank_zero_warn(text)


def _are_unequal(shares: tuple[int, ...]) -> bool:
    return len({share for share in shares if share}) > 1
