"""The list of mutants follows the code."""

from pathlib import Path

from tests.mutants import MUTANTS, check, read_mutants

ROOT = Path(__file__).parent.parent


def test_every_mutant_has_its_snippet_and_its_tests() -> None:
    mutants = read_mutants(MUTANTS)
    assert check(mutants, ROOT) == len(mutants) > 100
