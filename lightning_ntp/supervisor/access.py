"""A user's way into a job that runs: ``lightning-ntp drain`` and ``join`` need its store's address and its token."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)


class Access:
    """One line on stderr that says where the store is, and a file for the user's eyes only with a token made here.

    Args:
        address: Of the store.
        token: The job's secret; ``None`` if the user gave it.
    """

    def __init__(self, address: str, token: str | None) -> None:
        self._address, self._token = address, token
        self._directory: str | None = None

    def open(self) -> None:
        """Write the file and the line. A job runs as well without: a full disk is only told."""
        where = "as given"
        if self._token is not None:
            try:
                where = f"in {self._write(self._token)}"
            except OSError as error:
                log.warning("the token is not written, so lightning-ntp drain and join cannot be used: %s", error)
                return
        how = "for lightning-ntp drain and join: --store, --token-file"
        print(f"lightning_ntp: store {self._address}, token {where} ({how})", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the file."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _write(self, token: str) -> Path:
        self._directory = tempfile.mkdtemp(prefix="lightning_ntp-")
        path = Path(self._directory, "token")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{token}\n")
        return path
