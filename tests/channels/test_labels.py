"""Connected components and the training-mode watch, against the plain way of doing it."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import secateur
from secateur.channels.labels import connect
from secateur.channels.reasons import Kind


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_components_equal_a_plain_union_find(case: tuple[int, list[tuple[int, int]]]) -> None:
    size, pairs = case
    parent = list(range(size))

    def find(x: int) -> int:
        while parent[x] != x:
            x = parent[x]
        return x

    for a, b in pairs:
        low, high = sorted((find(a), find(b)))
        parent[high] = low
    ties = [(2 * torch.tensor([a]), 2 * torch.tensor([b]) + 1) for a, b in pairs]
    assert connect(size, ties).tolist() == [find(x) for x in range(size)]


def test_a_long_chain_is_one_component() -> None:
    count = 20_000
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    assert int(connect(count, [(2 * order[:-1], 2 * order[1:])]).max()) == 0


def test_training_mode_is_watched_when_code_asks_for_it() -> None:
    class Hidden(nn.Module):
        """Gives its inner channels away in training mode only, without a parameter of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> object:
            x = self.first(x)
            return (self.second(x), x) if self.training else self.second(x)

    graph = secateur.analyze(Hidden(), torch.randn(1, 3, 4, 4))
    assert not graph.groups
    assert {f.name: f.reason for f in graph.frozen}["first"].kind is Kind.OUTPUT
    assert "training" not in vars(nn.Module)


def test_values_that_leave_for_python_keep_their_channels() -> None:
    class Numpy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            shares = x.mean((0, 2, 3)).tolist()
            return self.second(x) * len(shares)

    graph = secateur.analyze(Numpy(), torch.randn(1, 3, 4, 4), probe=False)
    assert {f.name: f.reason for f in graph.frozen}["first"].kind is Kind.READ_BY_PYTHON


def test_what_is_not_counted_is_said() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.memory, self.head = nn.Conv1d(3, 8, 3), nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.memory(self.body(x).relu().transpose(1, 2))[0].mean(1))

    graph = secateur.analyze(Recurrent(), torch.randn(1, 3, 12))
    assert "the MACs of recurrent layers are not counted: memory" in graph.notes


def test_a_branch_taken_by_value_is_the_one_that_is_analysed() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
            self.bright, self.dark = nn.Conv2d(8, 2, 1), nn.Conv2d(8, 2, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(x))
            bright = bool(x.abs().sum() > 0)
            return self.bright(x) if bright else self.dark(x)

    graph = secateur.analyze(Branch(), torch.ones(1, 3, 4, 4))
    frozen = {f.name: f.reason for f in graph.frozen}
    assert "bright" in frozen
    assert {row.name for row in graph.layers} == {"first", "bright"}
    assert frozen["dark"].kind is Kind.UNUSED
    assert any("the code looks at values" in note for note in graph.notes)
    assert any("never run on this example" in note and ": dark;" in note for note in graph.notes)
