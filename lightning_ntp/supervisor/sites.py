"""Where a job's store is, as seen by whoever starts members: hosted here, hosted elsewhere, or torchrun's own."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch.distributed import Store, TCPStore

from lightning_ntp.comm.rendezvous import STORE_VARIABLE, connect_store, host_store
from lightning_ntp.errors import LaunchError
from lightning_ntp.supervisor.interfaces import interface_to

_LOOPBACK, _ANY = "127.0.0.1", "0.0.0.0"
_PAUSE_S = 0.2


class StoreSite(Protocol):
    """Where the store is.

    Attributes:
        is_host: Whether it is in this process.
        greets: Whether this process says which protocol the job speaks.
        address: For the reader.
    """

    is_host: bool
    greets: bool

    @property
    def address(self) -> str: ...

    def open(self, timeout_s: float) -> None:
        """Host it, or wait until it is there.

        Raises:
            LaunchError: if that is not possible.
        """

    def connect(self, timeout_s: float) -> Store:
        """A new client."""

    def member_env(self) -> Mapping[str, str]:
        """Variables that lead a member to it."""

    def interface(self) -> str | None:
        """Network interface over which this machine reaches it, if that is known."""


@dataclass
class HostedStore:
    """In this process.

    Attributes:
        host: Address of the interface, or a name of it.
        port: 0 for a free one.
        is_shared: Whether members of other machines have to reach it.
    """

    host: str = _LOOPBACK
    port: int = 0
    is_shared: bool = False
    is_host = greets = True
    _server: TCPStore | None = field(default=None, init=False, repr=False)

    @property
    def address(self) -> str:
        # Other machines are told a better address than "any" by their own --store.
        return f"{_LOOPBACK if self.host == _ANY else self.host}:{self.port}"

    def open(self, timeout_s: float = 0.0) -> None:
        if self.is_shared:
            _refuse_hidden_loopback(self.host)
        try:
            self._server = host_store(self.host, self.port)
        except OSError as error:
            raise LaunchError(
                f"this process cannot host the job's store at {self.host}:{self.port}: {error.strerror or error}. Name "
                "an address of this machine and a free port (--store HOST:PORT); if the store is hosted elsewhere, "
                "pass --no-host-store"
            ) from None
        self.port = self._server.port

    def connect(self, timeout_s: float) -> Store:
        return connect_store(self.member_env(), timeout_s)

    def member_env(self) -> dict[str, str]:
        return _env(self.address)

    def interface(self) -> str | None:
        return None if self.host == _ANY else interface_to(self.host)


@dataclass
class RemoteStore:
    """In another process: node 0's supervisor, or ``lightning-ntp store``."""

    address: str
    is_host = greets = False

    def open(self, timeout_s: float) -> None:
        # Knocked at by ourselves: a TCPStore that waits for its host cannot be interrupted.
        host, _, port = self.address.rpartition(":")
        until = time.monotonic() + timeout_s
        while True:
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise LaunchError(
                        f"no store at {self.address} within {timeout_s:.0f} s ({error}): is the supervisor of node 0, "
                        "or `lightning-ntp store`, up, and is --store the same on all nodes?"
                    ) from None
            time.sleep(_PAUSE_S)

    def connect(self, timeout_s: float) -> Store:
        return connect_store(self.member_env(), timeout_s)

    def member_env(self) -> dict[str, str]:
        return _env(self.address)

    def interface(self) -> str | None:
        return interface_to(self.address.rpartition(":")[0])


@dataclass
class AgentStore:
    """In torchrun's agent. All variables that lead to it are there already, so members inherit them."""

    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    is_host, greets = False, True

    @property
    def address(self) -> str:
        return f"{self.env.get('MASTER_ADDR')}:{self.env.get('MASTER_PORT')}"

    def open(self, timeout_s: float) -> None:
        pass

    def connect(self, timeout_s: float) -> Store:
        return connect_store(self.env, timeout_s)

    def member_env(self) -> dict[str, str]:
        return {}

    def interface(self) -> str | None:
        return None  # torchrun's members are as torchrun sets them up


def _env(address: str) -> dict[str, str]:
    host, _, port = address.rpartition(":")
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        # So that a plain init_process_group() is our store's client too, instead of hosting a second one there.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        STORE_VARIABLE: address,
    }


def _refuse_hidden_loopback(host: str) -> None:
    """A machine's own name often means 127.0.1.1 on it: other machines would find nobody."""
    try:
        ipaddress.ip_address(host)
        return
    except ValueError:
        pass
    try:
        found = socket.gethostbyname(host)
    except OSError:
        return  # told when it is bound
    if host != "localhost" and ipaddress.ip_address(found).is_loopback:
        raise LaunchError(
            f"the store's host {host!r} means {found} on this machine, which other machines cannot reach: give the "
            "address of a network interface"
        )
