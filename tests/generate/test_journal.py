"""The journal: torn lines, other runs, full disks, order."""

from __future__ import annotations

import errno
import io
import json
import os
import random
from pathlib import Path

import pytest

from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.generate import journal as module
from pagedcli.generate.journal import Journal
from pagedcli.generate.journal_header import differences

SETTINGS = {"input": {"content": "abc"}, "sampling": {"temperature": 0.5, "stop": ["x"]}, "limit": None}


def row(index: int) -> bytes:
    return json.dumps({"index": index, "text": "é" * (index % 7)}, ensure_ascii=False).encode()


def filled(path: Path, order: list[int], rows: int) -> Journal:
    journal = Journal(path, SETTINGS, rows)
    journal.confirm({"model": "m"})
    for index in order:
        journal.append(index, row(index), ok=index % 3 > 0)
    journal.flush()
    return journal


def test_rows_come_out_in_input_order(tmp_path: Path) -> None:
    order = list(range(100))
    random.Random(1).shuffle(order)
    journal = filled(tmp_path / "out.partial", order, 100)
    assert journal.complete and journal.failed == 34
    journal.publish(tmp_path / "out")
    journal.close()
    assert (tmp_path / "out").read_bytes() == b"".join(row(index) + b"\n" for index in range(100))
    assert os.listdir(tmp_path) == ["out"]


def test_every_line_is_json(tmp_path: Path) -> None:
    filled(tmp_path / "j", [2, 0], 3).close()
    found = [json.loads(line) for line in (tmp_path / "j").read_bytes().split(b"\n")[:-1]]
    assert found[0]["pagedcli_journal"] == 1 and found[1] == {"ran_on": {"model": "m"}}
    assert [(line["index"], line["ok"], line["row"]["index"]) for line in found[2:]] == [(2, True, 2), (0, False, 0)]


def test_resuming_at_every_possible_cut(tmp_path: Path) -> None:
    """Whatever byte the file ends at, the whole rows before it are taken and nothing else."""
    path = tmp_path / "j"
    filled(path, [3, 0, 2, 1], 4).close()
    data = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == 10]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        journal = Journal(path, SETTINGS, 4)
        whole = sum(end <= cut for end in ends[2:])
        assert journal.resumed == journal.finished == whole
        assert [journal.done(index) for index in (3, 0, 2, 1)] == [True] * whole + [False] * (4 - whole)
        journal.confirm({"model": "m"})
        for index in (3, 0, 2, 1)[whole:]:
            journal.append(index, row(index), ok=index % 3 > 0)
        journal.flush()
        assert path.read_bytes() == data
        assert b"".join(journal.ordered()) == b"".join(row(index) + b"\n" for index in range(4))
        journal.close()


@pytest.mark.parametrize("damage", ["flip", "zeros", "repeat", "index"])
def test_a_damaged_line_ends_what_is_trusted(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "j"
    filled(path, [0, 1, 2], 3).close()
    parts = path.read_bytes().split(b"\n")
    parts[3] = {"flip": parts[3].replace(b"text", b"tixt"), "zeros": bytes(len(parts[3])), "repeat": parts[2],
                "index": parts[3].replace(b'{"index": 1, "ok', b'{"index": 9, "ok')}[damage]
    path.write_bytes(b"\n".join(parts))
    journal = Journal(path, SETTINGS, 3)
    assert [journal.done(index) for index in range(3)] == [True, False, False]
    journal.close()


def test_rows_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 200)
    pieces = [b'"' + b"a" * 250, b"b" * 199, b"c" * 90 + b'"']
    last = len(b'{"index": 0, "ok": true, "row": 0, "crc": "00000000"}\n')
    for cut in (0, 1, last):
        path = tmp_path / f"j{cut}"
        journal = filled(path, [2], 3)
        journal.append(1, iter(pieces), ok=True)
        journal.append(0, b"0", ok=True)
        journal.close()
        with path.open("r+b") as stream:
            stream.truncate(path.stat().st_size - cut)
        journal = Journal(path, SETTINGS, 3)
        assert [journal.done(index) for index in range(3)] == [cut == 0, True, True]
        if cut == 0:
            assert b"".join(journal.ordered()) == b"0\n" + b"".join(pieces) + b"\n" + row(2) + b"\n"
        journal.close()


