"""Count a vote anew among the survivors, when nobody of them has passed it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_ntp.engine.record import holdings_of
from lightning_ntp.engine.vote import Ballot, Vote, Wishes
from lightning_ntp.membership.member import Membership
from lightning_ntp.membership.view import View


def count_ballots(
    membership: Membership, ballot: Ballot, view: View, parameters: Sequence[nn.Parameter], stop: bool
) -> Vote:
    """The vote on the step that ``view`` commits. All its members are in this vote, so all count what they hold.

    Each unit is counted once, by the first member that holds it in the layout in which the gradients were computed.

    Raises:
        GenerationOver: if another member died meanwhile.
    """
    # The current holding of the first parameter: between two moves all parameters are at one place.
    places = [holdings_of(view, seat).held[0][0] for seat in view.members]
    me = view.rank(membership.seat)
    square = ballot.square_among(parameters, [(place.degree, place.slot) for place in places], me)
    flags = "".join("01"[flag] for flag in ballot.used(parameters))
    told = membership.exchange("ballot", {"square": square.hex(), "used": flags, "stop": stop})
    total = sum(float.fromhex(answer["square"]) for answer in told.values())
    used = tuple(any(answer["used"][at] == "1" for answer in told.values()) for at in range(len(parameters)))
    return ballot.settle(parameters, Vote(total**0.5, used, Wishes(any(answer["stop"] for answer in told.values()))))
