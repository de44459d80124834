"""Sums of kept files: any change of a byte, of the length or of the order of large parts is seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagedcli.execution.seals import CHUNK, SEAL, broken, file_sum, seal, word_sum


def test_every_kind_of_change_is_seen() -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * CHUNK + 13, dtype=np.uint8)
    own = word_sum(data)
    others = [word_sum(data[:-1]), word_sum(np.append(data, np.uint8(0)))]
    for place in (0, 7, CHUNK - 1, CHUNK, 3 * CHUNK, 3 * CHUNK + 12):
        for bit in range(8):
            data[place] ^= 1 << bit
            others.append(word_sum(data))
            data[place] ^= 1 << bit
    data[:2 * CHUNK] = np.concatenate([data[CHUNK:2 * CHUNK], data[:CHUNK]])
    others.append(word_sum(data))
    assert len(others) == 2 + 6 * 8 + 1 and own not in others
    assert word_sum(np.empty(0, np.uint8)) == 0


def test_the_sum_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    for size in (0, 1, 8, CHUNK, CHUNK + 1):
        data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        (tmp_path / "f").write_bytes(data.tobytes())
        assert file_sum(tmp_path / "f") == word_sum(data)


@pytest.mark.parametrize("harm", ["cut short", "a byte", "gone", "the seal itself"])
def test_a_sealed_folder_tells_what_was_done_to_it(harm: str, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(5000))
    (tmp_path / "config.json").write_text("{}")
    seal(tmp_path)
    assert broken(tmp_path) is None
    if harm == "cut short":
        (tmp_path / "weights").write_bytes(bytes(4999))
    elif harm == "a byte":
        (tmp_path / "weights").write_bytes(bytes(4000) + b"x" + bytes(999))
        assert broken(tmp_path, most_bytes=100) is None  # its size is as it was
    elif harm == "gone":
        (tmp_path / "weights").unlink()
    else:
        (tmp_path / SEAL).write_text("[]")
    found = broken(tmp_path)
    assert found is not None and (SEAL in found or "weights" in found)
