"""The table of rules: for every operator that has a rule, a snippet and what the analysis must find in it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rule_rows_contractions
import rule_rows_mixes
import rule_rows_moves
import rule_rows_ties
import torch
import torchvision  # noqa: F401  # registers its operators
from oracle import assert_exact, random_plan, randomize_
from rule_kernels import other_kernels
from rule_rows import Group, Row
from sandwich import IMAGE, Sandwich, kinds

import secateur
from secateur import Plan
from secateur.channels.reasons import Kind
from secateur.channels.rules import RULES, Call

THEMES = (rule_rows_ties, rule_rows_moves, rule_rows_mixes, rule_rows_contractions)
ROWS: list[Row] = [row for theme in THEMES for row in theme.ROWS]
ABSENT = {
    "aten::_cat": "only older versions of torch have it",
    "torchvision::roi_pool": "it is compiled, and tests/shim has no replacement for it",
}
"""Operators that have a rule but do not exist here, so that no snippet can call them."""


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    with other_kernels():
        yield


def test_every_rule_has_a_row() -> None:
    assert {name for row in ROWS for name in row.names} == RULES.keys() - ABSENT.keys()


@pytest.mark.parametrize("name", ABSENT)
def test_an_operator_without_a_row_does_not_exist(name: str) -> None:
    namespace, _, operator = name.partition("::")
    assert name in RULES
    assert not hasattr(getattr(torch.ops, namespace), operator)


def _cases(rows: list[Row]) -> list[Any]:
    """Parameters named after the operators; a row that is known to be wrong must fail."""
    return [
        pytest.param(
            row,
            id=f"{row.operators} {row.note}".strip(),
            marks=[pytest.mark.xfail(strict=True, reason=row.wrong)] if row.wrong else [],
        )
        for row in rows
    ]


def _groups(graph: secateur.ChannelGraph) -> list[Group]:
    """What is coupled, without biases and the first norm, which always follow, and without consumers."""
    return [
        {
            member.tensor.removesuffix(".weight"): member.indices.tolist()
            for member in group.members
            if member.role != "consumes"
            and not member.tensor.startswith("norm.")
            and not member.tensor.endswith("bias")
        }
        for group in graph.groups
    ]


def _recorded(name: str, applied: set[str]) -> Callable[[Call], None]:
    """The rule of an operator, which also records that it was applied."""
    rule = RULES[name]

    def apply(call: Call) -> None:
        applied.add(name)
        rule(call)

    return apply


@pytest.mark.parametrize("row", _cases(ROWS))
def test_rule(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups and reasons are as expected, and masked equals shrunk.

    Without the probe, which would hide a wrong rule.
    """
    applied: set[str] = set()
    for name in row.names:
        monkeypatch.setitem(RULES, name, _recorded(name, applied))
    model = randomize_(Sandwich(row.body, row.inner, **row.parts))
    graph = secateur.analyze(model, IMAGE, probe=False)
    assert applied == row.names, "the snippet does not call every operator of its row"
    assert not [note for note in graph.notes if "the rule of" in note]
    assert _groups(graph) == row.expected.groups, str(graph)
    for layer, kind in row.expected.stays.items():
        assert kinds(graph)[layer] in (kind, *([] if kind else Kind))
    if graph.groups:
        for plan in (Plan.random(graph, 0.01, seed=1), random_plan(graph, seed=2, share=0.5)):
            assert_exact(model, plan, (IMAGE,), cost=row.cost)


@pytest.mark.parametrize("row", _cases([row for row in ROWS if row.expected.inexact]))
def test_inexact_channels_can_be_admitted(row: Row) -> None:
    model = randomize_(Sandwich(row.body, row.inner, **row.parts))
    graph = secateur.analyze(model, IMAGE, probe=False, inexact=True)
    group = graph.group("first")
    assert group.size == 8
    assert group.inexact is not None
    assert group.inexact.kind is row.expected.stays["first"]
    small = secateur.shrink(model, Plan.random(graph, 0.5))
    with torch.no_grad():
        assert small(IMAGE).isfinite().all()