def test_a_long_row_that_is_torn_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 200)
    path = tmp_path / "j"
    journal = filled(path, [0], 2)
    journal.append(1, iter([b"x" * 300, b"y" * 300]), ok=True)
    journal.close()
    size = path.stat().st_size
    for cut in (1, 10, 22, 23, 100, 350, 610):
        with path.open("r+b") as stream:
            stream.truncate(size - cut)
        journal = Journal(path, SETTINGS, 2)
        assert journal.done(0) and not journal.done(1)
        journal.append(1, iter([b"x" * 300, b"y" * 300]), ok=True)
        journal.close()
        assert path.stat().st_size == size


def test_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "j"
    filled(path, [0], 2).close()
    before = path.read_bytes()
    other = {"input": {"content": "xyz"}, "sampling": {"temperature": 0.7, "n": 2}, "limit": None}
    with pytest.raises(UsageError) as caught:
        Journal(path, other, 2)
    for words in ('input.content: the rows are other ones', "sampling.temperature: journal 0.5, this run 0.7",
                  'sampling.stop: journal ["x"], this run unset', "sampling.n: journal unset, this run 2", "--restart"):
        assert words in caught.value.message
    assert path.read_bytes() == before
    journal = Journal(path, other, 2, restart=True)
    assert journal.resumed == 0
    journal.close()
    assert not path.exists()


def test_other_hardware_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "j", [0], 2).close()
    journal = Journal(tmp_path / "j", SETTINGS, 2)
    with pytest.raises(UsageError, match='model: journal "m", this run "other"'):
        journal.confirm({"model": "other"})
    journal.close()
    assert (tmp_path / "j").exists()


@pytest.mark.parametrize("data", [
    b"my notes\n", b"my notes", b'{"prompt": "a"}\n', b"[]\n", b'{"pagedcli_journal": 0}\n', b"\x00" * 20])
def test_files_of_others_are_left_alone(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "j").write_bytes(data)
    with pytest.raises(UsageError, match="--restart"):
        Journal(tmp_path / "j", SETTINGS, 2)
    assert (tmp_path / "j").read_bytes() == data


def test_two_runs_at_once(tmp_path: Path) -> None:
    journal = filled(tmp_path / "j", [0], 2)
    with pytest.raises(UsageError, match="another run is writing"):
        Journal(tmp_path / "j", SETTINGS, 2)
    journal.close()
    Journal(tmp_path / "j", SETTINGS, 2).close()


def test_a_journal_without_rows_is_not_left_behind(tmp_path: Path) -> None:
    Journal(tmp_path / "j", SETTINGS, 2).close()
    assert not (tmp_path / "j").exists()


def test_a_full_disk_keeps_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(tmp_path / "j", [0, 1], 3)
    real = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:20])

    journal.append(2, row(2), ok=True)
    monkeypatch.setattr(os, "write", half)
    with pytest.raises(CannotRunError, match="disk is full") as caught:
        journal.flush()
    assert caught.value.code == "no_space" and str(tmp_path / "j") in caught.value.message
    assert "; at least 2 rows are kept there: make room" in caught.value.message, "the third was cut short"
    journal.close()
    monkeypatch.undo()
    again = Journal(tmp_path / "j", SETTINGS, 3)
    assert again.resumed == 2 and not again.done(2)
    again.close()


def test_a_disk_that_was_full_from_the_start_promises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j", SETTINGS, 3)
    journal.append(2, row(2), ok=True)
    monkeypatch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(CannotRunError, match="; rows that it took whole are kept there: make room and run"):
        journal.flush()
    journal.close()


def test_a_full_disk_at_the_end_leaves_no_half_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(tmp_path / "j", [1, 0], 2)
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(CannotRunError, match="disk is full"):
        journal.publish(tmp_path / "out")
    journal.close()
    assert os.listdir(tmp_path) == ["j"]


def test_a_closed_stream_keeps_the_rows(tmp_path: Path) -> None:
    class Closed(io.BytesIO):
        def write(self, data: object) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    journal = filled(tmp_path / "j", [1, 0], 2)
    with pytest.raises(CannotRunError, match="closed before all rows") as caught:
        journal.stream(Closed())
    assert caught.value.code == "output_closed"
    good = io.BytesIO()
    journal.stream(good)
    journal.close()
    assert good.getvalue() == row(0) + b"\n" + row(1) + b"\n" and not (tmp_path / "j").exists()


def test_differences_of_equal_settings() -> None:
    assert differences(SETTINGS, json.loads(json.dumps(SETTINGS))) == []
