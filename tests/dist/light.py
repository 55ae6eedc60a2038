"""``python light.py run ...`` is ``python -m lightning_ntp.run ...``, and ``light.py cli ...`` is ``lightning-ntp ...``,
without the import of Lightning."""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.support.light import skip_lightning

    skip_lightning()
    module = {"run": "lightning_ntp.run", "cli": "lightning_ntp.cli.main"}[sys.argv.pop(1)]
    sys.exit(importlib.import_module(module).main())
