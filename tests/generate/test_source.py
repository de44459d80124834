"""Reading rows: line ends, marks, blanks, limits, repeated ids."""

from __future__ import annotations

import io
import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcli.core.errors import UsageError
from pagedcli.generate import source as module
from pagedcli.generate.formats import parse_row
from pagedcli.generate.source import InputRows
from tests.generate.fake_engine import lines


def read(data: bytes, limit: int | None = None) -> InputRows:
    return InputRows(io.BytesIO(data), "test", limit)


def test_lines_end_at_newline_alone() -> None:
    texts = ["a\u2028b", "a\u2029b", "a\u0085b", "a\x0bb", "a\x1cb"]
    data = lines(*({"prompt": text} for text in texts)) + b'{"prompt": "a\x0cb"}\n'
    rows = [parse_row(raw) for raw in read(data)]
    assert [row.text for row in rows] == [*texts, "a\x0cb"]
    assert all(row.error is None for row in rows)


def test_mark_blanks_and_line_numbers() -> None:
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \t\r\n{"prompt": "b"}'
    found = [(raw.index, raw.line, raw.data) for raw in read(data)]
    assert found == [(0, 1, b'{"prompt": "a"}'), (1, 4, b'{"prompt": "b"}')]


def test_limit_reads_no_further() -> None:
    source = read(lines(*({"prompt": str(i)} for i in range(5))), limit=3)
    assert source.scan().rows == len(list(source)) == 3


