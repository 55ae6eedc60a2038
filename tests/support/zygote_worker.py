"""What a process does after the zygote forked it: be the store's host, or be a rank."""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import os
import random
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

import numpy as np
import torch
from torch.distributed import TCPStore

from tests.support import processes
from tests.support.zygote_messages import ERROR, RESULT, RankError, Request, frame, pack, unpack


def host_store(port_pipe: int) -> NoReturn:
    """Host a TCPStore on a free loopback port, write the port into ``port_pipe``, and stay until killed."""
    processes.die_with_parent()
    os.setsid()
    # A listener of our own: the store would otherwise accept connections from every interface.
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.fileno(),
        timeout=datetime.timedelta(seconds=30),
    )
    os.write(port_pipe, str(store.port).encode())
    os.close(port_pipe)
    while True:
        signal.pause()


def be_rank(request: Request, rank: int, store_address: str, result_pipe: int) -> NoReturn:
    """Call the requested function as ``rank``, write its result or its exception into ``result_pipe``, and leave.

    Leaves by ``os._exit``: no destructor of a process group may delay or crash the end of a test.
    """
    _redirect_output(request.directory, rank)
    exit_code, report = 0, b""
    try:
        _settle_in(request, rank, store_address)
        function = _resolve(request.function)
        result = function(rank, request.num_ranks, store_address, *unpack(request.arguments))
        report = frame(RESULT, pack(result))
    except SystemExit as exit_request:
        exit_code = exit_request.code if isinstance(exit_request.code, int) else int(exit_request.code is not None)
    except BaseException as error:
        exit_code, report = 1, frame(ERROR, pack(_describe(error)))
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    _write_all(result_pipe, report)
    os._exit(exit_code)


def environment(rank: int, num_ranks: int, store_address: str) -> dict[str, str]:
    """Environment variables of a rank, as if a launcher on one machine had started it.

    With the two ``TORCHELASTIC`` variables a plain ``init_process_group("gloo")`` takes every rank as a client of the
    store that already exists, instead of letting rank 0 host a second one on the same port.
    """
    host, port = store_address.rsplit(":", 1)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "NTP_STORE": store_address,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _redirect_output(directory: str, rank: int) -> None:
    for descriptor, suffix in ((1, "out"), (2, "err")):
        file = os.open(f"{directory}/rank{rank}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _settle_in(request: Request, rank: int, store_address: str) -> None:
    processes.die_with_parent()
    os.setsid()
    stacks = os.open(f"{request.directory}/rank{rank}.stacks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(stacks)
    # Two ways to a stack: the signal serves a rank that is stopped after a failure elsewhere, but a Trainer that ends
    # resets all signal handlers; the timer needs no signal and serves the time limit.
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    faulthandler.dump_traceback_later(request.timeout_s, file=stacks)
    for name, value in (environment(rank, request.num_ranks, store_address) | request.env).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.chdir(request.cwd)
    sys.path[:] = request.sys_path
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    _set_rank_zero(rank)


def _set_rank_zero(rank: int) -> None:
    # Lightning reads RANK when it is imported, which the zygote did long ago.
    for name in ("lightning.fabric.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
        if name in sys.modules:
            sys.modules[name].rank_zero_only.rank = rank


def _resolve(function: str) -> Any:
    module, _, qualname = function.partition(":")
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _describe(error: BaseException) -> RankError:
    text = "".join(traceback.format_exception(error))
    try:
        packed = pack(error.with_traceback(None))
        unpack(packed)  # an exception whose __init__ wants other arguments packs well and fails only here
    except Exception:
        packed = None
    return RankError(type(error).__qualname__, str(error), text, packed)


def _write_all(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]
