"""Copies of a model that is written down are what copy.deepcopy gives."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur.channels.copies import WRITTEN, copy_model, copy_with, write_down
from secateur.channels.shrink import tensors_of


class Inner(nn.Module):
    """Keeps tensors that share memory, a tuple of lists, and a hook that is one of its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.register_buffer("scale", torch.arange(4.0))
        self.tail = self.scale[2:]  # pyright: ignore
        self.notes: Any = ([1, 2], {"last": None})
        self.conv.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.notes[1]["last"] = tuple(output.shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.scale[:, None, None]  # pyright: ignore


def network() -> Any:
    class Local(nn.Sequential):
        """A class that cannot be found by its name."""

    model = Local(Inner(), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    model.stride = torch.tensor([8, 16])  # pyright: ignore
    model.choose = lambda x: x  # pyright: ignore
    return model


def written(model: nn.Module) -> Any:
    assert write_down(model) is model
    assert model in WRITTEN
    return copy_model(model)


def test_a_copy_has_its_own_parts() -> None:
    model = network()
    copied = written(model)
    assert type(copied) is type(model)
    assert copied.choose is model.choose
    for name, tensor in tensors_of(model).items():
        other = tensors_of(copied)[name]
        assert torch.equal(tensor, other)
        assert type(tensor) is type(other)
        assert tensor.requires_grad == other.requires_grad
        assert tensor.data_ptr() != other.data_ptr()
    assert torch.equal(copied.stride, model.stride)
    copied.stride.zero_()
    assert model.stride.tolist() == [8, 16]
    assert copied[0].notes[0] is not model[0].notes[0]


def test_hooks_and_shared_memory_stay_within_the_copy() -> None:
    model = network()
    copied = written(model)
    copied(torch.ones(1, 3, 2, 2))
    assert copied[0].notes[1]["last"] == (1, 4, 2, 2)
    assert model[0].notes[1]["last"] is None
    copied[0].scale.zero_()
    assert not bool(copied[0].tail.any())
    assert bool(model[0].tail.all())


def test_a_method_that_hides_another_of_its_name_is_kept() -> None:
    model = network()

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.conv(x) + 1

    model[0].forward = types.MethodType(forward, model[0])
    copied = written(model)
    assert copied[0].forward.__self__ is copied[0]
    assert torch.equal(copied[0](torch.ones(1, 3, 2, 2)), model[0](torch.ones(1, 3, 2, 2)))


def test_known_tensors_take_the_place_of_their_originals() -> None:
    model = write_down(network())
    weight = model.get_parameter("2.weight")
    copied = copy_with(model, [(weight, weight.data[:1])])
    assert copied.get_parameter("2.weight").shape == (1, 4, 1, 1)
    assert model.get_parameter("2.weight").shape == (2, 4, 1, 1)


class Counted(nn.ReLU):
    """Says itself how it is copied."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        Counted.copies += 1
        return Counted()


def test_what_says_how_it_is_copied_is_not_written_down() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Counted())
    assert write_down(model) not in WRITTEN
    copy_model(model)
    assert Counted.copies == 1


@pytest.mark.parametrize("tensor", [torch.ones(2, 3).T, torch.ones(4)[1:], torch.zeros(()), torch.ones(2).bool()])
def test_plain_tensors_are_copied_as_deepcopy_does(tensor: Tensor) -> None:
    model = nn.Conv2d(3, 4, 1)
    model.kept = tensor  # pyright: ignore
    ours: Any = copy_model(model).kept
    expected: Any = copy.deepcopy(model).kept
    assert torch.equal(ours, expected)
    assert ours.dtype == expected.dtype
    assert ours.stride() == expected.stride()
    assert ours.storage_offset() == expected.storage_offset()


def test_a_model_that_is_gone_is_forgotten() -> None:
    before = len(WRITTEN)
    model = write_down(nn.Conv2d(3, 4, 1))
    assert len(WRITTEN) == before + 1
    del model
    assert len(WRITTEN) == before
