"""The launcher behind ``python train.py``: the process in which the user calls ``fit`` becomes the supervisor.

Lightning's own launcher makes that process rank 0, so that the job cannot outlive it. Ours runs the same command again
for every rank, rank 0 included, and from then on only waits:

* code before the first ``fit`` (``validate``, ``test``, ``predict``) runs in the members and, once, in the supervisor;
* code after it runs in the members only: the supervisor ends with the job's exit code, inside ``fit``.

The supervisor's Trainer never starts: no loggers, no callbacks, no ``setup``. The process ends by ``os._exit`` after
its exit functions (``atexit``) have run; ``finally`` blocks around ``fit`` do not run there. An exception, SystemExit
too, would pass through Lightning's error handling, which calls the callbacks' ``on_exception`` and closes loggers, and
through the script's own handlers, which would go on as if ``fit`` had failed.
"""

from __future__ import annotations

import atexit
import builtins
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_ntp.compat import lightning as compat
from lightning_ntp.errors import LaunchError
from lightning_ntp.membership.founding import Founding
from lightning_ntp.supervisor import Adaptive, AllOrNothing, EndPolicy, Supervisor

_WAY_OUT = (
    "put the code into a file and run `python file.py` or `python -m lightning_ntp.run --nproc-per-node N file.py`"
)


class NTPLauncher(compat.subprocess_script_launcher()):
    """Runs the current script once for every member and waits for them.

    For the process that the user started. Members need no launcher; in one (LOCAL_RANK is set), :meth:`launch` only
    calls the function.

    Args:
        cluster_environment: Lightning's view of the processes around this one.
        num_processes: Members on this machine.
        num_nodes: Machines of the job; only one can be started from here.
        seats: Names of the members for the reader, by rank, such as ``r1.s3``.
        grace_s: After one member has failed, how long the others may take to end, in seconds.
        founding: What the job is, if it goes on through deaths.

    Raises:
        LaunchError: in a notebook or REPL, where there is no script to run again.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int = 1,
        seats: Sequence[str] = (),
        grace_s: float = 5.0,
        founding: Founding | None = None,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self.seats = seats
        self.grace_s, self.founding = grace_s, founding
        if not cluster_environment.creates_processes_externally:
            _refuse_interactive()
            # One past the last rank: Lightning gives ranks above 0 dummy loggers, so that `logger.experiment` before
            # `fit` makes no files here. (At -1 it would make them: `rank_zero_experiment` asks for rank > 0.)
            rank_zero_only.rank = num_processes * num_nodes

    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Become the supervisor: start the members, wait, and end this process with the job's exit code.

        In a member: call ``function(*args, **kwargs)`` and return its result.

        Raises:
            LaunchError: if the script cannot be run again (``python -c``, standard input, a notebook, pytest, a Hydra
                multirun), or for more than one machine.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if self.cluster_environment.creates_processes_externally:
            compat.limit_threads(self.num_processes)
            return function(*args, **kwargs)
        _refuse_unrepeatable()
        if self.num_nodes != 1:
            raise LaunchError(
                f"num_nodes={self.num_nodes}: `python train.py` starts members on this machine only: pass num_nodes=1, "
                "or let torchrun or SLURM start the processes on every machine"
            )
        command, working_directory = _hydra_command() if _in_hydra_job() else (compat.script_command(), None)
        supervisor = Supervisor(
            command,
            self.num_processes,
            cwd=working_directory,
            seats=self.seats,
            policy=self._policy(),
        )
        _flush()
        _end_process(supervisor.run())

    def _policy(self) -> EndPolicy:
        if self.founding is None:
            return AllOrNothing(grace_s=self.grace_s)
        return Adaptive(founding=self.founding, grace_s=self.grace_s)


def _refuse_interactive() -> None:
    interactive = hasattr(sys, "ps1") or sys.flags.interactive or hasattr(builtins, "__IPYTHON__")
    if interactive:
        raise LaunchError(
            "strategy='ntp' runs the script again in every member, and a notebook, a REPL or `python -i` has no script "
            f"to run: {_WAY_OUT}"
        )


def _refuse_unrepeatable() -> None:
    _refuse_interactive()
    import __main__  # here, as it may be replaced between import and launch

    spec = getattr(__main__, "__spec__", None)
    name = spec.name if spec else os.path.basename(sys.argv[0])
    if spec is None and not os.path.isfile(getattr(__main__, "__file__", "")):  # "<stdin>" is a value, too
        raise LaunchError(
            "strategy='ntp' runs the script again in every member, and code from `python -c` or standard input is not "
            f"in a file (sys.argv[0]={sys.argv[0]!r}): {_WAY_OUT}"
        )
    if name in ("pytest", "py.test", "pytest.__main__"):
        raise LaunchError(
            f"strategy='ntp' inside pytest (main program {name!r}) would run the whole test session again in every "
            "member: let the test start a script of its own, as in subprocess.run([sys.executable, 'train.py'])"
        )


def _in_hydra_job() -> bool:
    if "hydra" not in sys.modules:  # then no Hydra job can be running, and its import costs time
        return False
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.initialized()


def _hydra_command() -> tuple[Callable[[int], list[str]], str]:
    from hydra.core.hydra_config import HydraConfig

    mode = HydraConfig.get().mode
    if mode is not None and mode.name == "MULTIRUN":
        raise LaunchError(
            "strategy='ntp' in a Hydra multirun: the process ends with the first job, so the sweep would stop there: "
            "start each job as a process of its own, for example by a shell loop over the overrides"
        )
    _, working_directory = compat.hydra_script_command(local_rank=0)

    def command(rank: int) -> list[str]:
        words, _ = compat.hydra_script_command(local_rank=rank)
        # Rank 0 keeps the job's name, hence the name of its log file, as if it were this process.
        return [word for word in words if rank or not word.startswith("hydra.job.name=train_ddp_process_")]

    return command, working_directory


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _end_process(exit_code: int) -> NoReturn:
    atexit._run_exitfuncs()  # temporary directories, log handlers: what the script opened before `fit` is closed
    _flush()
    os._exit(exit_code)
