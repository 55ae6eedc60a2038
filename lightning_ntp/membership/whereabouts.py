"""On which machine each member runs: told by whoever starts it, for the reader and for ``lightning-ntp drain HOST``."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from lightning_ntp.membership.store import JobStore
from lightning_ntp.topology import Seat


def host_key(seat: Seat, incarnation: int) -> str:
    return f"host/{seat}/{incarnation}"


def tell_host(store: JobStore, seat: Seat, incarnation: int) -> None:
    """Say that this machine runs a member."""
    store.put(host_key(seat, incarnation), socket.gethostname())


def hosts_of(store: JobStore, incarnations: Mapping[Seat, int]) -> dict[Seat, str]:
    """Names of the machines that run these members, as far as they are known."""
    names = store.get_all([host_key(seat, number) for seat, number in incarnations.items()])
    return {seat: name for seat, name in zip(incarnations, names, strict=True) if isinstance(name, str)}
