"""Modules on unequal shards, and the plan that says which modules of a model they replace."""

from lightning_ntp.parallel.apply import parallelize, refuse_distributed
from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_ntp.parallel.model import ParallelModel, ParallelParameter
from lightning_ntp.parallel.plan import ParallelPlan
from lightning_ntp.parallel.regions import check_partial_grads
from lightning_ntp.parallel.styles import parse_style
from lightning_ntp.parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "ParallelModel",
    "ParallelParameter",
    "ParallelPlan",
    "RowParallelLinear",
    "TensorParallelContext",
    "VocabParallelEmbedding",
    "check_partial_grads",
    "parallelize",
    "parse_style",
    "refuse_distributed",
    "vocab_parallel_cross_entropy",
]
