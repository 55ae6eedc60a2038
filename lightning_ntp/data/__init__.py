"""Data for replicas of unequal speed: the order of an epoch, its cut by shares, and the loaders that yield it.

Start with ``prepare_train_loader`` and ``prepare_evaluation_loader``; what they return says of every item, in
``current``, how much it counts.
"""

from __future__ import annotations

from lightning_ntp.data.batch import MicroBatch
from lightning_ntp.data.evaluation import EvaluationLoader
from lightning_ntp.data.evaluation_stream import EvaluationStreamLoader
from lightning_ntp.data.loader import ShareLoader
from lightning_ntp.data.order import nominal_batch_size
from lightning_ntp.data.prepare import prepare_evaluation_loader, prepare_train_loader
from lightning_ntp.data.stream import StreamLoader

__all__ = [
    "EvaluationLoader",
    "EvaluationStreamLoader",
    "MicroBatch",
    "ShareLoader",
    "StreamLoader",
    "nominal_batch_size",
    "prepare_evaluation_loader",
    "prepare_train_loader",
]
