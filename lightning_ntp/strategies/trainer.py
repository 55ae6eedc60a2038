"""The strategy that Lightning's Trainer uses. It only translates between the Trainer and the member."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from typing_extensions import override

from lightning_ntp.comm.rendezvous import check_world_size
from lightning_ntp.compat import lightning as compat
from lightning_ntp.compat import loops
from lightning_ntp.config import GlobalBatch, NTPConfig, ReduceDtype, Respawning, Timeouts
from lightning_ntp.engine import Member
from lightning_ntp.engine.plain import Plain
from lightning_ntp.engine.survivor import Survivor
from lightning_ntp.hardware.xids import XidPolicy
from lightning_ntp.parallel import ParallelPlan
from lightning_ntp.parallel.plans.auto import find_plan
from lightning_ntp.parallel.probing.probe import ShapeProbe
from lightning_ntp.strategies import checks
from lightning_ntp.strategies.callbacks import FailureCallback, FailureCallbacks
from lightning_ntp.strategies.files import DenseFiles
from lightning_ntp.strategies.hooks import StepHooks
from lightning_ntp.strategies.launcher import NTPLauncher
from lightning_ntp.strategies.loaders import ReplicaLoaders
from lightning_ntp.strategies.metrics import ReplicaReducer
from lightning_ntp.strategies.process import end_job, founding_of, is_watched, join_job, join_plainly
from lightning_ntp.strategies.recovery import TrainerRecovery
from lightning_ntp.strategies.steps import StepRunner
from lightning_ntp.strategies.values import ReplicaValues
from lightning_ntp.strategies.votes import Votes
from lightning_ntp.topology import Topology

_SHARDED = "_ntp_model"  # attribute of a LightningModule that was sharded before


class NTPStrategy(ReplicaValues, DenseFiles, StepHooks):
    """Nonuniform tensor parallelism: data-parallel replicas whose tensor-parallel degrees may differ.

    Registered as ``"ntp"``. Every member holds a part of one replica; gradients of unequal replicas meet in a resharded
    sync, and the loss curve equals that of a dense run over the same global batches.

    Args:
        data_parallel_size: Number of replicas; ``"auto"``: the devices over ``tensor_parallel_size``, or the nodes.
        tensor_parallel_size: Nominal degree of a replica; ``"auto"``: the devices of a node.
        degrees: Degree of every replica, to start nonuniform; the devices are their sum, e.g. ``[4, 3]``.
        plan: Which modules are sharded and how: module name patterns to styles; ``"auto"`` finds it.
        global_batch: ``"constant"``: replicas of lower degree leave samples to the others; ``"shrink"``: these samples
            come later in the epoch; ``"auto"``: constant where a sample then costs at most 2 % more than with shrink.
        shares: Samples of a global batch (batch_size x replicas x accumulate_grad_batches) that each replica takes; by
            default in proportion to the degrees.
        max_micro_batch: Most samples in one forward; a larger micro-batch runs in several passes.
        bucket_cap_mb: Size of a bucket of the gradient sync, in dense mebibytes.
        grad_reduce_dtype: Precision of the gradient sum: float32, or the parameter's own if wider, by default.
        min_tensor_parallel_size: The lowest degree that a replica may reach; 3/4 of nominal by default.
        fault_tolerance: Live recovery, where our launcher has started the processes. Without, the first failure ends
            the job.
        respawn: Whether a process is started again at the seat of one that has died; it then joins at a step:
            ``"never"``, ``"once"`` at each seat, or ``"always"`` (with growing delays).
        verify_every_n_steps: Every so many steps replicas compare an eighth of their weights, bit by bit, inside the
            vote. Of three replicas the member that deviates is named and leaves; of two both are named.
        detectors: Checks of this member's device, asked every second in a thread: a callable that returns ``False``
            where the member shall hand over its part and leave, or a ``Finding``. CUDA devices are watched through NVML
            besides.
        xid_policy: What is done about single XIDs of the driver, where it shall be another thing than the table's:
            ``{43: "note"}``; one of ``"drain"``, ``"app"``, ``"note"`` and ``"probe"``.
        timeouts: All time limits.
        process_group_backend: ``"gloo"`` or ``"nccl"``; by the device if not given.

    Raises:
        ConfigError: for values that cannot work.
    """

    strategy_name = "ntp"

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        degrees: list[int] | None = None,
        plan: Literal["auto"] | dict[str, str] | ParallelPlan = "auto",
        global_batch: GlobalBatch = "constant",
        shares: list[int] | None = None,
        max_micro_batch: int | None = None,
        bucket_cap_mb: float = 25.0,
        grad_reduce_dtype: ReduceDtype | None = None,
        min_tensor_parallel_size: int | None = None,
        fault_tolerance: bool = True,
        respawn: Respawning = "never",
        verify_every_n_steps: int | None = None,
        detectors: list[Callable[[], Any]] | None = None,
        xid_policy: dict[int, str] | None = None,
        timeouts: Timeouts | None = None,
        process_group_backend: str | None = None,
    ) -> None:
        self.config = NTPConfig(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            degrees=None if degrees is None else tuple(degrees),
            min_tensor_parallel_size=min_tensor_parallel_size,
            global_batch=global_batch,
            shares=None if shares is None else tuple(shares),
            max_micro_batch=max_micro_batch,
            bucket_cap_mb=bucket_cap_mb,
            grad_reduce_dtype=grad_reduce_dtype,
            fault_tolerance=fault_tolerance,
            respawn=respawn,
            verify_every_n_steps=verify_every_n_steps,
            detectors=tuple(detectors or ()),
            xid_policy=xid_policy or {},
            timeouts=timeouts or Timeouts(),
        )
        super().__init__(
            data_parallel_size,
            tensor_parallel_size,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=self.config.timeouts.collective_s),
        )
        self._plan = plan
        self._topology: Topology | None = None
        self._told: list[FailureCallback] = []
        self._callbacks: FailureCallbacks | None = None
        self._reducer: ReplicaReducer | None = None
        self._is_first_backward = True

    # What a user may ask

    @property
    def topology(self) -> Topology:
        """Who sits where."""
        if self._engine is not None:
            return self._engine.member.topology
        return checks.check_set_up(self._topology, "topology")

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degree of every replica."""
        return self.topology.degrees

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a full global batch that each replica takes."""
        return checks.check_set_up(self._loaders, "shares").shares

    def replicas(self) -> dict[int, tuple[int, int]]:
        """(degree, share) of every replica that the job was founded with, by its number; (0, 0) where none is left."""
        live = {seats[0].replica: len(seats) for seats in self.topology.seats}
        return {number: (live.get(number, 0), share) for number, share in enumerate(self.shares)}

    def work_in_step(self) -> tuple[int, float]:
        """Samples of the global batch in hand, and live members over those that the job was founded with."""
        loaders = checks.check_set_up(self._loaders, "work_in_step")
        return loaders.in_hand().global_samples, self.topology.world_size / self._topology.world_size

    @property
    def member(self) -> Member:
        """This process's member, with its recorder of collectives."""
        return checks.check_set_up(self._engine, "member").member

    @property
    def is_replaying(self) -> bool:
        """Whether the step under way is run again after a failure: hooks inside a step see it twice."""
        windows = None if self._recovery is None else self._recovery.windows
        return windows is not None and windows.is_replaying

    def register_failure_callback(self, function: FailureCallback) -> None:
        """Have ``function(hook, event)`` called for every failure and change of view, on every member.

        Args:
            function: Gets ``"on_ntp_failure"`` with a ``FailureEvent``, ``"on_ntp_view"``, ``"on_ntp_recovered"`` or
                ``"on_ntp_rejoin"`` with a ``ViewEvent``, ``"on_ntp_corruption"`` with a ``CorruptionEvent``, or
                ``"on_ntp_finding"`` with a ``Finding`` about this member's device. What it raises is logged and stops
                nothing.
        """
        self._told.append(function)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For a user's own use; the strategy cuts loaders by shares itself."""
        return {"num_replicas": self.topology.num_replicas, "rank": self.member.replica}

    # Processes

    @override
    def _configure_launcher(self) -> None:
        degrees, nominal = self.config.resolve_degrees(self.num_nodes * self.num_processes, self.num_nodes)
        self.config.lowest_degree(nominal, degrees)
        self._topology = Topology.start(degrees, nominal)
        XidPolicy(self.config.xid_policy)  # refuses unknown actions
        checks.check_precision(self.precision_plugin)
        checks.warn_of_single_replica(len(degrees))
        if not self.cluster_environment.creates_processes_externally:
            seats = [str(seat) for seat in self._topology.members]
            self._launcher = NTPLauncher(
                self.cluster_environment,
                self.num_processes,
                self.num_nodes,
                seats=seats,
                grace_s=self.config.timeouts.shutdown_grace_s,
                founding=founding_of(self.config, self._topology) if self.config.fault_tolerance else None,
            )

    @override
    def setup_environment(self) -> None:
        super(ModelParallelStrategy, self).setup_environment()  # the base class would build a rectangular mesh
        reset_seed()
        check_world_size(self.topology.world_size)
        self._process_group_backend = self._get_process_group_backend()
        if self._engine is None:
            self._engine = self._join()
            self._reducer = ReplicaReducer(self._engine)
        self.set_world_ranks()

    def _join(self) -> Plain | Survivor:
        founding = checks.check_set_up(self._topology, "topology")
        place = self.cluster_environment.global_rank(), self.root_device, self._process_group_backend
        if not (self.config.fault_tolerance and is_watched()):
            return join_plainly(self.config, founding, *place)
        survivor = join_job(self.config, founding, *place)
        known = vars(self.lightning_module).get(_SHARDED)
        if survivor.member is None or survivor.member.built_model is not known or known is None:
            survivor.new_member()
        prepare = lambda run: lambda: survivor.outside(run)  # noqa: E731
        loops.wrap(self._trainer, "_data_connector", "prepare_data", prepare)
        return survivor

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        rank_zero_only.rank = self.global_rank

    @property
    @override
    def global_rank(self) -> int:
        """0 for the leader, whoever that is."""
        if self._engine is None or not self._engine.tolerates_failures:
            return super().global_rank
        return self.topology.leader_first(self.member.rank)

    @property
    @override
    def world_size(self) -> int:
        if self._engine is None or not self._engine.tolerates_failures:
            return super().world_size
        return self.topology.world_size

    @override
    def teardown(self) -> None:
        trainer = self._trainer
        if trainer is not None:
            compat.unwrap_automatic_optimization(trainer)
        if self._recovery is not None:
            self._recovery.close()
            self._recovery = None
        if self._callbacks is not None:
            self._engine.observers.remove(self._callbacks)
            self._callbacks = None
        if self._engine is not None:
            # The channels stay open: a script may save or fit again. After an error a collective may be stuck in them.
            self._engine.member.stop_sync()
            if trainer is None or trainer.state.status == TrainerStatus.INTERRUPTED:
                self._engine = self._reducer = None
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(self._engine, Survivor):
            end_job(self._engine, exception)

    # Model and optimizers

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        checks.check_trainer(trainer)
        compat.keep_samplers(trainer)
        module = self.lightning_module
        self._shard(module)
        self.model_to_device()
        self._reducer.adopt_metrics(module)
        seed = int(os.environ.get("PL_GLOBAL_SEED", self.broadcast(torch.initial_seed())))
        self._loaders = ReplicaLoaders(trainer, self.config, self._topology, self.topology, self.member.number)
        self._steps = StepRunner(trainer, self._engine, self._reducer, self._loaders, seed)
        if isinstance(self._engine, Survivor):
            self._recovery = TrainerRecovery(
                trainer,
                self._engine,
                self._loaders,
                self._steps,
                self.keeping_states_here,
            )
        self._callbacks = FailureCallbacks(trainer, self._told)
        self._engine.observers.append(self._callbacks)  # after the recovery, whose changes they shall find done
        self.barrier()
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self.setup_optimizers(trainer)
            checks.check_optimizers(self.optimizers, module)
        self.setup_precision_plugin()
        if is_fitting:
            self._setup_fit(trainer)
        self._loaders.follow(self.topology)  # members may have died during the setup

    def _shard(self, module: LightningModule) -> None:
        member, known = self.member, vars(module).get(_SHARDED)
        if known is not None:
            if member.built_model is not known:
                member.adopt(known)
                self._engine.own([])
            # Modules may have been added since, with weights of their own.
            self._engine.outside(lambda: member.copy_leaders(known.replicated_tensors()))
            self.model = self.precision_plugin.convert_module(module)
            return
        checks.check_unsharded(module)
        compat.materialize(module, torch.device("cpu"))
        self.model = self.precision_plugin.convert_module(module)
        plan = find_plan(self._plan, module)
        self._engine.outside(lambda: member.copy_leaders([*module.parameters(), *module.buffers()]))
        model = member.cut(module, plan)
        self._engine.own([])
        vars(module)[_SHARDED] = model
        ShapeProbe(model).attach()

    def _setup_fit(self, trainer: Trainer) -> None:
        self._engine.verify_every_n_steps = self.config.verify_every_n_steps
        self._engine.own(self.optimizers)
        self.member.start_sync(bucket_cap_mb=self.config.bucket_cap_mb, reduce_dtype=self.config.reduce_dtype)
        self._steps.start_sync()
        self._votes = Votes(self._engine)
        self.precision_plugin.clip_grad_by_norm = self._votes.clip_by_norm
        self._is_first_backward = True
        is_automatic = self.lightning_module.automatic_optimization
        if not is_automatic:
            checks.check_manual_optimization(self.config)
        if self._recovery is not None:
            self._recovery.start_fit(self._votes, self.broadcast)
        elif is_automatic:
            compat.wrap_automatic_optimization(trainer, self._steps.with_extra_passes)

    # Private

    @property
    def _trainer(self) -> Trainer | None:
        module = self.lightning_module
        return None if module is None else module._trainer

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=cls.__doc__.splitlines()[0])
