"""What can go wrong, as exceptions a user can tell apart.

Every message names the argument, its value and the way out. Wrong input is a ``ValueError`` too, so that code which
catches the standard exception keeps working; a broken invariant of our own is an ``AssertionError``.
"""

from __future__ import annotations


class NTPError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(NTPError, ValueError):
    """An argument of the strategy, the launcher or the command line has a value that cannot work."""


class LayoutError(NTPError, ValueError):
    """Units, degrees or slots that no layout has."""


class PlanError(NTPError, ValueError):
    """A parallel plan that does not fit the model: unknown pattern, unknown head count, hard-coded shape."""


class DataError(NTPError, ValueError):
    """A data loader that cannot be cut into shares without losing or repeating samples."""


class UnsupportedError(NTPError, TypeError):
    """A feature of torch or Lightning that does not work together with nonuniform tensor parallelism."""


class LaunchError(NTPError, RuntimeError):
    """The members of a job could not be started from here (a notebook, a REPL, ``python -c``)."""


class CheckpointError(NTPError, RuntimeError):
    """A saved file that does not fit the model, or could not be written whole."""


class HardwareError(NTPError, RuntimeError):
    """A device or its driver that could not be asked, or did not do what it was told."""


class MembershipError(NTPError, RuntimeError):
    """Members could not agree on a view, or the job's store said something that must not be."""


class GenerationOver(MembershipError):
    """This generation has ended: a member is gone. Raised by collectives, so that the caller leaves and agrees anew."""


class Fenced(MembershipError):
    """The others went on without this member (it was silent for too long): it must end, and may come back as a
    joiner."""


class MemberLost(MembershipError):
    """This member's device failed for good: its process ends, and the others go on without it."""


class ShardsLost(MembershipError):
    """No live member holds some part of the model; every survivor says so alike."""


class Drained(SystemExit):
    """This member has handed over its part and ends. No failure: it passes through user code as ``sys.exit`` does."""


class JobFailed(MembershipError):
    """The job has ended for a reason that no recovery mends, such as an exception in the user's code on some member."""
