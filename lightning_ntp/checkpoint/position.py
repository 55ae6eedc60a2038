"""Where the loaders' positions stand in a file: not where plain Lightning looks for them.

A plain Trainer that finds positions in a file wants as many loaders that take them, and refuses the file otherwise. Its
own DataLoader takes none, so there they would make every file of ours one that plain Lightning cannot go on from.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

_KEY = "lightning_ntp"
_THEIRS = "combined_loader"


def set_positions_apart(checkpoint: dict[str, Any]) -> None:
    """Move the positions from Lightning's place in ``checkpoint`` to ours, before it is written."""
    positions = _fit_loop(checkpoint).pop(_THEIRS, None)
    if positions:
        checkpoint[_KEY] = {"loaders": positions}


def put_positions_back(checkpoint: dict[str, Any]) -> None:
    """Move them to where Lightning looks for them, once read; warn if the file is from elsewhere and has none."""
    state = _fit_loop(checkpoint)
    theirs = state.pop(_THEIRS, None)
    if _KEY in checkpoint:
        state[_THEIRS] = checkpoint[_KEY]["loaders"]
    elif _is_inside_epoch(checkpoint):
        rank_zero_warn(
            "The checkpoint is from inside an epoch, and from a run without strategy='ntp', which "
            f"{'kept its place in the data in another form' if theirs else 'did not keep its place in the data'}: "
            "the rest of the epoch begins at its first sample again. Go on from a file of the end of an epoch to see "
            "every sample once."
        )


def _fit_loop(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})


def _is_inside_epoch(checkpoint: dict[str, Any]) -> bool:
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    return progress.get("current", {}).get("ready", 0) > 0 and not progress.get("is_last_batch", True)
