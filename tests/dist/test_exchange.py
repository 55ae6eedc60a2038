"""A5: what travels in a sync, by bucket, exactly as DESIGN section 5 says."""

from __future__ import annotations

from collections import defaultdict

import pytest

from lightning_ntp.comm.exchange import Record
from lightning_ntp.layout import BucketKind, ParameterSize, Replicated, cut_buckets
from tests.dist.bare import RankRun, train_rank
from tests.support.cases import Case
from tests.support.models import ModelConfig

MHA = ModelConfig(width=32, num_heads=8, num_kv_heads=8, bias=True)
SHARED_KV = ModelConfig(num_kv_heads=2)


def sync_records(run: RankRun) -> dict[str, list[Record]]:
    by_bucket = defaultdict(list)
    for record in run.records:
        if record.tag.startswith("bucket"):
            by_bucket[record.tag].append(record)
    return by_bucket


def one_step(workers, degrees: tuple[int, ...], model: ModelConfig) -> list[RankRun]:
    case = Case("exchange", degrees, model, accumulate=2)
    return workers.run(train_rank, case.num_ranks, case, case.global_batches(1), True)


def shape(records: list[Record]) -> list[tuple[str, str]]:
    return [(record.channel, record.operation) for record in records]


PRE, SUM, POST = ("reshard", "all_to_all"), ("data_parallel", "all_reduce"), ("reshard", "all_to_all")


@pytest.mark.parametrize("degrees", [(4, 4), (2, 2)])
def test_uniform_is_one_sum_in_place(workers, degrees):
    for run in one_step(workers, degrees, MHA):
        for records in sync_records(run).values():
            assert shape(records) == [SUM]
        assert sum(r.sent_bytes for rs in sync_records(run).values() for r in rs) == local_bytes(run)


def test_nonuniform_counts_and_bytes(workers):
    runs = one_step(workers, (4, 3), MHA)
    sharded = sharded_tags(runs)
    assert sharded
    for run in runs:
        extra, wider = run.slot == 3, run.replica == 0
        for tag, records in sync_records(run).items():
            if tag in sharded:
                expected = [PRE, POST] if extra else [PRE, SUM, POST] if wider else [SUM]
            else:  # replicated: one slot sums and hands out inside its replica
                expected = [SUM, POST] if shape(records)[0] == SUM else [POST]
            assert shape(records) == expected, (run.replica, run.slot, tag)
    extra = next(run for run in runs if run.slot == 3)
    sent = [records[0].sent_bytes for tag, records in sync_records(extra).items() if tag in sharded]
    received = [records[-1].received_bytes for tag, records in sync_records(extra).items() if tag in sharded]
    assert sum(sent) == sum(received) == sharded_bytes(extra)


def test_each_replicated_bucket_has_one_owner(workers):
    runs = one_step(workers, (4, 3), MHA)
    for tag in sync_records(runs[0]).keys() - sharded_tags(runs):
        owners = [run.slot for run in runs if SUM in shape(sync_records(run)[tag])]
        assert len(owners) == 2 and len(set(owners)) == 1, "the same slot in both replicas"


def test_shared_kv_heads_add_their_partial_sums_only(workers):
    runs = one_step(workers, (4, 4), SHARED_KV)
    for run in runs:
        for records in sync_records(run).values():
            assert shape(records) in ([SUM], [PRE, SUM, POST])
    # 2 KV heads on 4 slots: two holders each, slots 0 and 2 own them; slots 1 and 3 send theirs and nothing else.
    travelled = {run.slot: sum(r.sent_bytes for rs in sync_records(run).values() for r in rs[:1] if shape([r]) == [PRE])
                 for run in runs if run.replica == 0}  # fmt: skip
    kv_bytes = sum(weights(run, "k_proj") + weights(run, "v_proj") for run in runs if (run.replica, run.slot) == (0, 1))
    assert travelled == {0: 0, 1: kv_bytes, 2: 0, 3: kv_bytes}


