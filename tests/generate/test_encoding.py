"""Lines of output: always one line of valid JSON, in bounded pieces."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcli.generate.encoding import _MARK, PIECE_BYTES, Lazy, Line, encode


def whole(line: Line) -> bytes:
    return line if isinstance(line, bytes) else b"".join(line)


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                      | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.dictionaries(st.text(), VALUES))
def test_any_record_is_one_line_that_reads_back(record: dict[str, object]) -> None:
    line = whole(encode(record))
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == record


@given(st.lists(VALUES), st.text())
def test_lazy_lists_are_lists(items: list[object], text: str) -> None:
    record = {"before": text, "a": Lazy(iter(items)), "mark": _MARK, "b": {"c": [Lazy(items), 1]}, "after": {_MARK: 1}}
    assert json.loads(whole(encode(record))) == {"before": text, "a": items, "mark": _MARK, "b": {"c": [items, 1]},
                                                 "after": {_MARK: 1}}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_infinity_and_no_nan(value: float) -> None:
    with pytest.raises(ValueError):
        encode({"x": value})
    with pytest.raises(ValueError):
        encode({"x": Lazy([value])})


def test_a_lone_surrogate_is_escaped() -> None:
    assert whole(encode({"é": "\ud800"})) == '{"é": "\\ud800"}'.encode()


def test_long_lists_never_lie_in_memory_at_once() -> None:
    def items() -> Iterator[str]:
        for number in range(1000):
            yield str(number % 10) * 10_000

    tracemalloc.start()
    line = encode({"x": Lazy(items())})
    assert not isinstance(line, bytes)
    size = most = 0
    for piece in line:
        size += len(piece)
        most = max(most, len(piece))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 8 * PIECE_BYTES and most < 2 * PIECE_BYTES and peak < 6 * PIECE_BYTES
