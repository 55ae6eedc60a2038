"""The strategy that Lightning's Trainer uses. It only translates between the Trainer and the member."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ntp.checkpoint import (
    gather_model_state,
    gather_optimizer_state,
    load_model_state,
    load_optimizer_state,
    put_positions_back,
    read_file,
    save_file,
    set_positions_apart,
)
from lightning_ntp.comm.rendezvous import check_world_size, connect_store, join_world
from lightning_ntp.compat import lightning as compat
from lightning_ntp.compat.torch import total_norm_by
from lightning_ntp.config import GlobalBatch, NTPConfig, ReduceDtype, Timeouts
from lightning_ntp.engine import Member
from lightning_ntp.errors import CheckpointError, UnsupportedError
from lightning_ntp.parallel import ParallelModel, ParallelPlan
from lightning_ntp.parallel.plans.auto import find_plan
from lightning_ntp.parallel.probing.probe import ShapeProbe
from lightning_ntp.strategies import checks
from lightning_ntp.strategies.launcher import NTPLauncher
from lightning_ntp.strategies.loaders import ReplicaLoaders
from lightning_ntp.strategies.metrics import ReplicaReducer, means_everyone
from lightning_ntp.strategies.steps import StepRunner
from lightning_ntp.strategies.votes import Votes, unwrapped
from lightning_ntp.topology import Topology

_SHARDED = "_ntp_model"  # attribute of a LightningModule that was sharded before


class NTPStrategy(ModelParallelStrategy):
    """Nonuniform tensor parallelism: data-parallel replicas whose tensor-parallel degrees may differ.

    Registered as ``"ntp"``. Every member holds a part of one replica; gradients of unequal replicas meet in a resharded
    sync, and the loss curve equals that of a dense run over the same global batches.

    Args:
        data_parallel_size: Number of replicas; ``"auto"``: the devices over ``tensor_parallel_size``, or the nodes.
        tensor_parallel_size: Nominal degree of a replica; ``"auto"``: the devices of a node.
        degrees: Degree of every replica, to start nonuniform; the devices are their sum, e.g. ``[4, 3]``.
        plan: Which modules are sharded and how: module name patterns to styles; ``"auto"`` finds it.
        global_batch: ``"constant"``: replicas of lower degree leave samples to the others; ``"shrink"``: these samples
            come later in the epoch.
        shares: Samples of a global batch (batch_size x replicas x accumulate_grad_batches) that each replica takes; by
            default in proportion to the degrees.
        max_micro_batch: Most samples in one forward; a larger micro-batch runs in several passes.
        bucket_cap_mb: Size of a bucket of the gradient sync, in dense mebibytes.
        grad_reduce_dtype: Precision of the gradient sum: float32, or the parameter's own if wider, by default.
        min_tensor_parallel_size: The lowest degree that a replica may reach; 3/4 of nominal by default.
        fault_tolerance: Live recovery; not part of this version.
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
        fault_tolerance: bool = False,
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
        self._member: Member | None = None
        self._reducer: ReplicaReducer | None = None
        self._loaders: ReplicaLoaders | None = None
        self._steps: StepRunner | None = None
        self._votes: Votes | None = None
        self._is_first_backward = True

    # What a user may ask

    @property
    def topology(self) -> Topology:
        """Who sits where."""
        return checks.check_set_up(self._topology, "topology")

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degree of every replica."""
        return self.topology.degrees

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a full global batch that each replica takes."""
        return checks.check_set_up(self._loaders, "shares").shares

    @property
    def member(self) -> Member:
        """This process's member, with its recorder of collectives."""
        return checks.check_set_up(self._member, "member")

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
            )

    @override
    def setup_environment(self) -> None:
        super(ModelParallelStrategy, self).setup_environment()  # the base class would build a rectangular mesh
        reset_seed()
        check_world_size(self.topology.world_size)
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        timeouts = self.config.timeouts
        join_world(
            self._process_group_backend,
            lambda: connect_store(timeout_s=timeouts.start_s),
            self.global_rank,
            self.world_size,
            timeout_s=timeouts.collective_s,
            device=self.root_device,
        )
        if self._member is None:
            self._member = Member(
                self.topology,
                self.global_rank,
                device=self.root_device,
                backend=self._process_group_backend,
                lowest_degree=self.config.lowest_degree(self.topology.nominal_degree, self.topology.degrees),
                timeout=timedelta(seconds=timeouts.collective_s),
            )
            self._reducer = ReplicaReducer(self._member)

    @override
    def teardown(self) -> None:
        trainer = self._trainer
        if trainer is not None:
            compat.unwrap_automatic_optimization(trainer)
        if self._member is not None:
            # The channels stay open: a script may save or fit again. After an error a collective may be stuck in them.
            self._member.stop_sync()
            if trainer is None or trainer.state.status == TrainerStatus.INTERRUPTED:
                self._member = None
        super().teardown()

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
        self._loaders = ReplicaLoaders(trainer, self.config, self.topology, self.member.replica)
        seed = int(os.environ.get("PL_GLOBAL_SEED", self.broadcast(torch.initial_seed())))
        self._steps = StepRunner(trainer, self.member, self._reducer, self._loaders, seed)
        self.barrier()
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self.setup_optimizers(trainer)
            checks.check_optimizers(self.optimizers, module)
        self.setup_precision_plugin()
        if is_fitting:
            self._setup_fit(trainer)

    def _shard(self, module: LightningModule) -> None:
        known: ParallelModel | None = vars(module).get(_SHARDED)
        if known is not None:
            self.member.adopt(known)
            self.model = self.precision_plugin.convert_module(module)
            return
        checks.check_unsharded(module)
        compat.materialize(module, torch.device("cpu"))
        self.model = self.precision_plugin.convert_module(module)
        model = self.member.shard(module, find_plan(self._plan, module))
        vars(module)[_SHARDED] = model
        ShapeProbe(model).attach()

    def _setup_fit(self, trainer: Trainer) -> None:
        self.member.start_sync(bucket_cap_mb=self.config.bucket_cap_mb, reduce_dtype=self.config.reduce_dtype)
        self._steps.start_fit()
        self._votes = Votes(self.member)
        self.precision_plugin.clip_grad_by_norm = self._votes.clip_by_norm
        self._is_first_backward = True
        if self.lightning_module.automatic_optimization:
            compat.wrap_automatic_optimization(trainer, self._steps.with_extra_passes)
        else:
            checks.check_manual_optimization(self.config)

    # Steps

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return checks.check_set_up(self._loaders, "loaders").wrap(dataloader)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with total_norm_by(self._votes.total_norm):
            return self._steps.train(super().training_step, args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.evaluate(super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.evaluate(super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.evaluate(super().predict_step, args, kwargs)

    @override
    def on_train_start(self) -> None:
        self._loaders.check_single()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._is_first_backward:
            self._is_first_backward = False
            checks.check_graph(closure_loss, self.member.model)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self.member.sync.paused():
            yield

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def closure_and_vote() -> Any:
            result = closure()
            self._votes.of(optimizer)
            return result

        with total_norm_by(self._votes.total_norm):
            return super().optimizer_step(optimizer, closure_and_vote, model, **kwargs)

    # Values

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if not means_everyone(group):
            return super().reduce(tensor, group, reduce_op)
        return tensor if self._reducer is None else self._reducer.reduce(tensor, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return bool(decision) if self._reducer is None else self._reducer.decide(decision, all)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """(replicas, ...): one tensor of each replica."""
        if not means_everyone(group) or self._reducer is None:
            return super().all_gather(tensor, group, sync_grads)
        checks.check_all_gather(sync_grads, self._reducer.is_alone)
        return torch.stack(self._reducer.gather(tensor))

    # Checkpoints

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return gather_model_state(self.member.model, self.topology, self.global_rank)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = unwrapped(optimizer)
        return gather_optimizer_state(self.member.model, optimizer, self.topology, self.global_rank)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise UnsupportedError(f"storage_options={storage_options!r} is not supported: a plain file is written")
        path = self.broadcast(os.fspath(filepath))  # a string: a URL is no Path
        failure = None
        if self.is_global_zero:
            set_positions_apart(checkpoint)
            try:
                save_file(checkpoint, path)
            except CheckpointError as error:
                failure = str(error)
        failure = self.broadcast(failure)  # nobody goes on as if it had been written
        if failure is not None:
            raise CheckpointError(failure)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = read_file(self.broadcast(os.fspath(checkpoint_path)), weights_only)
        if self._trainer.state.fn == TrainerFn.FITTING:
            put_positions_back(checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        load_model_state(self.member.model, checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer_state(self.member.model, optimizer, state)

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
