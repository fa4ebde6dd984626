"""Which releases of other packages are tried, and the page about them."""

import releases
import releases_page


def test_prereleases_and_old_releases_are_left_out() -> None:
    assert releases.choose(["2.0rc1", "1.10.0", "1.9.1", "1.2", "1.1"], "1.2") == ["1.10.0", "1.9.1", "1.2"]


def test_of_very_many_releases_every_minors_last_one_stays_and_the_oldest() -> None:
    versions = [f"1.{minor}.{patch}" for minor in (3, 4) for patch in range(releases.MANY)]
    last = releases.MANY - 1
    assert releases.choose(versions, "1.3.5") == [f"1.4.{last}", f"1.3.{last}", "1.3.5"]


def test_both_ends_of_every_package_come_first() -> None:
    order = releases.ordered({"a": ["4", "3", "2", "1"], "b": ["9"], "c": []})
    assert order == [("a", "4"), ("b", "9"), ("a", "1"), ("a", "3"), ("a", "2")]


def test_an_error_on_purpose_is_a_refusal_and_a_difference_is_wrong() -> None:
    found = {
        "equal": {"outcome": "exact", "seconds": 1.0},
        "uncut": {"outcome": "uncut", "seconds": 1.0},
        "not built": {"outcome": "missing", "error": "No module named 'x'"},
        "refused": {"outcome": "failed", "error": "InvalidModel: the model has no channels"},
        "failed": {"outcome": "failed", "error": "KeyError: 'x'"},
        "wrong": {"outcome": "failed", "compared": 8, "error": "masked and shrunk differ by 1.0e+00"},
    }
    assert [releases.sort_out(row)[0] for row in found.values()] == list(found)
    assert releases.sort_out({"outcome": "failed", "error": "NotEquivalent: they differ"})[0] == "wrong"


def test_the_page_counts_and_names_what_is_slower() -> None:
    there = {"package": "p", "installs": True, "imports": True}
    rows = [
        there | {"release": "3", "equal": {"a": 1.0, "b": 1.0}},
        there
        | {"release": "2", "equal": {"a": 1.6}, "failed": {"b": "KeyError: 'x'"}, "not built": {"c": "TypeError"}},
        {"package": "p", "release": "1", "installs": False, "error": "no matching distribution"},
    ]
    text = releases_page.markdown({"p": 4}, rows, "2024-11-19", {"p": "1"})
    assert "| p | 4 | 3 | 2 | 2 | 4 | 3 | 0 | 0 | 1 | 0 | 1 |" in text
    assert "| p 2 | 1 | 0 | 0 | 1 | 0 | 1 | 1.6 | 1.60 |" in text
    assert "- p 1: no matching distribution" in text
    assert "- p 2: 1.60 times" in text
    assert "- p b (2): KeyError: 'x'" in text
