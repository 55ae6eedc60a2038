"""Parameters and optimizer states between two views."""

from lightning_ntp.reshard.keeper import MoveReport, ShardKeeper
from lightning_ntp.reshard.place import Held, PeerState, Place, held_from_json, held_to_json
from lightning_ntp.reshard.probe import check_elementwise
from lightning_ntp.reshard.schema import check_alike, digest_of

__all__ = [
    "Held",
    "MoveReport",
    "PeerState",
    "Place",
    "ShardKeeper",
    "check_alike",
    "check_elementwise",
    "digest_of",
    "held_from_json",
    "held_to_json",
]
