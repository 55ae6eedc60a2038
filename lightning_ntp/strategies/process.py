"""This process's place in its job: one member, however many Trainers the script makes one after the other."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_ntp.comm.progress import Progress
from lightning_ntp.comm.rendezvous import INCARNATION_VARIABLE, SEAT_VARIABLE, TOKEN_VARIABLE, connect_store, join_world
from lightning_ntp.config import NTPConfig
from lightning_ntp.engine import Member
from lightning_ntp.engine.events import Observer, ViewEvent
from lightning_ntp.engine.plain import Plain
from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.errors import ConfigError, Drained, Fenced, JobFailed, MemberLost, NTPError, ShardsLost
from lightning_ntp.faults import Fault, FaultActions, FaultPlan, Injector
from lightning_ntp.hardware.xids import XidPolicy
from lightning_ntp.membership.exits import ExitCode, exit_code_of
from lightning_ntp.membership.founding import Founding, Respawn
from lightning_ntp.membership.member import Membership
from lightning_ntp.membership.parse import parse_seat
from lightning_ntp.membership.store import JobStore
from lightning_ntp.membership.view import View
from lightning_ntp.strategies.device_watch import DeviceWatch
from lightning_ntp.topology import Seat, Topology

log = logging.getLogger(__name__)

_OTHERS_KNOW = (Drained, Fenced, JobFailed, MemberLost, ShardsLost)  # or find out, from the end of this process


class ProcessMember:
    """Holds the member that this process is.

    A process is one member of one job by its nature: its seat, its lease and torch's default group belong to the
    process, not to a Trainer. So they are kept here, for the next Trainer of the script.
    """

    current: Survivor | None = None


class RankZero(Observer):
    """Lets Lightning's rank-zero functions follow the leader; an observer of the engine, for the process's life."""

    def __init__(self, survivor: Survivor) -> None:
        self._survivor = survivor
        self.set()

    def set(self) -> None:
        topology = self._survivor.topology
        rank_zero_only.rank = topology.leader_first(topology.members.index(self._survivor.membership.seat))

    def on_change(self, event: ViewEvent) -> None:
        """Not before: the old view's leader is gone, but its members finish their step as they are."""
        self.set()


class PlannedReturns:
    """Lets the leader ask for the processes that a fault plan brings back."""

    def __init__(self, survivor: Survivor, faults: Sequence[Fault]) -> None:
        self._survivor, self._waiting = survivor, list(faults)

    def __call__(self, step: int) -> None:
        due = [fault for fault in self._waiting if step >= fault.step]
        self._waiting = [fault for fault in self._waiting if step < fault.step]
        seats = [seat for seat in self._survivor.founding.members if any(fault.covers(seat) for fault in due)]
        for seat in seats if self._survivor.is_leader else ():
            self._survivor.membership.ask_return(seat)


