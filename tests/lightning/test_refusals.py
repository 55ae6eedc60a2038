"""What cannot work is refused at start, by an error that names the argument, its value and the way out."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_ntp import NTPStrategy
from lightning_ntp.errors import ConfigError, DataError, PlanError, UnsupportedError
from tests.lightning.runs import SMALL, Language, loader, quiet_trainer

# Before any process is started


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"degrees": [4, 2]}, r"degrees=\[4, 2\] sum to 6, but the Trainer has 3 devices.*devices=6"),
        ({"degrees": []}, r"degrees=\[\] sum to 0"),
        ({"degrees": [2, 1], "tensor_parallel_size": 1}, r"degrees=\[2, 1\]: 2 is above tensor_parallel_size=1.*raise"),
        ({"degrees": [3, 0]}, r"degrees=0 must be a list of whole numbers of at least 1"),
        ({"degrees": [4, -1]}, r"degrees=-1 must be"),
        ({"degrees": [2, 1], "data_parallel_size": 3}, r"\[2, 1\] are 2 replicas, but data_parallel_size=3.*drop"),
        ({"tensor_parallel_size": 2}, r"data_parallel_size=1 x tensor_parallel_size=2 is not the number of devices, 3"),
        ({"degrees": [2, 1], "min_tensor_parallel_size": 3}, r"min_tensor_parallel_size=3 is above the nominal degree"),
        ({"degrees": [2, 1], "bucket_cap_mb": math.nan}, r"bucket_cap_mb=nan must be a positive number"),
        ({"degrees": [2, 1], "global_batch": "big"}, r"global_batch='big': choose one of 'constant', 'shrink'"),
        ({"degrees": [2, 1], "max_micro_batch": 0}, r"max_micro_batch=0 must be a whole number of at least 1"),
        ({"degrees": [2, 1], "respawn": "sometimes"}, r"respawn='sometimes': choose one of 'never', 'once', 'always'"),
    ],
)
def test_arguments(options, told):
    with pytest.raises(ConfigError, match=told):
        quiet_trainer(3, NTPStrategy(**options))


@pytest.mark.parametrize(
    ("plugin", "told"),
    [
        (MixedPrecision("16-mixed", "cpu"), r"precision='16-mixed' is not supported: float16 needs.*'bf16-mixed'"),
        (HalfPrecision("16-true"), r"precision='16-true' is not supported.*choose one of '32-true', '64-true'"),
    ],
)
def test_precision(plugin, told):
    with pytest.raises(UnsupportedError, match=told):
        quiet_trainer(3, NTPStrategy(degrees=[2, 1]), plugins=[plugin])
    with pytest.raises(UnsupportedError, match="precision='16-true' is not supported"):
        quiet_trainer(2, "ntp", precision="16-true")


# When training starts. Each case is a function that makes the module and the arguments of the Trainer and the strategy.


class Case:
    """Makes what one fit needs; the default would train.

    Attributes:
        told: What the error says.
        error: Its type.
    """

    error: type[Exception] = UnsupportedError
    told = ""
    strategy: dict[str, Any] = {}
    trainer: dict[str, Any] = {}
    batch_size = 2

    def module(self) -> Language:
        return Language(SMALL)

    def callbacks(self) -> list[Any]:
        return []

    def data(self) -> Any:
        return loader(8, self.batch_size)


class UnknownPattern(Case):
    error, told = PlanError, r"layers\.\*\.attention"
    strategy = {"plan": {"model.layers.*.attention": "ffn"}}


class UnknownStyle(Case):
    error, told = PlanError, r"colum"
    strategy = {"plan": {"model.lm_head": "colum"}}


class NoHeadCount(Case):
    """The heads are only known inside the forward."""

    error, told = PlanError, r"attn[\s\S]*(num_)?heads"

    def module(self) -> Language:
        module = Language(SMALL)
        del module.ntp_plan
        for layer in module.model.layers:
            layer.attn = HiddenHeads()
        return module


class HiddenHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (8, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class HardCoded(NoHeadCount):
    """The plan knows the heads, the forward writes them out."""

    error, told = PlanError, r"attn"

    def module(self) -> Language:
        module = super().module()
        module.ntp_plan = {"model.layers.*.attn": "attention(num_heads=8)"}
        return module


class WrongHeadCount(Case):
    error, told = PlanError, r"num_heads=5"
    strategy = {"plan": {"model.layers.*.attn": "attention(num_heads=5)"}}


class NaNShares(Case):
    error, told = ConfigError, r"shares=\(nan, 4\): the share nan of replica 0 is not a whole number.*give ints"
    strategy = {"shares": [math.nan, 4]}


class WrongSum(Case):
    error, told = ConfigError, r"shares=\(1, 2\) add up to 3, but the global batch has 4 samples.*make the sums equal"
    strategy = {"shares": [1, 2]}


class SmallBatch(Case):
    error, told = ConfigError, r"shares=\(1, 0\) are 1 samples for 2 replicas.*smaller than the replicas.*raise"
    strategy = {"shares": [1, 0], "global_batch": "shrink"}
    batch_size = 1


class Compiled(Case):
    error, told = RuntimeError, r"compiled model is incompatible with the current strategy: `NTPStrategy`.*avoid"

    def module(self) -> Any:
        return torch.compile(Language(SMALL))


class CompiledSubmodule(Case):
    told = r"module 'model' is a OptimizedModule: .*remove the wrapper"

    def module(self) -> Any:
        module = Language(SMALL)
        module.model = torch.compile(module.model)
        return module


class CompiledInPlace(Case):
    told = r"module 'model\.layers\.0' was compiled"

    def module(self) -> Any:
        module = Language(SMALL)
        module.model.layers[0].compile()
        return module


class Averaged(Case):
    told = r"module 'average' is an AveragedModel.*average saved checkpoints"

    def module(self) -> Any:
        module = Language(SMALL)
        module.average = AveragedModel(module.model)
        return module


class SWA(Case):
    told = r"callback StochasticWeightAveraging copies the whole model.*average saved checkpoints"

    def callbacks(self) -> list[Any]:
        return [StochasticWeightAveraging(1e-2)]


class EMA(SWA):
    told = r"callback EMAWeightAveraging copies"

    def callbacks(self) -> list[Any]:
        return [EMAWeightAveraging()]


class Scheduler(SWA):
    told = r"GradientAccumulationScheduler is not supported.*accumulate_grad_batches"

    def callbacks(self) -> list[Any]:
        return [GradientAccumulationScheduler({0: 1, 1: 2})]


class Adafactor(Case):
    told = r"optimizer 0 is a Adafactor, whose update.*use AdamW"
    optimizer = "Adafactor"

    def module(self) -> Any:
        module = Language(SMALL)
        module.configure_optimizers = lambda: getattr(torch.optim, self.optimizer)(module.parameters())
        return module


class LBFGS(Adafactor):
    told = r"optimizer 0 is a LBFGS"
    optimizer = "LBFGS"


class EarlyOptimizer(Case):
    told = r"optimizer 0 \(SGD\), parameter group 0: .*no part of the model after sharding.*configure_optimizers"

    def module(self) -> Any:
        module = Language(SMALL)
        early = torch.optim.SGD(module.parameters(), 0.1)
        module.configure_optimizers = lambda: early
        return module


class Reentrant(Case):
    told = r"reentrant activation checkpointing is not supported.*use_reentrant=False"

    def module(self) -> Any:
        module = Language(SMALL)
        forward = module.model.layers[0].forward
        module.model.layers[0].forward = lambda x: checkpoint(forward, x, use_reentrant=True)
        return module


class SeveralLoaders(Case):
    error, told = DataError, r"several loaders: only one can be cut.*ConcatDataset"

    def module(self) -> Any:
        module = Language(SMALL)
        module.training_step = lambda batch, batch_idx: module.losses(batch["a"])[0]
        return module

    def data(self) -> Any:
        return CombinedLoader({"a": loader(8, 2), "b": loader(8, 2)})


class NoLoader(Case):
    error, told = DataError, r"cannot cut the batches of a Tensor: pass a torch DataLoader"

    def data(self) -> Any:
        return [torch.zeros(2, 8, dtype=torch.int64)]


class NoBatches(Case):
    error, told = DataError, r"batch_size=None.*set batch_size"

    def data(self) -> Any:
        return DataLoader(loader(8, 2).dataset, batch_size=None)


class PassesByHand(Case):
    told = r"max_micro_batch=1 needs automatic optimization.*drop the argument"
    strategy = {"max_micro_batch": 1}

    def module(self) -> Any:
        module = Language(SMALL)
        module.automatic_optimization = False
        return module


class GatherGradients(Case):
    told = r"all_gather\(sync_grads=True\) is not supported"

    def module(self) -> Any:
        module = Language(SMALL)
        gather = module.all_gather
        module.training_step = lambda batch, batch_idx: gather(module.losses(batch)[0], sync_grads=True).mean()
        return module


class OddClip(Case):
    told = r"clip_grad_norm_\(norm_type=1\.0\).*gradient_clip_val"

    def module(self) -> Any:
        module = Language(SMALL)
        clip = torch.nn.utils.clip_grad_norm_
        module.on_before_optimizer_step = lambda optimizer: clip(module.parameters(), 1.0, norm_type=1.0)
        return module


class SyncBatchNorm(Case):
    told = r"sync_batchnorm=True is not supported"
    trainer = {"sync_batchnorm": True}


class AsDTensors(Case):
    """torch's own sharding, applied before."""

    told = r"parameter 'model\.embed\.weight' is a DTensor.*remove that call"

    def module(self) -> Any:
        module = Language(SMALL)
        mesh = DeviceMesh("cpu", list(range(3)))
        weight = distribute_tensor(module.model.embed.weight, mesh, [Replicate()])
        module.model.embed.weight = nn.Parameter(weight)
        return module


