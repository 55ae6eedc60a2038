"""The states of a member, and which may follow which."""

from __future__ import annotations

import threading
from enum import Enum


class State(Enum):
    """What a member does, seen from membership.

    ===========  =============================================================  =============================
    state        meaning                                                        may be followed by
    ===========  =============================================================  =============================
    STARTING     process is up, has said nothing yet                            AGREEING, ENDED
    AGREEING     out of all collectives; waits for the next view                CHANGING, AGREEING, FENCED, ENDED
    CHANGING     has the view: settles the step, opens channels, moves state    RUNNING, LEAVING, ENDED
    RUNNING      trains                                                         LEAVING, AGREEING, FINISHING, ENDED
    LEAVING      the generation is over: breaks its groups, comes out of them   AGREEING, ENDED
    FINISHING    its work is done; stays until all others' is                   DONE, LEAVING, ENDED
    DONE         all have finished                                              ENDED
    FENCED       the others went on without it                                  ENDED
    ENDED        nothing more is said
    ===========  =============================================================  =============================

    RUNNING to AGREEING without LEAVING is a planned change (a joiner waits): nothing is broken. AGREEING to itself is
    the next generation, when the one in agreement has failed.
    """

    STARTING = "starting"
    AGREEING = "agreeing"
    CHANGING = "changing"
    RUNNING = "running"
    LEAVING = "leaving"
    FINISHING = "finishing"
    DONE = "done"
    FENCED = "fenced"
    ENDED = "ended"


EDGES = {
    State.STARTING: (State.AGREEING, State.ENDED),
    State.AGREEING: (State.CHANGING, State.AGREEING, State.FENCED, State.ENDED),
    State.CHANGING: (State.RUNNING, State.LEAVING, State.ENDED),
    State.RUNNING: (State.LEAVING, State.AGREEING, State.FINISHING, State.ENDED),
    State.LEAVING: (State.AGREEING, State.ENDED),
    State.FINISHING: (State.DONE, State.LEAVING, State.ENDED),
    State.DONE: (State.ENDED,),
    State.FENCED: (State.ENDED,),
    State.ENDED: (),
}


class Course:
    """The state of one member, and how it got there.

    Attributes:
        state: Where it is.
        history: The last states, oldest first, for reports.
    """

    def __init__(self, keep: int = 64) -> None:
        self.state = State.STARTING
        self.history: list[State] = [State.STARTING]
        self._keep = keep
        self._lock = threading.Lock()

    def to(self, state: State) -> None:
        """Go on to ``state``. Staying where it is allowed only where the table says so."""
        with self._lock:
            assert state in EDGES[self.state], f"{self.state.name} is never followed by {state.name}"
            self.state = state
            self.history = [*self.history[-self._keep + 1 :], state]
