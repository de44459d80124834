"""Which prefixes a resumed run restores."""

from __future__ import annotations

from pagedcli.generate.resume_cache import FinishedPrefixes


def test_only_what_finished_rows_before_left_is_restored() -> None:
    prefixes = FinishedPrefixes(4)
    common, other = list(range(8)), list(range(20, 28))
    assert prefixes.needed([*common, 1]) == 0  # nobody came before
    prefixes.finished([*other, 2, 2, 2, 2])
    assert prefixes.needed([*other, 3, 3, 3, 3, 3]) == 8
    assert prefixes.needed([*other, 9]) == 0  # restored a moment ago
    assert prefixes.needed([*other, 2, 2, 2, 2, 5]) == 12  # one block more than is there
    assert prefixes.needed([*common, 7]) == 0  # a row of this process has it


def test_the_last_token_is_never_restored() -> None:
    prefixes = FinishedPrefixes(4)
    prefixes.finished([1, 2, 3, 4, 5, 6, 7, 8])
    assert prefixes.needed([1, 2, 3, 4, 5, 6, 7, 8]) == 4


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    prefixes = FinishedPrefixes(2)
    prefixes.finished([1, 1, 2, 2, 3])
    assert prefixes.needed([5, 5, 2, 2, 3]) == 0
