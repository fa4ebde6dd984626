"""The `secateur` command: parse, then one library call.

Torch is imported where it is used, so that `secateur --help` answers at once.
"""

from secateur.cli.command import main

__all__ = ["main"]
