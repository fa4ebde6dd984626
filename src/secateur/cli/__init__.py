"""The `secateur` command: parse, then one library call.

Torch, tyro and rich are imported where they are used, so that `secateur --help` answers at once and a missing extra
is a sentence, not a traceback.
"""

from secateur.cli.command import main

__all__ = ["main"]
