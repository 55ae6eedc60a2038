"""CUDA tensors over gloo, several ranks on one device. NCCL cannot put two ranks on one card, so it is not run here."""

from __future__ import annotations

import pytest
import torch

from tests.dist.bare import assert_copies_equal, history_of, train_rank
from tests.support.cases import Case
from tests.support.models import ModelConfig
from tests.support.reference import assert_parity, train_dense

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CASES = (
    Case("heads-7", (3, 2), ModelConfig(width=28, num_heads=7, num_kv_heads=7), shares=(4, 2)),
    Case("fused-gqa-tied", (2, 2), ModelConfig(num_kv_heads=2, fused_qkv=True, fused_gate_up=True, tied=True)),
    Case("gqa-6-3-bias", (4, 3), ModelConfig(width=24, num_heads=6, num_kv_heads=3, bias=True), padded=True),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_parity_on_cuda(workers, case):
    batches = case.global_batches(5)
    runs = workers.run(train_rank, case.num_ranks, case, batches, False, "cuda:0", timeout_s=300)
    dense = train_dense(case.model, batches, padded=case.padded)
    for replica in range(len(case.degrees)):
        assert_parity(history_of(runs, replica), dense)
    assert_copies_equal(runs)
