"""The CUDA backend on emulated kernels: against reference and CPU backend, bit for bit with itself, in graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.attention.cpu import CpuBackend
from pagedcli.attention.cuda import CudaBackend
from pagedcli.attention.cuda_graph import padded_rows
from pagedcli.attention.cuda_step import longest_single_run
from pagedcli.attention.interface import KVLayout, LayerSpec, build_layout
from pagedcli.attention.reference import ReferenceBackend
from pagedcli.core.errors import CannotRunError
from pagedcli.core.plan import Slice, StepPlan
from tests.emulator.backend import Batch, EmulatedLauncher
from tests.emulator.cases import Kernels
from tests.emulator.emulator import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="the CUDA emulator needs g++, which is not installed")

LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
KERNELS = Kernels(per_module=4)


def spec(group: int = 1, window: int | None = None, sinks: bool = False, dim: int = 32) -> LayerSpec:
    return LayerSpec(2 * group, 2, dim, dim, dim**-0.5, window, None, sinks)


def cuda(same_bits: bool = False) -> CudaBackend:
    return CudaBackend(EmulatedLauncher(KERNELS), same_bits)


def gap(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    seqs = draw(st.integers(1, 4))
    steps = [[draw(st.integers(0, 19)) for _ in range(seqs)] for _ in range(draw(st.integers(1, 2)))]
    steps[0][0] += 1
    steps.append([draw(st.integers(0, 1)) if sum(step[s] for step in steps) else 0 for s in range(seqs)])
    steps[-1][0] = 1
    return Batch([step for step in steps if sum(step)], 8, draw(st.integers(0, 99)), draw(st.sampled_from([1, 8])))


@settings(max_examples=20, deadline=None)
@given(batches(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), st.sampled_from([1, 4]),
       st.sampled_from([None, 5, 16]), st.booleans())
def test_agrees_with_reference_and_cpu(batch: Batch, dtype: torch.dtype, group: int, window: int | None,
                                       sinks: bool) -> None:
    layer = spec(group, window, sinks)
    extra = torch.linspace(-1, 2, layer.heads) if sinks else None
    want = batch.run(ReferenceBackend(torch.float64), layer, dtype, dtype, extra)
    assert gap(batch.run(cuda(), layer, dtype, dtype, extra), want) <= LIMITS[dtype]
    assert gap(batch.run(CpuBackend(), layer, dtype, dtype, extra), want) <= LIMITS[dtype]


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_cache_agrees_with_reference(cache: torch.dtype) -> None:
    batch, layer = Batch([[9, 3], [1, 17], [1, 1]], 8), spec(4)
    want = batch.run(ReferenceBackend(torch.float64), layer, torch.bfloat16, cache)
    assert gap(batch.run(cuda(), layer, torch.bfloat16, cache), want) <= LIMITS[torch.bfloat16]


def test_long_contexts_are_split_and_merged() -> None:
    batch, layer = Batch([[700, 20], [1, 1]], 8), spec(4)
    backend = cuda()
    got = batch.run(backend, layer, torch.bfloat16, torch.bfloat16)
    assert isinstance(backend._launcher, EmulatedLauncher)
    kernels = [name for name, _ in backend._launcher.launched]
    assert kernels == ["reshape_and_cache", "prefill_mma", "reshape_and_cache", "decode_mma", "reduce_splits"]
    want = batch.run(ReferenceBackend(torch.float64), layer, torch.bfloat16, torch.bfloat16)
    assert gap(got, want) <= LIMITS[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 11])
def test_same_bits_whatever_the_batch(dtype: torch.dtype, window: int | None) -> None:
    """A token's output as decode row, in a chunk, in a whole prompt and beside others: the same bits."""
    layer = spec(4, window)
    whole = torch.cat(Batch([[30]], 8).run(cuda(True), layer, dtype, dtype))
    chunks = torch.cat(Batch([[13], [9], *[[1]] * 8], 8).run(cuda(True), layer, dtype, dtype))
    beside = [out[:count] for out, count in zip(
        Batch([[7, 40], [22, 1], [1, 0]], 8).run(cuda(True), layer, dtype, dtype), (7, 22, 1), strict=True)]
    assert torch.equal(whole, chunks)
    assert torch.equal(whole, torch.cat(beside))


def test_copy_blocks_follow_the_given_order() -> None:
    backend, layer = cuda(), spec()
    layout = KVLayout((layer,), 8)
    pool = torch.arange(5 * layout.block_elements, dtype=torch.float32).view(5, -1)
    want = pool.clone()
    for src, dst in ((0, 1), (1, 2), (4, 0)):
        want[dst] = want[src]
    backend.bind(layout, pool)
    backend.copy_blocks([(0, 1), (1, 2), (4, 0)])
    assert torch.equal(pool, want)


