"""Device figures: Table 1's pool sizes, files that are read back, and messages for what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.execution.hardware import (
    Coefficients,
    find_hardware,
    hardware_toml,
    known_hardware,
    kv_pool_bytes,
    pool_blocks,
)
from pagedcli.execution.shapes import SHAPES
from pagedcli.execution.simulated import Deployment

TABLE_1 = [("opt-13b", "a100-40gb", 1, 983, "15.7", 12), ("opt-66b", "a100-40gb", 4, 603, "9.7", 21),
           ("opt-175b", "a100-80gb", 8, 3754, "60.1", 264)]


@pytest.mark.parametrize(("model", "device", "devices", "blocks", "slots", "gib"), TABLE_1)
def test_table_1(model: str, device: str, devices: int, blocks: int, slots: str, gib: int) -> None:
    hardware, shape = find_hardware(device), SHAPES[model]
    room = kv_pool_bytes(hardware, shape, devices)
    assert pool_blocks(hardware, shape, devices) == blocks
    assert f"{room / shape.kv_bytes_per_token('fp16') / 1000:.1f}" == slots
    assert round(room / 2**30) == gib


def test_too_large_a_model_is_told_apart() -> None:
    with pytest.raises(CannotRunError, match=r"opt-66b needs 131\.4 GB .* more devices"):
        pool_blocks(find_hardware("a100-40gb"), SHAPES["opt-66b"], 2)


def test_tensor_parallel_must_divide_the_heads() -> None:
    with pytest.raises(UsageError, match="40 heads"):
        Deployment(find_hardware("a100-40gb"), SHAPES["opt-13b"], 3)


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    known = known_hardware()["a100-40gb"]
    changed = replace(known, name="mine", coefficients=Coefficients(step_seconds=0.0123456789), num_blocks=77,
                      calibrated='fitted to "x\\y"', engines={"tgi": Coefficients(step_seconds=0.5)})
    path = tmp_path / "mine.toml"
    path.write_text(hardware_toml(changed, "two\nlines"), "utf-8")
    read = find_hardware(str(path))
    assert read.coefficients == changed.coefficients
    assert read.engines["tgi"].step_seconds == 0.5
    assert (read.num_blocks, read.calibrated, read.memory_bytes) == (77, changed.calibrated, known.memory_bytes)
    assert Deployment(read, SHAPES["opt-13b"]).blocks == 77


@pytest.mark.parametrize(("text", "message"), [
    ("[a]\ntitle='x'\n", "memory_bytes, bandwidth, flops missing"),
    ("[a]\ntitle='x'\nmemory_bytes=1\nbandwidth=1\nflops=1\nspeed=2\n", "unknown field 'speed'"),
    ("[a]\ntitle='x'\nmemory_bytes=1\nbandwidth=-1\nflops=1\n", "bandwidth = -1"),
    ("[a]\ntitle='x'\nmemory_bytes=1\nbandwidth=1\nflops=1\n[a.coefficients]\nluck=1\n", "'luck' is unknown"),
    ("[a]\ntitle='x'\nmemory_bytes=1\nbandwidth=1\nflops=1\n[a.coefficients]\nkv_efficiency=0\n", "must be above 0"),
    ("[a", "not a TOML file"), ("", "holds 0 devices"),
])
def test_faulty_files_are_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=message):
        find_hardware(str(path))


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"no such hardware; there are a100-40gb, .*rtx4090"):
        find_hardware("a101")
