"""Machines as network namespaces: each has a network card, a name, and a cable to one switch. Needs root and iproute2.

Nothing outside is touched: the switch is a bridge in a namespace of its own, and all interfaces are born inside. So
addresses cannot collide with any other, and all is gone with the namespaces.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support import processes
from tests.support.ci import skip_impossible
from tests.support.launched import Launched

_NETWORK = "10.77.0"
_CARD, _BRIDGE = "eth0", "br0"
_NAME = re.compile(r"ntp([0-9]+)-\S+")
_END_S = 5.0


class Machine:
    """One machine.

    Args:
        name: What its programs take for the machine's name.
        namespace: What ``ip netns`` calls it.
        address: Of its network card.
    """

    def __init__(self, name: str, namespace: str, address: str) -> None:
        self.name, self.namespace, self.address = name, namespace, address

    def start(self, job: Launched, *words: str) -> subprocess.Popen:
        """Start Python with these words there, for ``job``. gloo is left to find its interface by itself."""
        env = {name: value for name, value in job.env.items() if name != "GLOO_SOCKET_IFNAME"}
        naming = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'  # in a UTS namespace: here the name stays
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", naming, self.name]
            + [sys.executable, *words],
            env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        job.started.append(process)
        return process

    def kill(self) -> list[int]:
        """SIGKILL all processes at once, as if the power had failed; returns their numbers."""
        killed: list[int] = []
        until = time.monotonic() + _END_S
        while pids := [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]:
            for pid in pids:
                processes.kill(pid)
            killed += pids
            if not any(processes.is_running(pid) for pid in pids) or time.monotonic() > until:
                break
            time.sleep(0.01)
        return killed


class Network:
    """Machines on one switch.

    Attributes:
        machines: By name.
    """

    def __init__(self) -> None:
        self._mark = f"ntp{os.getpid()}-{secrets.token_hex(3)}"
        self._made: list[str] = []
        self.machines: dict[str, Machine] = {}

    def open(self, *names: str) -> None:
        """Build the switch and the machines."""
        self._switch = self._add_namespace("switch")
        _ip("-n", self._switch, "link", "add", "name", _BRIDGE, "type", "bridge")
        _ip("-n", self._switch, "link", "set", "dev", _BRIDGE, "up")
        for name in names:
            self._add(name)

    def _add(self, name: str) -> None:
        namespace, port = self._add_namespace(name), f"to-{name}"
        machine = Machine(name, namespace, f"{_NETWORK}.{len(self.machines) + 1}")
        card = ("peer", "name", _CARD, "netns", namespace)
        _ip("-n", self._switch, "link", "add", "name", port, "type", "veth", *card)
        _ip("-n", self._switch, "link", "set", "dev", port, "master", _BRIDGE, "up")
        _ip("-n", namespace, "addr", "add", f"{machine.address}/24", "dev", _CARD)
        for device in ("lo", _CARD):
            _ip("-n", namespace, "link", "set", "dev", device, "up")
        self.machines[name] = machine

    def cut(self, machine: Machine) -> None:
        """Pull the machine's cable: nothing gets through any more, and no connection is told."""
        _ip("-n", self._switch, "link", "set", "dev", f"to-{machine.name}", "down")

    def close(self) -> None:
        """End what still runs there, and remove everything, whatever else fails."""
        with contextlib.ExitStack() as stack:
            for namespace in self._made:
                stack.callback(_ip, "netns", "delete", namespace)
            for machine in self.machines.values():
                stack.callback(machine.kill)

    def _add_namespace(self, name: str) -> str:
        namespace = f"{self._mark}-{name}"
        _ip("netns", "add", namespace)
        self._made.append(namespace)
        return namespace


@contextlib.contextmanager
def network(*names: str) -> Iterator[Network]:
    """A network of machines of these names; all is ended and removed afterwards.

    Where that cannot be, the test is skipped: by :func:`skip_impossible` if the kernel refuses.
    """
    _check()
    _remove_stale()
    net = Network()
    try:
        net.open(*names)
        yield net
    finally:
        net.close()


def _check() -> None:
    """One of everything that a network needs, in a namespace that is removed at once."""
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("sh", "dash")):
        if shutil.which(program) is None:
            pytest.skip(f"the program {program!r} is missing: install {package}")
    probe = f"ntp{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
    except subprocess.CalledProcessError as error:
        skip_impossible(f"`ip netns add` is refused: {error.stderr.strip()} (root is needed)")
    try:
        _ip("-n", probe, "link", "add", "name", "card0", "type", "veth", "peer", "name", "card1")
        _ip("-n", probe, "link", "add", "name", _BRIDGE, "type", "bridge")
        _ip("netns", "exec", probe, "unshare", "--uts", "sh", "-c", "echo probe > /proc/sys/kernel/hostname")
    except subprocess.CalledProcessError as error:
        skip_impossible(f"`{' '.join(error.cmd)}` is refused: {error.stderr.strip()}")
    finally:
        _ip("netns", "delete", probe)


def _remove_stale() -> None:
    """Remove what a session that was killed has left: its process id, which is gone, stands in the names."""
    for line in _ip("netns", "list").splitlines():
        match = _NAME.match(line)
        if match is not None and not processes.is_running(int(match[1])):
            Machine("", match[0], "").kill()
            _ip("netns", "delete", match[0])


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10).stdout