def test_the_number_of_collectives_does_not_depend_on_the_number_of_parameters(workers):
    shallow = one_step(workers, (4, 3), ModelConfig(layers=1))
    deep = one_step(workers, (4, 3), ModelConfig(layers=6, ffn=5, width=16))
    for few, many in zip(shallow, deep, strict=True):
        assert len(many.weights[0]) > 3 * len(few.weights[0])
        per_bucket = max(len(records) for records in sync_records(many).values())
        assert per_bucket <= 3
        assert len(sync_records(many)) < len(many.weights[0]) / 3
    for run in [*shallow, *deep]:
        votes = [record for record in run.records if record.tag == "vote"]
        assert len(votes) == (3 if run.slot == 0 else 2)


def test_nothing_of_the_sync_travels_on_forward_channels(workers):
    for run in one_step(workers, (3, 2), MHA):
        channels = {record.tag.rstrip("0123456789"): record.channel for record in run.records}
        assert channels["forward"] == channels["backward"] == "tensor_parallel"
        assert all(r.channel != "tensor_parallel" for rs in sync_records(run).values() for r in rs)


@pytest.mark.parametrize("model", [MHA, SHARED_KV], ids=["mha", "shared-kv"])
@pytest.mark.parametrize("degrees", [(4, 3), (4, 3, 2)], ids=str)
def test_bytes_of_each_bucket(workers, degrees, model):
    """An extra slot sends the bytes of its sharded parameters and gets as many, bucket by bucket; a core slot sums."""
    runs = one_step(workers, degrees, model)
    names = sharded_buckets(runs[0])
    for run in runs:
        held = {tag: sum(run.weights[0][name].nbytes for name in group) for tag, group in names.items()}
        records = {tag: {r.channel + str(i): r for i, r in enumerate(sync_records(run)[tag])} for tag in names}
        if run.slot >= min(degrees):
            assert {tag: (r["reshard0"].sent_bytes, r["reshard1"].received_bytes) for tag, r in records.items()} == {
                tag: (size, size) for tag, size in held.items()
            }
        elif len(degrees) == 2 and model is MHA and run.replica == 1:
            assert {tag: [(r.channel, r.sent_bytes) for r in each.values()] for tag, each in records.items()} == {
                tag: [("data_parallel", size)] for tag, size in held.items()
            }
    sums = [  # of a slot: the same units everywhere, each once
        {tag: sum(r.sent_bytes for r in sync_records(run)[tag] if r.channel == "data_parallel") for tag in names}
        for run in runs
        if run.slot < min(degrees)
    ]
    dense = {tag: 8 * sum(runs[0].shapes[name].numel() for name in group) for tag, group in names.items()}
    slots = min(degrees)
    for replica in range(len(degrees)):
        mine = sums[replica * slots : (replica + 1) * slots]
        assert {tag: sum(each[tag] for each in mine) for tag in names} == dense, "every unit is summed once"


def sharded_buckets(run: RankRun) -> dict[str, list[str]]:
    """Names of the sharded parameters of each bucket, cut as the sync cuts them."""
    names = list(run.layouts)
    sizes = [ParameterSize(run.layouts[name], run.shapes[name].numel() * 8, "") for name in names]
    cuts = enumerate(cut_buckets(sizes, int(0.02 * 2**20)))
    return {f"bucket{number}": [names[i] for i in cut.params] for number, cut in cuts if cut.kind is BucketKind.SHARDED}


def sharded_tags(runs: list[RankRun]) -> set[str]:
    """Buckets that the extra slot sends from before the sum: only sharded ones travel there."""
    extra = next(run for run in runs if run.slot == 3)
    return {tag for tag, records in sync_records(extra).items() if shape(records) == [PRE, POST]}


def local_bytes(run: RankRun) -> int:
    return sum(tensor.nbytes for tensor in run.weights[0].values())


def sharded_bytes(run: RankRun) -> int:
    return sum(
        tensor.nbytes for name, tensor in run.weights[0].items() if not isinstance(run.layouts[name], Replicated)
    )


def weights(run: RankRun, part: str) -> int:
    return sum(tensor.nbytes for name, tensor in run.weights[0].items() if part in name)
