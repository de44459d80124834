"""The kernel benchmark: its cases, its arithmetic, and that a wrong kernel does not pass for a fast one."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedcli.attention.backends import make_backend
from pagedcli.bench.micro import Bench, copy_bandwidth, measure, run_cases
from pagedcli.bench.micro_cases import BATCHES, BLOCK_SIZES, CONTEXTS, Case, Heads, figure_18a, full_cases, quick_cases
from pagedcli.core.errors import CannotRunError

SMALL = Heads("small", 4, 2, 32)
CPU = torch.device("cpu")


def bench(name: str = "reference", dtype: torch.dtype = torch.float32, wrap: Any = None) -> Bench:
    def make(kernel: str | None) -> Any:
        del kernel
        made = make_backend(name)
        return made if wrap is None else wrap(made)

    return Bench(CPU, dtype, make, cycle_bytes=1, memory_bytes=1 << 30, row_seconds=0.0)


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("kernel", ["decode", "prompt", "chunk"])
@pytest.mark.parametrize("block", [1, 16, 256])
def test_paged_and_contiguous_agree(name: str, kernel: str, block: int) -> None:
    row = measure(Case(kernel, SMALL, 3, 150, block), bench(name), 1e9)
    assert row.good and 0 < row.relative_error < 1e-5
    assert row.rounds == 3 and row.paged_microseconds > 0 and row.contiguous_microseconds > 0


def test_several_layers_are_cycled_when_the_cache_is_small() -> None:
    calls: list[int] = []

    class Counting:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def attend(self, layer: int, *rest: Any) -> torch.Tensor:
            calls.append(layer)
            return self.inner.attend(layer, *rest)

    case = Case("decode", SMALL, 2, 64)
    layer_bytes = 2 * 2 * 64 * 2 * 32 * 4
    measure(case, replace(bench(wrap=Counting), cycle_bytes=3 * layer_bytes), 1e9)
    assert set(calls) == {0, 1, 2}


def test_rates_are_of_the_keys_and_values_that_must_be_read() -> None:
    row = measure(Case("decode", SMALL, 2, 100), bench(), copy=5e9)
    seconds = row.paged_microseconds / 1e6
    moved = 2 * 100 * 2 * 32 * 2 * 4  # sequences, tokens, kv heads, head size, keys and values, bytes
    assert row.kv_gigabytes_per_second == pytest.approx(moved / seconds / 1e9)
    assert row.share_of_copy_bandwidth == pytest.approx(moved / seconds / 5e9)
    assert row.gigaflops == pytest.approx(2 * 100 * 4 * 32 * 4 / seconds / 1e9)
    assert row.paged_over_contiguous == pytest.approx(row.paged_microseconds / row.contiguous_microseconds)
    prompt = measure(Case("prompt", SMALL, 1, 40), bench(), copy=5e9)
    assert prompt.gigaflops == pytest.approx(40 * 41 / 2 * 4 * 4 * 32 / prompt.paged_microseconds * 1e6 / 1e9)
    assert all(not isinstance(value, float) or len(f"{value:.5g}") <= 11 for value in row.record().values())


def test_a_wrong_kernel_is_called_wrong() -> None:
    class Skewed:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def attend(self, layer: int, q: torch.Tensor, *rest: Any) -> torch.Tensor:
            return self.inner.attend(layer, q * 1.01, *rest)

    assert not measure(Case("decode", SMALL, 2, 100), bench(wrap=Skewed), 1e9).good


def test_figure_18a_compares_with_one_block_a_sequence() -> None:
    cases = figure_18a(SMALL)
    assert {(case.batch, case.context, case.block_size) for case in cases} == {
        (batch, context, 16) for batch in (8, 32) for context in (64, 128, 256)}
    table = run_cases(cases[:1], bench("cpu"), 1e9, time.perf_counter() + 60, against_one_block=True)
    assert table.rows[0].one_block_microseconds is not None


def test_a_backend_without_such_a_block_leaves_the_place_empty() -> None:
    class Limited:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def supports(self, spec: Any, dtype: Any, block_size: int) -> str | None:
            return None if block_size <= 128 else f"block size {block_size}: up to 128"

    row = measure(Case("decode", SMALL, 2, 256), bench(wrap=Limited), 1e9, against_one_block=True)
    assert row.one_block_microseconds is None and row.good
    table = run_cases([Case("decode", SMALL, 2, 256, 256)], bench(wrap=Limited), 1e9, time.perf_counter() + 60)
    assert table.skipped[0].why == "block size 256: up to 128"


def test_what_is_left_out_says_why() -> None:
    case = Case("decode", SMALL, 200, 4096)
    with pytest.raises(CannotRunError, match=r"needs about 2\.\d GiB, of 1\.0 GiB to spare"):
        measure(case, bench(), 1e9)
    table = run_cases([case], bench(), 1e9, time.perf_counter() - 1)
    assert not table.rows and "time for this run was over" in table.skipped[0].why
    assert table.skipped[0].case == "decode, small, batch 200, context 4096 tokens, blocks of 16 tokens"


def test_the_grid_covers_what_it_claims() -> None:
    decode = [case for case in full_cases(False) if case.kernel == "decode"]
    assert {case.batch for case in decode} == set(BATCHES) and min(BATCHES) == 8 and max(BATCHES) == 256
    assert {case.context for case in decode} == set(CONTEXTS) and (min(CONTEXTS), max(CONTEXTS)) == (64, 16_384)
    assert {case.block_size for case in decode} == set(BLOCK_SIZES) and (BLOCK_SIZES[0], BLOCK_SIZES[-1]) == (1, 256)
    assert {case.heads.heads // case.heads.kv_heads for case in decode} == {1, 3, 4, 8}
    for cases in (full_cases(True), quick_cases(True)):
        assert len(set(cases)) == len(cases)
        assert {case.decode_kernel for case in cases} == {None, "v1", "split", "mma"}
        assert {case.kernel for case in cases} >= {"decode", "prompt", "chunk"}


def test_copy_rate_is_plausible() -> None:
    assert 1e8 < copy_bandwidth(bench()) < 1e13
