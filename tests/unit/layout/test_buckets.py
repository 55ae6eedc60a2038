"""Buckets: cut by dense sizes, in reverse order, kinds and keys apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.layout import BucketCut, BucketKind, ParameterSize, Replicated, cut_buckets
from tests.unit.layout.layout_samples import plain

SHARDED, WHOLE, PARTIAL = plain(8, 4), Replicated(), Replicated(partial_grad=True)

parameter_lists = st.lists(
    st.builds(
        ParameterSize,
        st.sampled_from([SHARDED, WHOLE, PARTIAL]),
        st.integers(0, 40),
        st.sampled_from(["float32", "bfloat16"]),
    ),
    max_size=40,
)


def test_reverse_order_up_to_the_cap():
    params = [ParameterSize(SHARDED, size, "f32") for size in (4, 4, 4, 4, 4)]
    assert [bucket.params for bucket in cut_buckets(params, 10)] == [(4, 3), (2, 1), (0,)]


def test_a_large_parameter_has_a_bucket_of_its_own():
    params = [ParameterSize(SHARDED, size, "f32") for size in (4, 100, 4)]
    assert [bucket.params for bucket in cut_buckets(params, 10)] == [(2,), (1,), (0,)]


def test_a_bucket_filled_to_the_brim():
    params = [ParameterSize(SHARDED, size, "f32") for size in (1, 5, 5)]
    assert [bucket.params for bucket in cut_buckets(params, 10)] == [(2, 1), (0,)]


def test_kinds_and_keys_do_not_mix():
    params = [
        ParameterSize(SHARDED, 1, "f32"),
        ParameterSize(WHOLE, 1, "f32"),
        ParameterSize(SHARDED, 1, "bf16"),
        ParameterSize(PARTIAL, 1, "f32"),
        ParameterSize(WHOLE, 1, "f32"),
    ]
    assert cut_buckets(params, 10) == (
        BucketCut(BucketKind.PARTIAL, "f32", (3,)),
        BucketCut(BucketKind.SHARDED, "bf16", (2,)),
        BucketCut(BucketKind.REPLICATED, "f32", (4, 1)),
        BucketCut(BucketKind.SHARDED, "f32", (0,)),
    )


def test_no_parameters_no_buckets():
    assert cut_buckets([], 10) == ()


@given(parameter_lists, st.integers(1, 60))
def test_every_parameter_once_under_the_cap_in_launch_order(params, cap):
    buckets = cut_buckets(params, cap)
    assert sorted(index for bucket in buckets for index in bucket.params) == list(range(len(params)))
    last_ready = [bucket.params[-1] for bucket in buckets]
    assert last_ready == sorted(last_ready, reverse=True)
    for bucket in buckets:
        assert list(bucket.params) == sorted(bucket.params, reverse=True)
        assert {(params[i].kind, params[i].key) for i in bucket.params} == {(bucket.kind, bucket.key)}
        assert len(bucket.params) == 1 or sum(params[i].dense_bytes for i in bucket.params) <= cap


@given(parameter_lists, st.integers(1, 60))
def test_no_bucket_is_closed_early(params, cap):
    """The next parameter of the same kind and key would not have fitted."""
    by_group: dict[tuple, list[BucketCut]] = {}
    for bucket in cut_buckets(params, cap):
        by_group.setdefault((bucket.kind, bucket.key), []).append(bucket)
    for buckets in by_group.values():
        for bucket, following in zip(buckets, buckets[1:], strict=False):
            filled = sum(params[i].dense_bytes for i in bucket.params)
            assert filled + params[following.params[0]].dense_bytes > cap


@given(st.integers(1, 8))
def test_the_cut_is_the_same_at_every_nominal_degree(nominal):
    params = [ParameterSize(plain(8, nominal), size, "f32") for size in (4, 6, 3, 9)]
    assert [bucket.params for bucket in cut_buckets(params, 10)] == [(3,), (2, 1), (0,)]