class Sharded(Case):
    told = r"is a DTensor \(parallelize_module or fully_shard was applied\)"

    def module(self) -> Any:
        module = Language(SMALL)
        fully_shard(module.model, mesh=DeviceMesh("cpu", list(range(3))))
        return module


class Wrapped(Case):
    told = r"module 'model' is a DistributedDataParallel.*remove the wrapper"

    def module(self) -> Any:
        module = Language(SMALL)
        module.model = nn.parallel.DistributedDataParallel(module.model)
        return module


CASES = [kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, Case)][1:]
# These stop in mid-step, where a peer may still be inside a collective: each has a run of its own.
LATE = (Reentrant, GatherGradients, OddClip)


def refuse(rank: int, world_size: int, store: str, kinds: list[type[Case]]) -> list[tuple[str, str]]:
    """The errors of one fit after the other: what is refused at start leaves the process usable."""
    torch.distributed.init_process_group("gloo")
    told = []
    for kind in kinds:
        case = kind()
        module, callbacks, data = case.module(), case.callbacks(), case.data()
        strategy = NTPStrategy(**({"degrees": [2, 1]} | case.strategy))
        trainer = quiet_trainer(world_size, strategy, callbacks=callbacks, **case.trainer)
        try:
            trainer.fit(module, data)
        except Exception as error:
            told.append((type(error).__name__, str(error)))
        else:
            told.append(("", "nothing was refused"))
    torch.distributed.destroy_process_group()
    return told


@pytest.fixture(scope="module")
def told(workers) -> dict[type[Case], list[tuple[str, str]]]:
    early = [kind for kind in CASES if kind not in LATE]
    results = {kind: [] for kind in CASES}
    for kinds in (early, *([kind] for kind in LATE)):
        for rank in workers.run(refuse, 3, kinds):
            for kind, answer in zip(kinds, rank, strict=True):
                results[kind].append(answer)
    return results


@pytest.mark.parametrize("kind", CASES)
def test_at_start(told, kind):
    for name, text in told[kind]:
        assert name == kind.error.__name__ and re.search(kind.told, text), f"{name}: {text}"


def test_a_single_replica_is_warned_about():
    with pytest.warns(UserWarning, match="data_parallel_size=1: with a single replica nobody else holds"):
        Trainer(accelerator="cpu", devices=2, strategy="ntp", logger=False)


def test_the_cases_would_train(workers):
    """Otherwise a refusal shows nothing."""
    assert workers.run(refuse, 3, [Case]) == [[("", "nothing was refused")]] * 3
