"""Code that compares sizes: the widths at which it goes another way are found, and tried."""

import copy
import math
import pickle
from collections.abc import Callable
from threading import Thread

import pytest
import torch
from gated import Custom
from oracle import assert_exact, randomize_
from torch import Tensor, nn

import secateur
from secateur import Plan
from secateur.channels.comparisons import Comparisons, Width

PICTURES = torch.randn(2, 3, 6, 6, dtype=torch.float64)
Asked = Callable[[Tensor, Tensor], object]


def asking(asked: Asked) -> nn.Module:
    """Doubles what it computes where the answer, from 50 and 20 channels, is yes."""

    def forward(m: Custom, x: Tensor) -> Tensor:
        y = m.a(x).relu()
        z = m.b(y).relu()
        return m.c(z * 2 if asked(y, z) else z)

    return randomize_(Custom(forward, a=nn.Conv2d(3, 50, 1), b=nn.Conv2d(50, 20, 1), c=nn.Conv2d(20, 2, 1)))


QUESTIONS: dict[str, tuple[Asked, set[str]]] = {
    "threshold": (lambda y, z: y.shape[1] >= 47, {"a"}),
    "number": (lambda y, z: z.size(1) == 13, {"b"}),
    "remainder": (lambda y, z: y.size(-3) % 10 == 0, {"a"}),
    "whole shape": (lambda y, z: y.shape[1:] == (41, 6, 6), {"a"}),
    "computed": (lambda y, z: y.size()[1] // 2 - z.shape[1] == 11, {"b"}),
    "truth": (lambda y, z: y.shape[1] - 2 * z.shape[1] - 10, {"a", "b"}),
    "largest": (lambda y, z: max(z.shape[1] + 5, y.shape[1] - 22) != z.shape[1] + 5, {"a"}),
    "two widths": (lambda y, z: y.shape[1] == 2 * z.shape[1] + 13, {"a", "b"}),
    "sum": (lambda y, z: sum([y.shape[1], z.shape[1]]) < 68, {"a", "b"}),
    "rounded up": (lambda y, z: -(-y.shape[1] // 8) == 6, {"a"}),
    "bits": (lambda y, z: (y.shape[1] & 7) == 5 or (z.shape[1] ^ 13) << 1 == 0, {"a", "b"}),
    "rest": (lambda y, z: divmod(y.shape[1], 12)[1] == 11 or divmod(13, z.shape[1]) == (1, 0), {"a", "b"}),
    "square": (lambda y, z: y.shape[1] ** 2 == 47**2, {"a"}),
    "half": (lambda y, z: y.shape[1] / 2 == 23.5, {"a"}),
    "tenth": (lambda y, z: math.ceil(z.shape[1] * 0.1) - round(z.shape[1] / 10) != 0, {"b"}),
    "root": (lambda y, z: y.shape[1] ** 0.5 == 7, {"a"}),
    "floating point": (lambda y, z: y.shape[1] == 47.0, {"a"}),
    "always": (lambda y, z: y.shape[1] > 0, set()),
    "picture": (lambda y, z: y.shape[2] == 6, set()),
}


@pytest.mark.parametrize(("asked", "stay"), QUESTIONS.values(), ids=list(QUESTIONS))
def test_every_answer_is_tried_both_ways(asked: Asked, stay: set[str]) -> None:
    model = asking(asked)
    graph = secateur.analyze(model, PICTURES)
    assert {group.name for group in graph.groups} == {"a", "b"} - stay
    for seed, share in enumerate((0.02, 0.1, 0.4, 0.8)):
        assert_exact(model, Plan.random(graph, share, seed), (PICTURES,), cost=False)


@pytest.mark.parametrize(
    ("asked", "stay"),
    [
        (lambda m, y: m.a.out_channels == 47, {"a"}),
        (lambda m, y: y.shape[1] - m.b.out_channels == 27, {"a"}),
        (lambda m, y: y.shape[1] != m.b.in_channels, set[str]()),
        (lambda m, y: m.a.bias.numel() == 47, {"a"}),
        (lambda m, y: y.nelement() == 2 * 47 * 36, {"a"}),
    ],
)
def test_sizes_that_layers_keep(asked: Callable[[Custom, Tensor], bool], stay: set[str]) -> None:
    def forward(m: Custom, x: Tensor) -> Tensor:
        y = m.a(x).relu()
        return m.c(m.b(y).relu() * (2 if asked(m, y) else 1))

    model = Custom(forward, a=nn.Conv2d(3, 50, 1), b=nn.Conv2d(50, 20, 1), c=nn.Conv2d(20, 2, 1))
    assert {group.name for group in secateur.analyze(model, PICTURES.float()).groups} == {"a", "b"} - stay
    assert type(model.a.out_channels) is int


def test_sizes_are_plain_before_and_after() -> None:
    before = Tensor.shape, Tensor.size, Tensor.numel
    seen: list[object] = []

    def fails(y: Tensor, z: Tensor) -> bool:
        seen.append(y.shape[1])
        raise ValueError("no such width")

    with pytest.raises(secateur.InvalidModel, match="no such width"):
        secateur.analyze(asking(fails), PICTURES)
    assert (Tensor.shape, Tensor.size, Tensor.numel) == before
    assert type(PICTURES.shape[0]) is int
    width = next(number for number in seen if isinstance(number, Width))
    for number, plain in ((width, int), (width / 4, float)):
        made = (copy.deepcopy(number), pickle.loads(pickle.dumps(number)), type(number)(number), type(number)())
        assert [type(each) for each in made] == [plain] * 4


def test_analyses_within_others_and_beside_them() -> None:
    before = Tensor.shape, Tensor.size, Tensor.tolist
    found: list[list[str]] = []

    def analyses(y: Tensor, z: Tensor) -> bool:
        small = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
        return len(secateur.analyze(small, torch.ones(1, 3, 4, 4), probe=False).groups) != 1

    def analyse() -> None:
        found.append([group.name for group in secateur.analyze(asking(analyses), PICTURES, probe=False).groups])

    threads = [Thread(target=analyse) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["a", "b"]] * 3
    assert (Tensor.shape, Tensor.size, Tensor.tolist) == before


def test_code_that_takes_plain_numbers_alone() -> None:
    def exacting(y: Tensor, z: Tensor) -> bool:
        if type(y.shape[1]) is not int:
            raise TypeError("not an int")
        return False

    assert [group.name for group in secateur.analyze(asking(exacting), PICTURES).groups] == ["a", "b"]


def test_comparisons_without_end() -> None:
    def tireless(y: Tensor, z: Tensor) -> bool:
        total = 0
        for _ in range(3000):
            total = total + y.shape[1]
            if total == -7:
                return True
        return False

    assert [group.name for group in secateur.analyze(asking(tireless), PICTURES).groups] == ["a", "b"]


def test_what_cannot_be_computed_is_no_answer() -> None:
    """At another width the code divides by zero; the comparison that it would have made says nothing."""
    for asked in (lambda y, z: 100 // (z.shape[1] - 19) > 3, lambda y, z: 1 << (z.shape[1] - 15) > 3):
        assert "b" not in {group.name for group in secateur.analyze(asking(asked), PICTURES).groups}


def test_sizes_that_an_earlier_analysis_left_behind() -> None:
    """Their axes are not among those of this one."""
    left: list[int] = []

    def remembers(y: Tensor, z: Tensor) -> bool:
        left.append(z.shape[1])
        return y.shape[1] - left[0] == 27

    for _ in range(2):
        assert "a" not in {group.name for group in secateur.analyze(asking(remembers), PICTURES).groups}


def test_tensors_with_sizes_of_another_kind() -> None:
    def nested(y: Tensor, z: Tensor) -> bool:
        ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
        return ragged.size(0) != 2 or ragged.size(2) != 3

    assert len(secateur.analyze(asking(nested), PICTURES, probe=False).groups) == 2


def test_nothing_is_noted_of_unknown_tensors() -> None:
    comparisons = Comparisons()
    with comparisons.noting(lambda tensor: []):
        assert type(PICTURES.shape[1]) is int
        assert PICTURES.size(1) == 3
