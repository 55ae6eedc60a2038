"""What Lightning looks for on a loader, for all loaders that wrap the user's."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lightning_ntp.data.batch import MicroBatch
from lightning_ntp.data.fetch import Fetcher, refuse_unknown_loader


class LoaderWrapper:
    """A loader around the user's DataLoader.

    Args:
        loader: The user's DataLoader.

    Attributes:
        current: Facts about the micro-batch last yielded; None before the first.

    Raises:
        DataError: for a loader whose batches cannot be dealt.
    """

    def __init__(self, loader: DataLoader) -> None:
        refuse_unknown_loader(loader)
        self.current: MicroBatch | None = None
        self._loader = loader
        self._epoch = 0

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def sampler(self) -> LoaderWrapper:
        """Lightning announces the epoch through ``loader.sampler.set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Read ``epoch`` from the next ``iter()`` on."""
        self._epoch = epoch


class FetchingWrapper(LoaderWrapper):
    """A wrapper that chooses the samples itself, over a map-style dataset.

    Args:
        loader: The user's DataLoader.
        replica: Number of this replica.
    """

    def __init__(self, loader: DataLoader, replica: int) -> None:
        super().__init__(loader)
        self._fetcher = Fetcher(loader, replica)

    @property
    def _iterator(self) -> Any:
        """Lightning shuts down the workers of what it finds here, and puts None."""
        return self._fetcher.iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._fetcher.iterator = iterator
