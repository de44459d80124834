"""Counts and their nouns."""

from __future__ import annotations

import pytest

from pagedcli.core.wording import counted, form


@pytest.mark.parametrize(("number", "said"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1000, "1,000 rows")])
def test_a_noun_follows_its_count(number: int, said: str) -> None:
    assert counted(number, "row") == said


def test_words_that_take_no_s() -> None:
    assert [counted(n, "entry", "entries") for n in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]
    assert [form(n, "was", "were") for n in (0, 1, 2)] == ["were", "was", "were"]
