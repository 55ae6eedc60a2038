"""Plans of chaos runs: what is trained and what goes wrong. A plan follows from its seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial

from lightning_ntp.config import Timeouts
from lightning_ntp.topology import Seat, Topology
from tests.lightning.runs import Scenario
from tests.lightning.survive_runs import Scheduled, Trial, deadly_loader
from tests.support.job import TIMEOUTS
from tests.support.models import ModelConfig

WINDOWS = 13
"""Steps of an epoch."""

EPOCHS = 2

# Six query heads and three KV heads on up to four slots: units are dealt unevenly, and some KV heads have two holders.
MODEL = ModelConfig(width=24, num_heads=6, num_kv_heads=3, bias=True, layers=1)

# As short as a loaded machine allows: who is stopped or stuck is found by these limits alone.
SHORT = Timeouts(
    beat_s=0.1, lease_s=2.5, lease_margin_s=0.5, classify_s=3.5, join_s=5.0, build_s=8.0, hang_s=5.0, slow_hang_s=8.0,
    shutdown_grace_s=2.0, start_s=15.0, collective_s=20.0,
)  # fmt: skip

STUCK_S = 100
"""How long a stuck member sleeps: until it is killed."""

SHORT_OF_STUCK = ("hang", "slow")
CHANNELS = (
    ("tensor_parallel", 24), ("data_parallel", 5), ("reshard", 2), ("replica_control", 2), ("leader_control", 1),
)  # fmt: skip
IN_STEP = ("forward", "forward#2", "backward", "backward#2", "vote", "step", "between")
IN_RECOVERY = (("change", 1), ("agree", 1), ("world", 4), ("control", 2), ("forward", 2), ("replica_control", 1))
AT_START = (("start", 1), ("change", 1), ("outside", 18), ("control", 30), ("world", 16), ("evaluation", 2))
AT_EPOCH_END = (("evaluation", 2), ("outside", 6), ("control", 19), ("between", 1))


@dataclass(frozen=True)
class Plan:
    """What one run does.

    Attributes:
        name: Arguments that repeat it.
        degrees: Of the replicas.
        faults: Of the fault plan, as texts.
        loading: Seats that die while they load data, and at which sample.
        num_workers: DataLoader workers of every member.
        lowest: ``min_tensor_parallel_size``; ``None`` is the default, where thin replicas retire.
        windows: Steps of an epoch, undisturbed.
        shrinks: Whether thinner replicas make the global batch smaller.
    """

    name: str
    degrees: tuple[int, ...]
    faults: tuple[str, ...]
    loading: tuple[tuple[str, int], ...] = ()
    num_workers: int = 0
    lowest: int | None = 1
    windows: int = WINDOWS
    shrinks: bool = False

    @property
    def has_hang(self) -> bool:
        return any(fault.startswith(SHORT_OF_STUCK) for fault in self.faults)

    @property
    def scenario(self) -> Scenario:
        lowest = {} if self.lowest is None else {"min_tensor_parallel_size": self.lowest}
        return replace(
            scenario_of(self.degrees, self.windows),
            data=partial(deadly_loader, victims=self.loading, num_workers=self.num_workers),
            strategy=lowest | ({"global_batch": "shrink"} if self.shrinks else {}),
        )

    @property
    def trial(self) -> Trial:
        limits = SHORT if self.has_hang else TIMEOUTS
        return Trial(self.scenario, ", ".join(self.faults), limits, limit_s=90.0, checkpoints=True)

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.degrees)), *self.faults]
        parts += [f"{seat} dies loading its sample {number}" for seat, number in self.loading]
        parts += ["2 workers"] * bool(self.num_workers) + ["thin replicas retire"] * (self.lowest is None)
        parts += ["shrinks"] * self.shrinks
        return ", ".join(parts)


def scenario_of(degrees: tuple[int, ...], windows: int) -> Scenario:
    """The training, without what goes wrong. The last window of an epoch is a partial one."""
    per_step = 3 * len(degrees) * 2
    return Scenario(
        module=Scheduled,
        degrees=degrees,
        size=(windows - 1) * per_step + 5,
        batch_size=3,
        accumulate=2,
        trainer={"gradient_clip_val": 1.0, "max_epochs": EPOCHS},
        config=MODEL,
    )


def make_plan(seed: int, number: int, windows: int = WINDOWS) -> Plan:
    """Run ``number`` of the runs of ``seed``."""
    draw = random.Random(f"chaos {seed} {number}")
    degrees = draw.choice([(4, 4), (4, 4), (4, 4), (3, 3, 2)])
    return _Draft(draw, degrees, windows).plan(f"--seed {seed} --only {number}")


@dataclass
class _Draft:
    """A plan in the making."""

    draw: random.Random
    degrees: tuple[int, ...]
    windows: int
    faults: list[str] = field(default_factory=list)
    loading: list[tuple[str, int]] = field(default_factory=list)
    victims: list[Seat] = field(default_factory=list)
    _last: tuple[int, str] | None = None  # step and moment of the fault before
    _latest: int = 0  # step of a fault

    def plan(self, name: str) -> Plan:
        for _ in range(self.draw.choice([1, 2, 2, 3])):
            self._add()
        self._add_returns()
        return Plan(
            name,
            self.degrees,
            tuple(self.faults),
            tuple(self.loading),
            2 if self.draw.random() < 0.25 else 0,
            None if self.draw.random() < 0.25 else 1,
            self.windows,
            self.draw.random() < 0.15,
        )

    def _add(self) -> None:
        kinds = ["kill", "replica", "hang", "slow", "raise", "load", "drain"]
        kind = self.draw.choices(kinds, [66, 6, 6, 6, 8, 5, 3])[0]
        free = [seat for seat in Topology.start(self.degrees).members if seat not in self.victims]
        seat = min(free) if self.draw.random() < 0.2 else self.draw.choice(free)
        others = [other for other in free if other.replica != seat.replica]
        if kind == "replica" and not others:
            kind = "kill"
        if kind == "load":
            self.loading.append((str(seat), self.draw.randrange(1, 3 * 2 * self.windows)))
        else:
            step, moment = self._when(kind)
            if moment == "leader_control":  # only the first slot of a replica comes by
                seat = next((other for other in free if other.index == 0), seat)
            where = f"r{seat.replica}" if kind == "replica" else str(seat)
            word = "kill" if kind == "replica" else kind
            self.faults.append(f"{word} {where}@{step}:{moment}" + (f" {STUCK_S}s" if kind == "slow" else ""))
            self._last, self._latest = (step, moment), max(step, self._latest)
        if kind != "raise":
            self.victims += [other for other in free if kind == "replica" and other.replica == seat.replica] or [seat]

    def _when(self, kind: str) -> tuple[int, str]:
        chance = self.draw.random()
        if kind == "drain":
            return self._step(), "forward"
        if kind == "raise":
            return self._step(), self._counted(CHANNELS)
        if self._last is not None and chance < 0.35:  # during the recovery from the fault before
            return self._last[0], self._counted(IN_RECOVERY)
        if self._last is not None and chance < 0.5:  # at the same moment
            return self._last
        if self.draw.random() < 0.2:
            return 0, self._counted(AT_START)
        if self.draw.random() < 0.25:
            return self.draw.randrange(1, EPOCHS + 1) * self.windows - 1, self._counted(AT_EPOCH_END)
        return self._step(), self.draw.choice(IN_STEP) if self.draw.random() < 0.5 else self._counted(CHANNELS)

    def _step(self) -> int:
        return self.draw.randrange(EPOCHS * self.windows - 1)

    def _counted(self, moments: tuple[tuple[str, int], ...]) -> str:
        name, most = self.draw.choice(moments)
        count = self.draw.randint(1, most)
        return name if count == 1 else f"{name}#{count}"

    def _add_returns(self) -> None:
        if not self.victims or self.draw.random() > 0.4:
            return
        step = self._latest + self.draw.randint(1, 5)
        for seat in self.draw.sample(self.victims, min(len(self.victims), self.draw.choice([1, 1, 2, 4]))):
            self.faults.append(f"return {seat}@{step}")
