"""python fit.py DIRECTORY twice | forever

`twice`: fit, test, then rank 1 raises. `forever`: fit until somebody stops it.
"""

import os
import sys

from standin import BoringModel, build_trainer

if __name__ == "__main__":
    directory, mode = sys.argv[1:]
    endless = {"max_epochs": -1, "limit_train_batches": 1.0} if mode == "forever" else {}
    trainer, notes = build_trainer(directory, **endless)
    notes.note("before")
    trainer.logger.log_hyperparams({"lr": 0.1})
    _ = trainer.logger.experiment
    trainer.fit(BoringModel())
    trainer.test(BoringModel(), verbose=False)
    notes.note("after")
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has had enough")
