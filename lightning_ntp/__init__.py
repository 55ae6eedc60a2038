"""Nonuniform tensor parallelism for PyTorch Lightning: replicas of unequal tensor-parallel degree train as one.

Importing this package registers the strategy ``"ntp"``:

    >>> import lightning_ntp
    >>> trainer = lightning.pytorch.Trainer(devices=7, strategy=lightning_ntp.NTPStrategy(degrees=[4, 3]))
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_ntp.__about__ import __version__
from lightning_ntp.config import Timeouts
from lightning_ntp.engine.events import FailureEvent, ViewEvent
from lightning_ntp.errors import NTPError
from lightning_ntp.faults import FaultPlan
from lightning_ntp.parallel import ParallelPlan, vocab_parallel_cross_entropy
from lightning_ntp.strategies.goodput_monitor import GoodputMonitor
from lightning_ntp.strategies.trainer import NTPStrategy

NTPStrategy.register_strategies(StrategyRegistry)

__all__ = [
    "FailureEvent",
    "FaultPlan",
    "GoodputMonitor",
    "NTPError",
    "NTPStrategy",
    "ParallelPlan",
    "Timeouts",
    "ViewEvent",
    "__version__",
    "vocab_parallel_cross_entropy",
]
