"""Token batches in which sample i is a function of i: whoever holds the ids knows the data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.support.models import IGNORE_INDEX

VOCAB = 101
LENGTH = 8


def sample(index: int, vocab: int = VOCAB, length: int = LENGTH) -> Tensor:
    """Tokens of sample ``index``: (length,), int64."""
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(7919 * index + 1))


def sample_length(index: int, length: int = LENGTH) -> int:
    """How many tokens of sample ``index`` are real in a padded batch: 2..length, so at least one is predicted."""
    return 2 + (index * 5 + 3) % (length - 1)


def batch(ids: Sequence[int], vocab: int = VOCAB, length: int = LENGTH) -> Tensor:
    """Tokens of the samples ``ids``: (len(ids), length), int64; no ids give an empty batch."""
    if not ids:
        return torch.empty(0, length, dtype=torch.int64)
    return torch.stack([sample(index, vocab, length) for index in ids])


def padded_batch(ids: Sequence[int], vocab: int = VOCAB, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Tokens and labels of the samples ``ids``, both (len(ids), length).

    Behind a sample's own length the tokens are 0 and the labels ``IGNORE_INDEX``.
    """
    tokens = batch(ids, vocab, length)
    lengths = torch.tensor([sample_length(index, length) for index in ids], dtype=torch.int64)
    padding = torch.arange(length) >= lengths[:, None]
    return tokens.masked_fill(padding, 0), tokens.masked_fill(padding, IGNORE_INDEX)


class TokenDataset(Dataset):
    """``size`` samples; item i is ``sample(i)``, with its index in front if ``with_index``."""

    def __init__(self, size: int, vocab: int = VOCAB, length: int = LENGTH, with_index: bool = False) -> None:
        self.size = size
        self.vocab = vocab
        self.length = length
        self.with_index = with_index

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor | tuple[int, Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} is outside 0..{self.size - 1}")
        tokens = sample(index, self.vocab, self.length)
        return (index, tokens) if self.with_index else tokens
