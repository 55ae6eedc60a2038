"""Loader positions in a file: kept from plain Lightning, found again, and missed loudly."""

from __future__ import annotations

import warnings

import pytest

from lightning_ntp.checkpoint import put_positions_back, set_positions_apart


def file(ready: int = 3, is_last_batch: bool = False, **positions: list) -> dict:
    progress = {"total": {"ready": ready}, "current": {"ready": ready}, "is_last_batch": is_last_batch}
    return {"loops": {"fit_loop": {"state_dict": dict(positions), "epoch_loop.batch_progress": progress}}}


def test_round_trip():
    checkpoint = file(combined_loader=[{"cursor": 5}])
    set_positions_apart(checkpoint)
    assert checkpoint["loops"]["fit_loop"]["state_dict"] == {}
    with warnings.catch_warnings(action="error"):
        put_positions_back(checkpoint)
    assert checkpoint["loops"]["fit_loop"]["state_dict"] == {"combined_loader": [{"cursor": 5}]}


@pytest.mark.parametrize(
    ("checkpoint", "told"),
    [
        (file(), "did not keep its place in the data"),
        (file(combined_loader=[{"theirs": 1}]), "kept its place in the data in another form"),
    ],
)
def test_a_foreign_file_from_inside_an_epoch(checkpoint, told):
    with pytest.warns(UserWarning, match=told):
        put_positions_back(checkpoint)
    assert "combined_loader" not in checkpoint["loops"]["fit_loop"]["state_dict"]


@pytest.mark.parametrize("checkpoint", [file(is_last_batch=True), file(ready=0), {"state_dict": {}}])
def test_nothing_to_miss(checkpoint):
    with warnings.catch_warnings(action="error"):
        put_positions_back(checkpoint)
        set_positions_apart(checkpoint)
    assert "lightning_ntp" not in checkpoint
