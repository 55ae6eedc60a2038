"""Private attributes of Lightning that this package uses: one small function each.

Each looks for its attribute when it is called and says what is missing; no other file touches a name of Lightning that
begins with an underscore.
"""

from __future__ import annotations

import importlib
from typing import Any

import lightning

from lightning_ntp.errors import UnsupportedError


def private(module: str, name: str) -> Any:
    """An attribute of one of Lightning's modules.

    Raises:
        UnsupportedError: if this version of Lightning does not have it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"lightning {lightning.__version__} has no {module}.{name}, which lightning_ntp needs: install a version "
            "of lightning inside the range that this package declares"
        ) from error


# Launching


def subprocess_script_launcher() -> type:
    """The base class of our launcher; the Trainer treats launchers of this class as ones that own processes."""
    return private("lightning.pytorch.strategies.launchers.subprocess_script", "_SubprocessScriptLauncher")


def script_command() -> list[str]:
    """The command line that runs this process's script (or ``-m`` module) again."""
    command = list(private("lightning.fabric.strategies.launchers.subprocess_script", "_basic_subprocess_cmd")())
    import __main__  # here, as it may be replaced between import and launch

    if __main__.__spec__ is None:
        command[1] = __main__.__file__  # always absolute; Lightning's is wrong once the script has changed directory
    return command


def hydra_script_command(local_rank: int) -> tuple[list[str], str]:
    """The same for a Hydra job that has been started, with the job's overrides; and the directory to run it in."""
    build = private("lightning.fabric.strategies.launchers.subprocess_script", "_hydra_subprocess_cmd")
    command, working_directory = build(local_rank=local_rank)
    return list(command), working_directory


def limit_threads(num_processes: int) -> None:
    """Give this process its share of the CPUs, unless OMP_NUM_THREADS says something else."""
    private("lightning.fabric.utilities.distributed", "_set_num_threads_if_needed")(num_processes=num_processes)
