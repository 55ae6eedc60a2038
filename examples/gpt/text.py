"""Real text that every machine has: the source of Python's own standard library, as bytes.

The files, their order and the split depend on the interpreter's version alone, so every process of a job reads the
same text, and nothing is downloaded.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCAB_SIZE = 256

# Third-party code, tests and generated tables are not the text we mean; build files differ between machines.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize")


def source_files(root: Path) -> Iterator[Path]:
    """The ``.py`` files below ``root`` that count as text, each folder in sorted order."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        yield from (
            Path(folder, name)
            for name in sorted(names)
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES)
        )


def read_text(max_bytes: int, path: Path | None = None) -> bytes:
    """At most ``max_bytes`` bytes of text: of the file ``path``, or of the standard library.

    Raises:
        ValueError: if the interpreter has no standard library source on disk (a zipped installation).
    """
    if path is not None:
        return path.read_bytes()[:max_bytes]
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in source_files(root):
        text += file.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise ValueError(f"no .py files below {root}: name a text file of your own with --text FILE")
    return bytes(text[:max_bytes])


class ByteChunks(Dataset[Tensor]):
    """Text cut into pieces of ``seq_len + 1`` bytes: the inputs are all but the last, the targets all but the first.

    Pieces overlap by the one byte that is the last target of one and the first input of the next.

    Raises:
        ValueError: if the text is too short for one piece.
    """

    def __init__(self, text: bytes, seq_len: int) -> None:
        if len(text) <= seq_len:
            raise ValueError(
                f"{len(text)} bytes of text are too few for seq_len={seq_len}: give more, or a smaller seq_len"
            )
        self.seq_len = seq_len
        # torch wants a buffer it may write to; a bytearray is one.
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self.seq_len

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"piece {index} is outside 0..{len(self) - 1}")
        start = index * self.seq_len
        return self._bytes[start : start + self.seq_len + 1].long()


def split(text: bytes, seq_len: int, validation: float = 0.05) -> tuple[ByteChunks, ByteChunks]:
    """Training and validation pieces; validation is the tail of the text, so the two share no file but one."""
    cut = int(len(text) * (1 - validation))
    return ByteChunks(text[:cut], seq_len), ByteChunks(text[cut:], seq_len)
