"""The private parts of torch that this package uses, each behind a check."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_ntp.errors import UnsupportedError


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass that is under way is complete, before ``backward()`` returns.

    Raises:
        UnsupportedError: if this torch has no such hook.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if not hasattr(engine, "queue_callback"):
        raise UnsupportedError(
            f"torch {torch.__version__} has no autograd end-of-backward callback; use a torch in the supported range"
        )
    engine.queue_callback(callback)


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory has been written to in place (not through ``.data``)."""
    return tensor._version


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def total_norm_by(handler: Callable[[list[Tensor], float], Tensor | None]) -> Iterator[None]:
    """Inside, ``torch.nn.utils.clip_grad_norm_`` asks ``handler`` for the norm of the gradients first.

    The function sees local shards only, and its norm would be silently wrong. It looks the norm up in its module each
    time, so it is answered however the user imported it.

    Args:
        handler: Takes the gradients and the kind of norm; returns the norm, or ``None`` for gradients of others.

    Raises:
        UnsupportedError: if this torch computes the norm elsewhere.
    """
    from torch.nn.utils import clip_grad

    original = getattr(clip_grad, "_get_total_norm", None)
    if original is None:
        raise UnsupportedError(
            f"torch {torch.__version__} computes the gradient norm elsewhere; use a torch in the supported range"
        )

    def total_norm(tensors, norm_type=2.0, *args, **kwargs):
        grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        answer = handler(grads, float(norm_type))
        return original(grads, norm_type, *args, **kwargs) if answer is None else answer

    clip_grad._get_total_norm = total_norm
    try:
        yield
    finally:
        clip_grad._get_total_norm = original


def name_groups_from(number: int) -> None:
    """Name the next process groups ``number``, ``number + 1``, ...; members count alike, or they never meet.

    Torch names groups by a counter that a failed construction leaves advanced, and that restarts when all groups are
    destroyed, so that an old mesh would silently resolve to a new group of the same name.

    Raises:
        UnsupportedError: if this torch names groups otherwise.
    """
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    if not isinstance(getattr(world, "group_count", None), int):
        raise UnsupportedError(
            f"torch {torch.__version__} has no counter of process groups; use a torch in the supported range"
        )
    world.group_count = number


def gloo_group(store, rank: int, size: int, timeout):
    """A bare gloo backend, outside torch's registry of groups. Blocks until all members are connected.

    Raises:
        UnsupportedError: if this torch was built without gloo.
    """
    build = getattr(torch.distributed.distributed_c10d, "ProcessGroupGloo", None)
    if build is None:
        raise UnsupportedError(f"torch {torch.__version__} was built without gloo, which recovery on CPU needs")
    return build(store, rank, size, timeout=timeout)


def set_backend_timeout(backend, timeout) -> None:
    """Change the time limit of later collectives of a backend.

    Raises:
        UnsupportedError: if this torch cannot.
    """
    if not hasattr(backend, "_set_default_timeout"):
        raise UnsupportedError(f"torch {torch.__version__} cannot change the timeout of a process group")
    backend._set_default_timeout(timeout)


def register_backend(name: str, create: Callable) -> None:
    """Make ``backend=name`` of ``init_process_group`` and ``new_group`` call ``create(options, pg_options)`` (CPU).

    Raises:
        UnsupportedError: if this torch has no such registry.
    """
    backend = torch.distributed.Backend
    if not hasattr(backend, "register_backend"):
        raise UnsupportedError(f"torch {torch.__version__} cannot register process group backends")
    if not hasattr(backend, name.upper()):
        backend.register_backend(name, create, extended_api=True, devices=["cpu"])


def device_backend(process_group: torch.distributed.ProcessGroup, device_type: str):
    """What carries the tensors of one kind of device in a group, or ``None`` if it has no such backend."""
    if not hasattr(process_group, "_get_backend"):
        raise UnsupportedError(f"torch {torch.__version__} does not show a process group's backends")
    try:
        return process_group._get_backend(torch.device(device_type))
    except RuntimeError:
        return None


def abort_nccl(backends: list) -> None:
    """Abort NCCL communicators together: one after the other, their aborts can wait for each other. Not run.

    Raises:
        UnsupportedError: if they cannot be aborted.
    """
    if not all(hasattr(backends[0], name) for name in ("abort", "_group_start", "_group_end")):
        raise UnsupportedError(f"torch {torch.__version__} cannot abort {type(backends[0]).__name__}")
    backends[0]._group_start()
    try:
        for backend in backends:
            backend.abort()
    finally:
        backends[0]._group_end()


def keep_for_good(*objects: object) -> None:
    """Keep objects from being destroyed, even when the interpreter ends: their destructor would block."""
    for kept in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
