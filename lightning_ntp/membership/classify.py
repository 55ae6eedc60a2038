"""Whose error is it: a consequence of a lost member, or the user's own?

Gloo reports everything as a plain ``RuntimeError``, with a text that differs from survivor to survivor. So the text is
not looked at: what counts is where the error came from, and what the detectors know.
"""

from __future__ import annotations

from enum import Enum

import torch
import torch.distributed as dist

from lightning_ntp.comm.abort import Abort
from lightning_ntp.comm.progress import Progress
from lightning_ntp.errors import GenerationOver, NTPError


class Verdict(Enum):
    """What an error means."""

    OVER = "over"  # the generation has ended: leave it and agree on a new view
    LOST = "lost"  # this member's device is of no use any more: it ends, and the others go on
    OWN = "own"  # this member's own error: it ends the job


def classify(error: BaseException, abort: Abort, progress: Progress, grace_s: float) -> Verdict:
    """Judge an error that came out of a step.

    ==============================================  ====================================================
    error                                           verdict
    ==============================================  ====================================================
    ``GenerationOver``                              over
    another error of this package                   own
    a device error (CUDA's stay for the process)    lost
    of a kind that collectives never raise          own, at once (a user's ValueError in mid-failure, too)
    out of one of our collectives                   over: its group is of no use any more
    any other plain RuntimeError                    over if news of a death comes within ``grace_s``, else own
    ==============================================  ====================================================

    Args:
        error: What was raised.
        abort: The generation's failure flag, which the watcher sets.
        progress: Knows whether a collective of ours has failed.
        grace_s: How long to wait for news, in seconds.
    """
    if isinstance(error, GenerationOver):
        return Verdict.OVER
    if isinstance(error, NTPError) or not could_be_collective(error):
        return Verdict.LOST if is_device_error(error) else Verdict.OWN
    if progress.failed_in is not None:
        return Verdict.OVER
    return Verdict.OVER if abort.wait(grace_s) else Verdict.OWN


def is_device_error(error: BaseException) -> bool:
    """Whether the device itself failed: such errors are sticky, and every later call of the process fails, too."""
    return isinstance(error, torch.AcceleratorError)


def could_be_collective(error: BaseException) -> bool:
    """Whether collectives raise this type. Subclasses of RuntimeError outside torch.distributed are never theirs."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)
