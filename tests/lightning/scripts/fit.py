"""python fit.py DIRECTORY several | once | forever

`several`: fit, fit on, test, then fit with another Trainer until rank 1 raises. `forever`: until somebody stops it.
"""

import sys

from standin import Boring, build_trainer

if __name__ == "__main__":
    directory, mode = sys.argv[1:]
    endless = {"max_epochs": -1, "limit_train_batches": 1.0} if mode == "forever" else {}
    trainer, notes = build_trainer(directory, **endless)
    notes.note("before")
    trainer.logger.log_hyperparams({"lr": 0.1})
    _ = trainer.logger.experiment
    model = Boring()
    trainer.fit(model)
    if mode == "several":
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model)
        trainer.test(model, verbose=False)
    notes.note("after", f"{trainer.global_step} {trainer.strategy.degrees}")
    if mode == "several":
        trainer, notes = build_trainer(directory, logger=False, enable_checkpointing=False)
        trainer.fit(Boring(failing=True))
        notes.note("never")
