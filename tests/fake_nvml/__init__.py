"""A scripted driver for tests: the real ``pynvml`` runs on a library that ``fake_nvml.c`` is compiled to.

Use the fixtures in :mod:`tests.fake_nvml.fixtures`. What devices are like is set with :class:`FakeDriver`, also while
they are watched. Processes of a test get ``driver.environment()``.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_ntp.hardware.readings import EventType

SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"


def build(compiler: str, directory: Path, *flags: str) -> Path:
    """Compile the fake library into ``directory``."""
    library = directory / LIBRARY
    options = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
    command = [compiler, *options, *flags, f"-Wl,-soname,{LIBRARY}", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library


@dataclass(frozen=True)
class Call:
    """A call that the driver has logged: those of setters, and with ``trace=1`` all that name a device."""

    pid: int
    function: str
    gpu: int
    first: int
    second: int
    ret: int


class FakeDriver:
    """The devices of a machine.

    Args:
        library: The compiled fake.
        directory: Where its state lies.
        keys: As for :meth:`set`.
    """

    def __init__(self, library: Path, directory: Path, **keys: object) -> None:
        self.library, self.path = library, directory / "state"
        self.set(count=2, root=1, **keys)

    def set(self, gpu: int | str | None = None, others: Mapping[str, object] | None = None, **keys: object) -> None:
        """Change lines of the state, all at once; ``fake_nvml.c`` lists them.

        Args:
            gpu: The device that they are about, ``"*"`` for all; the machine if not given.
            others: Keys that are no Python names, such as ``"hang.nvmlDeviceGetFieldValues"``.
            **keys: The keys.
        """
        prefix = "" if gpu is None else f"gpu.{gpu}."
        self.change({f"{prefix}{key}": value for key, value in {**(others or {}), **keys}.items()})

    def change(self, lines: Mapping[str, object]) -> None:
        """As :meth:`set`, with whole keys such as ``"gpu.0.lost"``."""
        with self._locked():
            merged = self.state() | {key: str(value) for key, value in lines.items()}
            new = self.path.with_name("state.new")
            new.write_text("".join(f"{key}={value}\n" for key, value in merged.items()))
            os.replace(new, self.path)

    def state(self) -> dict[str, str]:
        """All lines; setters of the library have written some of them."""
        if not self.path.exists():
            return {}
        return dict(line.split("=", 1) for line in self.path.read_text().splitlines() if "=" in line)

    def event(self, gpu: int, kind: EventType, data: int = 0) -> None:
        """Announce an event to all who have registered for it."""
        with self._beside("events").open("a") as file:
            file.write(f"{gpu} {int(kind)} {data}\n")

    def xid(self, gpu: int, number: int) -> None:
        """Announce an XID."""
        self.event(gpu, EventType.XID, number)

    def calls(self, function: str = "") -> list[Call]:
        """Logged calls, of one function if given."""
        log = self._beside("log")
        lines = log.read_text().splitlines() if log.exists() else []
        calls = [Call(int(pid), name, *map(int, rest)) for pid, name, *rest in map(str.split, lines)]
        return [call for call in calls if not function or call.function == function]

    def environment(self) -> dict[str, str]:
        """What a process needs to find this driver."""
        places = [str(self.library.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        return {"FAKE_NVML_STATE": str(self.path), "LD_LIBRARY_PATH": ":".join(filter(None, places))}

    @staticmethod
    def uuid(gpu: int) -> str:
        """The device's UUID, if the state gives no other."""
        return f"GPU-fa4e0000-0000-0000-0000-{gpu:012d}"

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(f"state.{suffix}")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._beside("lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
