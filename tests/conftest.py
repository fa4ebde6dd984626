"""Set up before any test imports torch."""

import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).parent

# Two workers share two cores, and so do the commands they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
PATHS = [str(HERE / "shim"), str(HERE / "support"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, PATHS))

# A shell starts what runs in the background deaf to Ctrl-C, and so would be the commands that tests stop by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Python reads sitecustomize at start-up only, and may have found another one than ours then.
sys.modules.pop("sitecustomize", None)
import sitecustomize  # noqa: E402, F401

from secateur.pruning import settings  # noqa: E402

# Widths that do not depend on the machine: by default they would be multiples of 8 on some.
settings.is_x86 = lambda: False
