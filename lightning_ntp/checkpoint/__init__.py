"""One file with dense tensors: gathered to the leader, written atomically, read at any degrees.

The file is what a plain Trainer writes, so plain torch and plain Lightning read it, and theirs can be read here. The
leader holds the whole model and its optimizer states in host memory while it saves.
"""

from lightning_ntp.checkpoint.file import read_file, save_file
from lightning_ntp.checkpoint.model import gather_model_state, load_model_state
from lightning_ntp.checkpoint.optimizer import gather_optimizer_state, load_optimizer_state
from lightning_ntp.checkpoint.position import put_positions_back, set_positions_apart

__all__ = [
    "gather_model_state",
    "gather_optimizer_state",
    "load_model_state",
    "load_optimizer_state",
    "put_positions_back",
    "read_file",
    "save_file",
    "set_positions_apart",
]
