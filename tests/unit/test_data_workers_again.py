"""A window that is begun again is loaded by the workers that are there."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ntp.data import ShareLoader


class Tagged(Dataset):
    """(index, process that loaded it)."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getpid()])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_stay_and_no_sample_of_before_comes_back(num_workers):
    inner = DataLoader(Tagged(), batch_size=2, num_workers=num_workers)
    loader = ShareLoader(inner, replica=0, shares=(4, 4), seed=0, micro_batches=2)
    iter(loader)
    before = [next(loader) for _ in range(3)]
    loader.begin_again((8, 0))
    after = [next(loader) for _ in range(4)]
    assert torch.cat(after)[:, 0].tolist() == list(range(8, 24))
    processes = [set(batch[:, 1].tolist() if hasattr(batch, "tolist") else ()) for batch in (*before, *after)]
    assert set().union(*processes[3:]) <= set().union(*processes[:3])


def test_the_last_window_can_be_begun_again(num_workers=2):
    inner = DataLoader(Tagged(), batch_size=2, num_workers=num_workers)
    loader = ShareLoader(inner, replica=1, shares=(4, 4), seed=0, micro_batches=2)
    whole = [batch[:, 0].tolist() for batch in loader]
    iter(loader)
    for _ in range(len(whole)):
        last = next(loader)
    loader.begin_again((4, 4))
    assert [next(loader)[:, 0].tolist() for _ in range(2)] == whole[-2:] and last[:, 0].tolist() == whole[-1]
    with pytest.raises(StopIteration):
        next(loader)
