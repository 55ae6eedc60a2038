"""Who leaves a view of its own accord, and what is left of the view then."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from lightning_ntp.engine.record import holdings_of
from lightning_ntp.membership.view import View, reseat
from lightning_ntp.topology import Seat

log = logging.getLogger(__name__)


def leavers(view: View, asked: Sequence[int], lowest_degree: int) -> list[Seat]:
    """Members that leave now: the same on all members, as it follows from the vote and the view.

    Args:
        view: The present one.
        asked: Ranks that asked to leave.
        lowest_degree: Replicas below it leave, while another is not; so do those without memory at their degree.

    Returns:
        Their seats; none if nobody would stay.
    """
    short = {seat.replica for seat in view.members if holdings_of(view, seat).gives_up}
    leaving = [seat for rank, seat in enumerate(view.members) if rank in asked or seat.replica in short]
    stay = [[seat for seat in replica if seat not in leaving] for replica in view.seats]
    if any(len(replica) >= lowest_degree for replica in stay):
        leaving += [seat for replica in stay if len(replica) < lowest_degree for seat in replica]
    if len(leaving) == len(view.members):
        log.error("all members would leave: none does, as nobody would have the model")
        return []
    return leaving


def view_without(view: View, leaving: Sequence[Seat]) -> View:
    """The view with the others' slots as they will be once some have left."""
    seats = reseat(view.seats, leaving)
    staying = [seat for replica in seats for seat in replica]
    return replace(
        view,
        seats=seats,
        joined={seat: view.joined[seat] for seat in staying},
        incarnations={seat: view.incarnations[seat] for seat in staying},
    )
