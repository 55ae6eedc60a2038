"""A member without torch: leaves its process id (and a child's) in a directory, then ends as its rank is told.

python behave.py DIRECTORY RANK:HOW ...     HOW = code, -signal, `sleep`, `stubborn`, `tidy`
"""

import os
import pathlib
import signal
import subprocess
import sys
import time


def main(directory: str, *orders: str) -> int:
    rank = os.environ["RANK"]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    how = dict(order.split(":") for order in orders).get(rank, "0")
    if how == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif how == "tidy":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0 if child.poll() is None else 9))
    line = f"{os.getpid()} {os.getpgid(0)} {child.pid} {os.environ['LOCAL_RANK']} {os.environ['WORLD_SIZE']}"
    partial = pathlib.Path(directory, f"{rank}.partial")
    partial.write_text(line)
    partial.rename(partial.with_suffix(".pid"))
    if how in ("sleep", "stubborn", "tidy"):
        time.sleep(60)
    elif how.startswith("-"):
        os.kill(os.getpid(), -int(how))
        time.sleep(60)
    return int(how)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
