"""The strategy that Lightning's Trainer uses."""

from __future__ import annotations

import atexit
import datetime
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, Union
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device  # replaced below by compat
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override
