"""Exit codes by which a member says why it ended itself."""

from __future__ import annotations

from enum import IntEnum

from lightning_ntp.errors import Fenced, JobFailed, MemberLost, ShardsLost


class ExitCode(IntEnum):
    """Codes outside the ranges of Python (1, 2), of shells (126 and up) and of sysexits (64 to 78)."""

    LEASE_EXPIRED = 80  # no acknowledged sign of life within the lease: the others take it for dead, so it must be
    FENCED = 81  # the others went on without it
    STORE_LOST = 82  # the store's host is gone, and with it the job
    SHARDS_LOST = 83  # no live member holds some part of the model
    JOB_FAILED = 84  # another member ended the job
    DRAINED = 85  # it has handed its part over, as it was asked to
    MEMBER_LOST = 86  # its device failed


MEANINGS = {
    ExitCode.LEASE_EXPIRED: "its lease expired: no sign of life was acknowledged in time",
    ExitCode.FENCED: "it was fenced: the others had gone on without it",
    ExitCode.STORE_LOST: "the job's store was gone",
    ExitCode.SHARDS_LOST: "part of the model was held by no live member",
    ExitCode.JOB_FAILED: "another member had ended the job",
    ExitCode.MEMBER_LOST: "its device failed",
    ExitCode.DRAINED: "it was drained, and had handed its part over",
}

_BY_ERROR = {
    Fenced: ExitCode.FENCED,
    ShardsLost: ExitCode.SHARDS_LOST,
    MemberLost: ExitCode.MEMBER_LOST,
    JobFailed: ExitCode.JOB_FAILED,
}


def exit_code_of(error: BaseException) -> int:
    """The code that a process ends with because of ``error``: 1, as Python's own, for anything that has no code."""
    return int(next((code for kind, code in _BY_ERROR.items() if isinstance(error, kind)), 1))
