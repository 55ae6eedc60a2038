"""What the supervisors of one job tell each other, so that the one with the store ends last.

==========================  ===========================================================================
key (under ``ntp/job/``)
==========================  ===========================================================================
``node/{name}/starts``      how many supervisors have been started as this node
``node/{name}/beat``        signs of life of its supervisor: a counter
``node/{name}/end``         it has ended
``guests``                  how many came later: they are ``guest 0``, ``guest 1`` ...; the others are ``0``, ``1`` ...
``failure``                 a member failed before the job was known to be fault tolerant: it ends everywhere
==========================  ===========================================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from lightning_ntp.errors import LaunchError
from lightning_ntp.membership.store import JobStore
from lightning_ntp.supervisor.node import Node

_BEAT_S = 1.0
_FAILURE = "failure"


@dataclass(frozen=True)
class Failure:
    """Why a job that tolerates nothing ends on all its nodes."""

    node: str
    exit_code: int
    text: str


class Nodes:
    """One supervisor among the others of its job.

    Args:
        store: The job's store, for the calling thread.
        node: Which one this is.
        looks: Whether this supervisor looks at the others' signs of life: the store's host, and node 0.
        clock: Monotonic, in seconds; for tests.
    """

    def __init__(self, store: JobStore, node: Node, looks: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._num_nodes, self._clock = store, node.num_nodes, clock
        self._name, self._looks = None if node.index is None else str(node.index), looks
        self._seen: dict[str, tuple[int, float]] = {}
        self._beaten = -_BEAT_S

    def register(self) -> None:
        """Say that this supervisor is there.

        Raises:
            LaunchError: if there has been one with the same number: then the store belongs to another job, or to an
                earlier life of this node.
        """
        if self._name is None:
            self._name = f"guest {self._store.count('guests') - 1}"
        if self._store.count(f"node/{self._name}/starts") > 1:
            raise LaunchError(
                f"node {self._name} of this job was started before: a store serves one job. To come back to a job "
                "that still runs, name the seats: --join r1.s0,r1.s1; for a new job, host a new store"
            )

    def poll(self) -> bool:
        """Give a sign of life, and look at the others', once a second; returns whether it was time."""
        now = self._clock()
        if now - self._beaten < _BEAT_S:
            return False
        self._beaten = now
        self._store.count(f"node/{self._name}/beat")
        for other in self._others() if self._looks else ():
            beats = self._store.count(f"node/{other}/beat", 0)
            if beats != self._seen.get(other, (-1, 0.0))[0]:
                self._seen[other] = (beats, now)
        return True

    def running(self) -> list[str]:
        """Others that have been started and have not said that they end."""
        return [other for other in self._others() if not self._store.has([f"node/{other}/end"])]

    def silent(self, limit_s: float) -> set[str]:
        """Others whose last sign of life is older than ``limit_s`` seconds, though they have not ended."""
        old = {other for other, (_, at) in self._seen.items() if self._clock() - at > limit_s}
        return old & set(self.running()) if old else old

    def fail(self, exit_code: int, text: str) -> None:
        """End the job on all nodes; the first failure counts."""
        self._store.decide(_FAILURE, {"node": self._name, "exit_code": exit_code, "text": text})

    def failure(self) -> Failure | None:
        """Why the job ends on all nodes, if it does; of another node."""
        body = self._store.get(_FAILURE) if self._store.has([_FAILURE]) else None
        if body is None or body["node"] == self._name:
            return None
        return Failure(**body)

    def end(self) -> None:
        """Say that this supervisor ends: it makes no more use of the store."""
        self._store.decide(f"node/{self._name}/end", True)

    def _others(self) -> list[str]:
        count = self._store.count
        guests = [f"guest {number}" for number in range(count("guests", 0))]
        names = [*map(str, range(self._num_nodes)), *guests]
        return [name for name in names if name != self._name and count(f"node/{name}/starts", 0)]
