"""A Hydra job that notes its configuration and directories, before and after `fit`."""

import json
import os

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd
from standin import Boring, build_trainer

ConfigStore.instance().store(
    "config", {"directory": "???", "lr": 0.1, "names": ["a"], "hydra": {"job": {"chdir": True}}}
)


@hydra.main(version_base=None, config_name="config")
def main(config) -> None:
    trainer, notes = build_trainer(config.directory)
    seen = {"cwd": os.getcwd(), "original": get_original_cwd(), "lr": config.lr, "names": list(config.names)}
    seen["job"] = HydraConfig.get().job.name
    notes.note("before", json.dumps(seen))
    trainer.fit(Boring())
    notes.note("after")


if __name__ == "__main__":
    main()
