"""Layout algebra: which units of a parameter each slot holds at every degree, and what travels between two layouts.

Pure: nothing in this package knows of torch or of processes.
"""

from lightning_ntp.layout.buckets import BucketCut, BucketKind, ParameterSize, cut_buckets
from lightning_ntp.layout.family import Family, Layout, LayoutFamily
from lightning_ntp.layout.grouped import GroupedFamily
from lightning_ntp.layout.shard import ParameterLayout, Piece, Replicated, Segment, Sharded, merge_rows
from lightning_ntp.layout.sync_plan import Entry, Move, Moves, SlotSync, SyncPlan, plan_sync
from lightning_ntp.layout.transfer import Holder, Slice, Transfer, plan_transfer
from lightning_ntp.layout.units import auto_block, block_units, even_units

__all__ = [
    "BucketCut",
    "BucketKind",
    "Entry",
    "Family",
    "GroupedFamily",
    "Holder",
    "Layout",
    "LayoutFamily",
    "Move",
    "Moves",
    "ParameterLayout",
    "ParameterSize",
    "Piece",
    "Replicated",
    "Segment",
    "Sharded",
    "Slice",
    "SlotSync",
    "SyncPlan",
    "Transfer",
    "auto_block",
    "block_units",
    "cut_buckets",
    "even_units",
    "merge_rows",
    "plan_sync",
    "plan_transfer",
]
