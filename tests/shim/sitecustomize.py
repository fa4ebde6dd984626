"""Lets torchvision run beside the CPU build of torch, whose compiled operators it cannot load.

Python imports this file at start-up when its folder is on PYTHONPATH. It loads nothing then: a hook declares the
missing operators just before torchvision is first imported. Nothing a user installs contains it.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder


class TorchvisionFinder(MetaPathFinder):
    """Finds torchvision as usual, and wraps its import."""

    def find_spec(self, fullname, path=None, target=None):
        spec = PathFinder.find_spec(fullname, path) if fullname == "torchvision" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_with_operators(module):
            import torchvision_operators

            missing = torchvision_operators.declare_if_missing(spec.origin)
            execute(module)
            if missing:
                torchvision_operators.announce()

        spec.loader.exec_module = execute_with_operators
        return spec


sys.meta_path.insert(0, TorchvisionFinder())