def test_graph_steps_differ_in_data_alone() -> None:
    layer, rng = spec(4), torch.Generator().manual_seed(0)
    layout = KVLayout((layer,), 8)
    pool = torch.full((40, layout.block_elements), float("nan"))
    launcher = EmulatedLauncher(KERNELS)
    backend = CudaBackend(launcher)
    backend.bind(layout, pool)
    reference = ReferenceBackend(torch.float64)
    judged = pool.clone()
    reference.bind(layout, judged)
    addresses, grids = set(), set()
    for step, seqs in enumerate((3, 5, 4)):
        plan = StepPlan(slices=[Slice(s, [0], step, [s * 3, s * 3 + 1]) for s in range(seqs)])
        whole = torch.randn(8, layer.heads + 4, 32, generator=rng)
        q, k, v = whole[:, :8], whole[:, 8:10], whole[:, 10:]
        small = build_layout(plan, 8)
        backend.prepare_graph(small, rows=8, max_blocks=5)
        launcher.launched.clear()
        out = backend.attend(0, q, k, v, layer)
        assert backend._step is not None
        addresses.add((backend._step.slots.data_ptr(), backend._step.tables.data_ptr()))
        grids.add(tuple(launcher.launched))
        if step == 0:   # sequences 3 and 4 would find no first token later
            for copy in (pool, judged):
                copy[[table * 3 for table in range(seqs, 5)]] = 0.5
        reference.prepare(small)
        want = reference.attend(0, q[:seqs], k[:seqs], v[:seqs], layer)
        assert gap([out[:seqs]], [want]) <= LIMITS[torch.float32]
        assert not out[seqs:].any()
    assert len(addresses) == 1
    assert len(grids) == 1


def test_graph_refuses_what_does_not_fit() -> None:
    backend, layer = cuda(), spec()
    layout = KVLayout((layer,), 8)
    backend.bind(layout, torch.zeros(4, layout.block_elements))
    prompt = build_layout(StepPlan(slices=[Slice(0, [0, 0], 0, [1])]), 8)
    with pytest.raises(CannotRunError, match="2 rows of 1 sequences"):
        backend.prepare_graph(prompt, rows=8, max_blocks=2)


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (3, 4), (9, 16), (256, 256), (257, None)])
def test_rows_are_padded_to_a_captured_count(rows: int, padded: int | None) -> None:
    assert padded_rows(rows) == padded


@pytest.mark.parametrize(("changed", "reason"), [
    ({"key_dim": 46, "value_dim": 46}, "head size 46"), ({"value_dim": 64}, "keys of 32 and values of 64"),
    ({"heads": 3}, "3 query heads over 2 kv heads")])
def test_unsupported_layers_are_named(changed: dict[str, int], reason: str) -> None:
    changes: dict[str, Any] = dict(changed)
    said = cuda().supports(replace(LayerSpec(4, 2, 32, 32, 1.0), **changes), torch.bfloat16, 16)
    assert said is not None and reason in said


def test_supports_says_none_or_names_block_and_type() -> None:
    assert cuda().supports(spec(), torch.bfloat16, 16) is None
    assert "block size 24" in (cuda().supports(spec(), torch.bfloat16, 24) or "")
    assert "float64" in (cuda().supports(spec(), torch.float64, 16) or "")


@pytest.mark.parametrize(("lens", "run"), [([3, 1, 1, 2, 1], (1, 2)), ([2, 3], (0, 0)), ([1, 1], (0, 2)), ([], (0, 0))])
def test_longest_run_of_decode_rows(lens: list[int], run: tuple[int, int]) -> None:
    assert longest_single_run(np.array(lens, np.int32)) == run


@pytest.mark.parametrize(("model", "cache"), [
    (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn), (torch.float32, torch.float8_e5m2)])
def test_warm_up_loads_what_steps_then_launch(model: torch.dtype, cache: torch.dtype) -> None:
    """Loading synchronises, so nothing may be left to load in a step. With an 8-bit cache, queries keep their type."""
    loaded: set[str] = set()

    class Noting(EmulatedLauncher):
        def load(self, kernel: Any) -> None:
            loaded.add(kernel.name)

        def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
            assert kernel.name in loaded, kernel.name

    backend, layer, layout = CudaBackend(Noting(KERNELS)), spec(4), KVLayout((spec(4),), 8)
    backend.bind(layout, torch.zeros(200, layout.block_elements).to(cache))
    backend.warm_up((layer,), model)
    q, k = torch.zeros(8, 8, 32, dtype=model), torch.zeros(8, 2, 32, dtype=model)
    for tokens, start in (([0] * 5, 0), ([0], 900)):
        backend.prepare(build_layout(StepPlan([Slice(0, tokens, start, list(range(128)))]), 8, 8))
        backend.attend(0, q, k, k, layer)
    backend.copy_blocks([(0, 1)])
