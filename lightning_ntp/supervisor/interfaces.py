"""The network interface that leads to the job's store: members of several machines meet over the same one.

Left to itself, gloo listens at the address that the machine's own name stands for. On many machines that is a loopback
address (127.0.1.1), at which no other machine finds it, or there is none.
"""

from __future__ import annotations

import fcntl
import socket
import struct

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
"""torch's name for the interface that gloo uses."""

_SIOCGIFADDR = 0x8915
_LONGEST_NAME = 15


def interface_to(host: str) -> str | None:
    """Name of the interface over which this machine reaches ``host``; ``None`` if there is none that gloo could find.

    gloo takes an interface's first address, so an interface counts only if the way to ``host`` begins there.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # finds the way; nothing is sent
            address = probe.getsockname()[0]
            return next((name for _, name in socket.if_nameindex() if _first_address(probe, name) == address), None)
    except OSError:
        return None


def _first_address(any_socket: socket.socket, name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:_LONGEST_NAME])
    try:
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:  # it has none
        return None
