"""A member (torch only) that reads on from a DataLoader with two workers, and touches DIRECTORY/RANK once it does."""

import os
import pathlib
import sys

import torch
from torch.utils.data import DataLoader, IterableDataset


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(1)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")  # from the environment alone, as any torch script does
    for _ in DataLoader(Endless(), num_workers=2):
        pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
