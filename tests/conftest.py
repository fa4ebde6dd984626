"""Set up before any test imports torch."""

import functools
import gc
import inspect
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
import torch  # noqa: E402

from secateur.pruning import settings  # noqa: E402

# Nobody cuts the power while the tests run.
os.fsync = lambda handle: None

# Widths that do not depend on the machine: by default they would be multiples of 8 on some.
settings.is_x86 = lambda: False

# Every torch.manual_seed would format the stack once for each kind of accelerator, for an error on its first use.
for kind in (torch.cuda, torch.xpu, torch.mtia):
    kind.traceback = SimpleNamespace(format_stack=list)

# A command line is read with the sources of its classes, which Python looks up by parsing their whole files.
source_of_class, source_of_other = functools.cache(inspect.findsource), inspect.findsource


def findsource(thing: Any) -> Any:
    return (source_of_class if isinstance(thing, type) else source_of_other)(thing)


inspect.findsource = findsource


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