def is_watched(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher of ours has started this process and looks after it, so that the job can outlive a death."""
    return INCARNATION_VARIABLE in env  # a token alone may have been exported for a job of several machines


def join_plainly(config: NTPConfig, topology: Topology, rank: int, device: torch.device, backend: str) -> Plain:
    """A member of a job without recovery. Every Trainer of a script has channels of its own on the same processes.

    Args:
        config: Of the strategy.
        topology: Who sits where.
        rank: This process's.
        device: Where its tensors live.
        backend: Of the groups that carry them.
    """
    timeouts = config.timeouts
    join_world(
        backend,
        lambda: connect_store(timeout_s=timeouts.start_s),
        rank,
        topology.world_size,
        timeout_s=timeouts.collective_s,
        device=device,
    )
    member = Member(
        topology,
        rank,
        device=device,
        backend=backend,
        lowest_degree=config.lowest_degree(topology.nominal_degree, topology.degrees),
        timeout=timedelta(seconds=timeouts.collective_s),
    )
    return Plain(member)


def founding_of(config: NTPConfig, topology: Topology) -> Founding:
    """What the job is, by the arguments of a strategy."""
    return Founding(topology, config.timeouts, Respawn(mode=config.respawn))


def join_job(config: NTPConfig, topology: Topology, rank: int, device: torch.device, backend: str) -> Survivor:
    """This process's member of its job; it joins on the first call.

    Args:
        config: Of the strategy.
        topology: The job's founding topology, by the strategy's arguments.
        rank: The rank that the launcher gave.
        device: Where its tensors live.
        backend: Of the groups that carry them.

    Raises:
        ConfigError: if a later Trainer asks for other degrees.
    """
    survivor = ProcessMember.current
    if survivor is not None:
        _check_same(survivor, topology)
        return survivor
    token, seat = os.environ[TOKEN_VARIABLE], _seat(topology, rank)
    incarnation = int(os.environ.get(INCARNATION_VARIABLE, "0"))
    timeouts, progress = config.timeouts, Progress()
    plan = FaultPlan.from_env()
    if faults := plan.at_seat(seat, incarnation):
        actions = FaultActions(lambda: _drain(survivor), lambda: _flip(survivor), lambda: _drop(store))
        progress.on_moment = Injector(faults, actions).at
    store = JobStore(lambda: connect_store(timeout_s=timeouts.start_s), token)
    if not incarnation:
        store.check_version(timeouts.start_s)
        founding_of(config, topology).declare(store)
    lowest = config.lowest_degree(topology.nominal_degree, topology.degrees)
    membership = Membership(
        store,
        seat,
        None if incarnation else View.founding(topology),
        incarnation=incarnation,
        timeouts=timeouts,
        progress=progress,
        lowest_degree=lowest,
    )
    survivor = Survivor(
        membership,
        connect_store(timeout_s=timeouts.start_s),
        device=device,
        backend=backend,
        lowest_degree=lowest,
        founding=topology,
        joins=incarnation > 0,
    )
    if plan.returns():
        survivor.before_step.append(PlannedReturns(survivor, plan.returns()))
    sys.excepthook = _briefly(sys.excepthook)
    survivor.join()
    survivor.observers.append(RankZero(survivor))
    DeviceWatch(survivor, device, config.detectors, XidPolicy(config.xid_policy), _end_lost)
    ProcessMember.current = survivor
    atexit.register(_end, survivor)
    return survivor


def _seat(topology: Topology, rank: int) -> Seat:
    name = os.environ.get(SEAT_VARIABLE)
    if name:
        return parse_seat(name)
    if rank >= topology.world_size:
        raise ConfigError(
            f"rank {rank} is outside the {topology.world_size} members that the Trainer's arguments ask for"
        )
    return topology.members[rank]


def _check_same(survivor: Survivor, topology: Topology) -> None:
    if survivor.founding != topology:
        raise ConfigError(
            f"degrees={list(topology.degrees)}: this process is a member of a job with degrees "
            f"{list(survivor.founding.degrees)} already: use the same sizes in every Trainer of a script"
        )


def end_job(survivor: Survivor, error: BaseException) -> None:
    """Tell all members that this one's own error ends the job, unless they know or say the same.

    So do an interrupt and ``sys.exit`` with a code: nobody could go on with a member that has gone from within a step.
    """
    if survivor.is_alone:
        return  # a joiner, or one that has left: the others go on without it
    if isinstance(error, _OTHERS_KNOW) or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return
    is_interrupt = isinstance(error, KeyboardInterrupt)  # where it came is of no interest
    told = traceback.format_exception_only(error) if is_interrupt else traceback.format_exception(error)
    try:
        survivor.membership.fail("".join(told))
    except RuntimeError as lost:  # it must not hide the error itself
        log.warning("the others could not be told of an error: %s", str(lost)[:200])


def _briefly(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``sys.excepthook``: what another member has ended is told in a line, as the traceback is that one's."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, JobFailed):
            print(f"{kind.__name__}: {error}", file=sys.stderr)
        else:
            hook(kind, error, trace)

    return excepthook


def _drain(survivor: Survivor) -> None:
    survivor.wants_to_leave = True


def _flip(survivor: Survivor) -> None:
    """Change the lowest bit of one weight, as a faulty memory cell would."""
    weights = next(param.parameter for param in survivor.member.model.parameters() if param.parameter.numel())
    weights.data.view(torch.uint8).flatten()[0] ^= 1


def _drop(store: JobStore) -> None:
    """Lose the next message to the store."""
    vars(store)["put"] = lambda *message: vars(store).pop("put") and None


def _end(survivor: Survivor) -> None:
    """At the exit of the process: wait until the others are done, too, or say what went wrong."""
    if survivor.has_left:
        _exit(int(ExitCode.DRAINED))
    if survivor.membership.has_failed:  # and Python has a code for it
        survivor.membership.close()
        return
    error = getattr(sys, "last_value", None)
    if error is None:
        try:
            survivor.finish()
            return
        except NTPError as late:
            print(f"{type(late).__name__}: {late}", file=sys.stderr)
            error = late
    else:
        end_job(survivor, error)
    survivor.membership.close()
    code = exit_code_of(error)
    if code != 1:
        _exit(code)


def _end_lost() -> None:
    _exit(int(ExitCode.MEMBER_LOST))


def _exit(code: int) -> None:
    """End with a code of our own, as Python at this point would not let us choose it: the launcher reads it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
