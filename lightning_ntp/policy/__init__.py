"""What replicas of unequal degree do: shares of the batch, boosts, retirements. Pure: no torch, no processes.

The same numbers give the same decision in every process: what is measured comes out of the vote, equal on all members.
"""

from lightning_ntp.policy.shares import check_shares, deal, shares_after, shares_by_degree, whole_shares

__all__ = ["check_shares", "deal", "shares_after", "shares_by_degree", "whole_shares"]
