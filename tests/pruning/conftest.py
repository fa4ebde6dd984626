"""Let the tests of this folder share their helpers, and those of the channel analysis."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "channels")]
