"""What ``self.log`` has collected in a training epoch, described without its values."""

from __future__ import annotations

from typing import Any

from lightning_ntp.compat.lightning import private

_RESULT = "lightning.pytorch.trainer.connectors.logger_connector.result"
_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "dataloader_idx")


def logged_keys(trainer: Any) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Key, description and way of syncing of each number that was logged in this epoch, in order."""
    described = []
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        if metric.is_tensor:
            meta, sync = metric.meta, metric.meta.sync
            facts = {name: getattr(meta, name) for name in _FIELDS} | {"reduce_fx": meta.reduce_fx.__name__}
            how = {"_should": sync.should, "rank_zero_only": sync.rank_zero_only, "_op": sync.op}
            described.append((key, facts, how))
    return described


def add_logged_keys(trainer: Any, described: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    """Let this member sync the keys that others have logged before it came; they count nothing of its own.

    Keys come in the others' order: members sync one after the other.
    """
    metadata, sync_of, metric_of = (private(_RESULT, name) for name in ("_Metadata", "_Sync", "_ResultMetric"))
    results = trainer.fit_loop.epoch_loop._results
    own = dict(results)
    results.clear()
    for key, facts, how in described:
        if key in own:
            results[key] = own.pop(key)
            continue
        meta = metadata(**facts)
        meta.sync = sync_of(fn=trainer.strategy.reduce, **how)
        results[key] = metric_of(meta, is_tensor=True).to(trainer.strategy.root_device)
    results.update(own)
