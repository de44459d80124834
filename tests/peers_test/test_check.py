"""What counts as agreement and as a wrong length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.peers.check import Agreement, agreement, length_faults, read_outputs


def row(key: str, tokens: int, n: int = 1, temperature: float = 0.0) -> dict[str, Any]:
    return {"id": key, "max_tokens": tokens, "n": n, "temperature": temperature}


def test_lengths_as_asked_have_no_fault() -> None:
    assert length_faults([row("a", 2), row("b", 1, n=2)], {"a": [[1, 2]], "b": [[1], [2]]}) == []


def test_each_kind_of_wrong_length_is_named() -> None:
    rows = [row("short", 3), row("few", 1, n=2), row("gone", 1)]
    faults = length_faults(rows, {"short": [[1, 2]], "few": [[1]], "more": [[1]]})
    assert [fault.split(":")[0] for fault in faults] == ["more", "short", "few", "gone"]
    assert "[2] tokens, asked for 1 x 3" in faults[1]


def test_only_the_first_tokens_of_greedy_rows_are_compared() -> None:
    rows = [row("same", 4), row("late", 4), row("early", 4), row("drawn", 4, temperature=1.0)]
    outputs = {"same": [[1, 2, 3, 4]], "late": [[1, 2, 3, 9]], "early": [[1, 9, 3, 4]], "drawn": [[7, 7, 7, 7]]}
    reference = {"same": [[1, 2, 3]], "late": [[1, 2, 3]], "early": [[1, 2, 3]]}
    assert agreement(rows, outputs, reference, first=3) == Agreement(2, 3)


def test_a_row_that_either_side_lacks_or_cut_short_does_not_agree() -> None:
    rows = [row("theirs", 2), row("ours", 2), row("short", 2)]
    found = agreement(rows, {"ours": [[1, 2]], "short": [[1]]}, {"theirs": [[1, 2]], "short": [[1, 2]]})
    assert found == Agreement(0, 3)
    assert agreement(rows, {"short": [[1, 2]]}, {"short": [[1]]}).equal == 0


def test_a_row_shorter_than_the_compared_tokens_is_compared_whole() -> None:
    assert agreement([row("a", 2)], {"a": [[5, 6]]}, {"a": [[5, 6]]}) == Agreement(1, 1)


def test_an_engine_that_forbids_the_end_token_is_compared_before_it() -> None:
    rows, reference = [row("a", 4), row("b", 4)], {"a": [[5, 2, 6, 7]], "b": [[5, 6, 7, 2]]}
    outputs = {"a": [[5, 9, 9, 9]], "b": [[5, 9, 7, 8]]}
    assert agreement(rows, outputs, reference, until=2) == Agreement(1, 2)
    assert agreement(rows, outputs, reference) == Agreement(0, 2)


def test_most_is_more_than_half() -> None:
    assert [Agreement(equal, 4).most for equal in (1, 2, 3)] == [False, False, True]


def test_outputs_are_read_by_row(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(json.dumps({"id": "a", "outputs": [[1], [2]]}) + "\n")
    assert read_outputs(file) == {"a": [[1], [2]]}
