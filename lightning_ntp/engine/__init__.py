"""One step of training and its commit."""

from lightning_ntp.engine.member import Member
from lightning_ntp.engine.vote import Ballot, Vote, clip_by_norm

__all__ = ["Ballot", "Member", "Vote", "clip_by_norm"]