@pytest.mark.parametrize(("data", "what"), [
    ("x".encode("utf-16"), "UTF-16"), (b"\x1f\x8b\x08\x00", "gzip"), (b"PAR1abc", "Parquet"), (b"PK\x03\x04", "zip"),
])
def test_other_formats_are_named(data: bytes, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        read(data)


@pytest.mark.parametrize(("data", "words"), [
    (b'{"prompt": "a"}\r{"prompt": "b"}\r', "lines that end in CR only"),
    (b'\xef\xbb\xbf{"prompt": "a"}\r\r{"prompt": "b"}', "lines that end in CR only"),
    (b'[{"prompt": "a"}, {"prompt": "b"}]', "looks like a JSON array: one object a line"),
    (b'\xef\xbb\xbf[\r\n  {"prompt": "a"}\r\n]\r\n', "looks like a JSON array"),
    (b'\n[\n{\n"prompt": "a"}]\n', "looks like a JSON array"),
    (b'{\n  "prompt": "a"\n}\n', "looks like JSON over several lines"),
])
def test_other_layouts_are_named(data: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(data)


@pytest.mark.parametrize("data", [
    b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n', b'{"prompt": "a\rb"}', b'[1, 2]\n[3]\n',
    b'[{"prompt": "a"}]\n{"prompt": "b"}\n',
    b"", b"\n\n", b"[\n",
])
def test_lines_with_faults_are_no_other_layout(data: bytes) -> None:
    assert read(data).scan().rows == len([line for line in data.split(b"\n") if line.strip()])


def test_no_line_in_utf8_is_a_fault_of_the_file() -> None:
    with pytest.raises(UsageError, match="none of its 2 lines"):
        read("Grüße\nÄpfel\n".encode("latin-1")).scan()
    assert read("Grüße\n".encode("latin-1") + b'{"prompt": "ok"}\n').scan().rows == 2


def test_repeated_ids_name_the_first_line() -> None:
    scan = read(lines({"prompt": "0", "id": "a"}, "", {"prompt": "1", "id": 7}, {"prompt": "2", "id": "a"},
                      {"prompt": "3", "id": "7"}, {"custom_id": "a"}, {"prompt": "5", "id": 7})).scan()
    assert {index: scan.first_line_of(index) for index in range(6)} == {0: None, 1: None, 2: 1, 3: None, 4: 1, 5: 3}


def test_an_id_equal_to_another_rows_number_is_repeated() -> None:
    scan = read(lines({"prompt": "0"}, {"prompt": "1", "id": 0}, {"prompt": "2"})).scan()
    assert [scan.first_line_of(index) for index in range(3)] == [None, 1, None]


def test_the_row_that_says_a_number_is_refused_wherever_it_stands() -> None:
    scan = read(lines({"id": 4}, {"prompt": "1"}, {"id": 4}, {"id": "4"}, {"prompt": "4"}, {"id": 4}, {"id": 9})).scan()
    assert [scan.first_line_of(index) for index in range(7)] == [5, None, 1, None, None, 5, None]


LINES = st.lists(st.sampled_from([
    b'{"prompt": "a"}', b'{"id": null}', b"not json", b'{"prompt": NaN}', b'{"id": 1.5}', b'{"id": "\\ud800"}',
    *(b'{"id": %d, "prompt": "a"}' % number for number in range(6)), b'{"id": 2, "prompt": "\\udc00"}',
    b'{"id": "2"}', b'{"custom_id": "2", "body": {}}', b'{"id": 3, "id": 3}']), max_size=8)


@given(LINES)
def test_an_id_is_one_rows_whatever_stands_in_the_file(found: list[bytes]) -> None:
    def said(line: bytes) -> object:
        for unread in (b"not", b"1.5", b"d800", b'"id": 3, "id"'):
            if unread in line:
                return None
        fields = json.loads(line.replace(b"\\udc00", b""))
        return fields.get("custom_id", fields.get("id", "number") if fields.get("id", 0) is not None else "number")

    saying = [said(line) for line in found]
    numbers = {index for index, value in enumerate(saying) if value == "number"}
    expected: list[object] = []
    for index, value in enumerate(saying):
        own = value is not None and value not in numbers and saying.index(value) == index
        expected.append(index if value == "number" else value if own else None)
    source = read(b"\n".join(found))
    scan = source.scan()
    assert [parse_row(row, scan.first_line_of(row.index)).id for row in source] == expected


def test_a_line_that_cannot_be_read_has_no_number_to_take() -> None:
    scan = read(b'{"id": 1}\nnot json\n{"prompt": "y"}\n{"id": 3, "x": NaN}\n{"id": 3}\n').scan()
    assert [scan.first_line_of(index) for index in range(5)] == [None, None, None, None, 4]


def test_equal_hashes_are_compared_exactly() -> None:
    assert hash(-1) == hash(-2)
    assert not read(lines({"prompt": "0", "id": -1}, {"prompt": "1", "id": -2})).scan().repeated


def test_escaped_ids_are_seen() -> None:
    scan = read(b'{"prompt": "0", "\\u0069d": "a"}\n{"prompt": "1", "id": "\\u0061"}\n').scan()
    assert scan.first_line_of(1) == 1


def test_unusable_ids_count_as_the_row_number() -> None:
    scan = read(lines({"id": True}, {"id": [1]}, {"id": None}, {"id": 1.0}, "[" * 5000, b'{"id": "\xff"}')).scan()
    assert scan.rows == 6 and not scan.repeated


def test_digest_depends_on_content_alone(tmp_path: Path) -> None:
    data = lines({"prompt": "a"}, {"prompt": "b"})
    digests = []
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_bytes(data)
        with_file = InputRows.open(str(tmp_path / name), io.BytesIO())
        digests.append(with_file.scan().digest)
        with_file.close()
    assert digests[0] == digests[1] == InputRows.open("-", io.BytesIO(data)).scan().digest
    assert digests[0] != read(lines({"prompt": "b"}, {"prompt": "a"})).scan().digest


def test_a_pipe_is_spooled(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(lines({"prompt": "a"}, {"prompt": "b"})))
    writer.start()
    source = InputRows.open(str(pipe), io.BytesIO())
    writer.join()
    assert source.scan().rows == len(list(source)) == 2


def test_a_huge_line_is_cut_and_the_next_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr("pagedcli.generate.row.MAX_ROW_BYTES", 100)
    monkeypatch.setattr(module, "_BUFFER", 64)
    source = read(lines({"prompt": "x" * 1000}, {"prompt": "y"}))
    first, second = [parse_row(raw) for raw in source]
    assert first.error is not None and first.error[0] == "row_too_long" and "100 bytes" in first.error[1]
    assert second.text == "y" and second.line == 2


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UsageError, match="cannot read"):
            InputRows.open(str(path), io.BytesIO())
