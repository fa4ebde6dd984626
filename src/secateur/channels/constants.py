"""Tensors that modules keep as plain attributes: constants, as numbers are, unless the forward pass changes them.

Code that reads one, as a detector reads its strides, does not depend on the values of parameters or of the input.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

Sources = frozenset[int]
"""Numbers of attributes."""


class Constants:
    """Follows constants through one forward pass."""

    def __init__(self, model: nn.Module, mark: str) -> None:
        """mark: the name under which tensors are marked."""
        self._mark = mark
        self._attributes: list[tuple[nn.Module, str, Tensor]] = []
        self._read: Sources = frozenset()
        self._written: Sources = frozenset()
        for module in model.modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    setattr(value, mark, self._sources([value]) | {len(self._attributes)})
                    self._attributes.append((module, name, value))

    def _sources(self, tensors: Iterable[Tensor]) -> Sources:
        """The attributes that these are made of; none if that is not all they are made of."""
        found: Sources = frozenset()
        for tensor in tensors:
            sources = tensor.__dict__.get(self._mark)
            if sources is None:
                return frozenset()
            found |= sources
        return found

    def excuse(self, tensors: list[Tensor]) -> bool:
        """Whether what is read is constant."""
        sources = self._sources(tensors)
        self._read |= sources
        return bool(sources)

    def follow(self, given: list[Tensor], written: list[Tensor], results: list[Tensor]) -> None:
        """An operator has run."""
        for tensor in written:
            self._written |= tensor.__dict__.get(self._mark, frozenset())
        if sources := self._sources(given):
            for result in results:
                setattr(result, self._mark, sources)

    @property
    def changed(self) -> bool:
        """Whether the pass has changed what it read, so that the next one may read something else."""
        other = {n for n, (module, name, tensor) in enumerate(self._attributes) if vars(module).get(name) is not tensor}
        return not self._read.isdisjoint(self._written | other)
