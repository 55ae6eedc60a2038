"""One step of training and its commit."""

from lightning_ntp.engine.member import Member
from lightning_ntp.engine.vote import Ballot, Vote, clip_by_norm
from lightning_ntp.engine.weights import WindowWeights

__all__ = ["Ballot", "Member", "Vote", "WindowWeights", "clip_by_norm"]
