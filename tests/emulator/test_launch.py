"""Launch planning: kernels, grids, arguments; and that Python and the headers compute the same sizes."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcli.attention import cuda_launch as plans
from pagedcli.attention.cuda_shapes import A100, H200, HEAD_DIMS, DeviceLimits, mma_decode_bytes, mma_prefill_bytes
from pagedcli.core.errors import CannotRunError
from tests.emulator import faults
from tests.emulator.cases import Kernels
from tests.emulator.emulator import EmuModule
from tests.emulator.numbers import decode, encode_fp8, fp8_table
from tests.emulator.problems import Problem, make_shape, write_error

SMALL = DeviceLimits(46, 99 * 1024, 100 * 1024, (8, 6))


def test_decode_goes_where_it_belongs() -> None:
    many = 512
    assert plans.plan_decode(make_shape(), many, 1000, H200).kernel.base == "decode_v1"
    assert plans.plan_decode(make_shape(group=2), many, 1000, H200).kernel.base == "decode_split"
    assert plans.plan_decode(make_shape(group=3), many, 1000, H200).kernel.base == "decode_mma"
    assert plans.plan_decode(make_shape("fp32", group=8), many, 1000, H200).kernel.base == "decode_split"


@pytest.mark.parametrize(("seqs", "context", "splits"), [(1, 255, 1), (1, 512, 2), (1, 16_384, 33), (64, 16_384, 1)])
def test_splits_fill_the_device_in_pieces_of_256_tokens(seqs: int, context: int, splits: int) -> None:
    # 8 kv heads, tensor cores: two thread blocks an SM on 132 SMs are 264, so 33 splits of one sequence's 8.
    plan = plans.plan_decode(make_shape(group=4, kv_heads=8), seqs, context, H200)
    assert plan.grid == (seqs, 8, splits)
    assert (plan.reduce is None) == (splits == 1)
    assert plan.partials == (seqs * 32 * splits if splits > 1 else 0)


def test_window_limits_the_splits() -> None:
    shape = make_shape(group=4, kv_heads=8, window=512)
    assert plans.plan_decode(shape, 1, 100_000, H200).splits == 2


@pytest.mark.parametrize("device", [A100, H200, SMALL])
@pytest.mark.parametrize("cache", ["fp16", "fp8_e4m3"])
def test_shared_memory_fits_every_device(device: DeviceLimits, cache: str) -> None:
    for dim in HEAD_DIMS:
        shape = make_shape("fp16", dim, cache=cache)
        for kernel in (plans.decode_mma(shape, device), plans.prefill(shape, device)[0]):
            assert kernel.shared_bytes + 2048 <= device.shared_per_block


def test_shared_memory_that_cannot_fit_is_named() -> None:
    with pytest.raises(CannotRunError, match=r"head size 256 needs \d+ bytes of shared memory, the device has 49152"):
        plans.decode_mma(make_shape(head_dim=256), replace(SMALL, shared_per_block=48 << 10, shared_per_sm=64 << 10))


def test_python_and_headers_agree_on_sizes(kernels: Kernels) -> None:
    wanted, asked = [], []
    for dim in HEAD_DIMS:
        for dtype, cpp in (("fp16", "__half"), ("fp32", "float"), ("fp8_e4m3", "fp8_e4m3")):
            asked.append(f"RowShape<{cpp}, {dim}>::E")
            wanted.append(make_shape("fp32" if dtype == "fp32" else "fp16", dim, cache=dtype).lane_elements)
        for dtype, cpp in (("fp16", "__half"), ("fp8_e5m2", "fp8_e5m2")):
            shape = make_shape("fp16", dim, cache=dtype)
            for warps, stages in ((4, 3), (2, 2)):
                asked.append(f"MmaDecode<__half, {cpp}, {dim}, 16, {warps}, {stages}, false>::SHARED")
                wanted.append(mma_decode_bytes(shape, warps, stages))
            asked.append(f"MmaPrefill<__half, {cpp}, {dim}, 16, 4, false>::SHARED")
            wanted.append(mma_prefill_bytes(shape, 4))
    from pagedcli.cuda import source
    text = source("paged_attention_mma.cu") + source("paged_prefill.cu") + (
        f'extern "C" void sizes(int* o) {{ int i = 0; {" ".join(f"o[i++] = {name};" for name in asked)} }}\n')
    module = EmuModule("paged_prefill.cu", [], source=text)
    got = (ctypes.c_int * len(asked))()
    module._lib.sizes(got)
    assert dict(zip(asked, got, strict=True)) == dict(zip(asked, wanted, strict=True))


def test_signatures_are_those_of_the_compiled_kernels(kernels: Kernels) -> None:
    shape = make_shape(head_dim=64, group=3)
    names = [plans.decode_v1(make_shape("fp32", 80, 8)), plans.decode_split(shape), plans.decode_mma(shape, H200),
             plans.reduce_splits(shape), plans.reshape_and_cache(make_shape("bf16", 112)), plans.COPY_BLOCKS,
             plans.prefill(make_shape("fp32", 96, group=2), H200)[0],
             plans.prefill(make_shape("fp16", 64, group=4), H200)[0]]
    kernels.build(names)
    widths = {"p": "p", "i32": "i4", "i64": "i8", "f32": "f4"}
    assert {kernel.base for kernel in names} == set(plans.SIGNATURES)
    for kernel in names:
        wanted = [widths[kind] for _, kind in plans.SIGNATURES[kernel.base]]
        assert kernels._modules[kernel.name].signature(kernel.name) == wanted, kernel.base


def test_what_must_be_refused_is_refused_by_name() -> None:
    said = faults.refusals()
    assert all(said.values())
    assert "head size 46" in said["3 head size 46"]
    assert "splits = 1099511627776 does not fit in i32" in said["14 too large"]


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 9), st.sampled_from([2, 16, 64]))
def test_tiles_cover_every_row_once(lens: list[int], group: int, rows: int) -> None:
    tiles = plans.prefill_tiles(lens, group, rows)
    covered = [(int(s), r) for s, first in tiles for r in range(first, min(first + rows, lens[s] * group))]
    assert covered == [(s, r) for s, length in enumerate(lens) for r in range(length * group)]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_waves_equal_copies_in_order(pairs: list[tuple[int, int]]) -> None:
    want, got = np.arange(7), np.arange(7)
    for src, dst in pairs:
        want[dst] = want[src]
    for wave in plans.copy_waves(pairs):
        assert len(set(wave[:, 1])) == len(wave)
        assert not set(wave[:, 1]) & set(wave[:, 0])
        got[wave[:, 1]] = got[wave[:, 0]]
    assert (want == got).all()


def test_negative_block_is_refused() -> None:
    with pytest.raises(CannotRunError, match="-1 -> 2"):
        plans.copy_waves([(-1, 2)])


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_every_8_bit_code_survives_a_round_trip(kernels: Kernels, kind: str) -> None:
    """Search-based encoder, torch's types and the kernel agree: all codes, midpoints, and values that saturate."""
    import torch
    codes = np.arange(256, dtype=np.uint8)
    table = fp8_table(kind)
    dtype = torch.float8_e4m3fn if kind == "fp8_e4m3" else torch.float8_e5m2
    ours = torch.from_numpy(codes).view(dtype).double().numpy()
    assert np.array_equal(ours, table, equal_nan=True)
    finite = np.isfinite(table)
    assert np.array_equal(encode_fp8(table[finite], kind), codes[finite])
    values = np.random.default_rng(0).standard_normal(4000).astype(np.float32) * 40
    assert np.array_equal(decode(encode_fp8(values, kind), kind), torch.from_numpy(values).to(dtype).double().numpy())
    assert write_error(kernels.launch, make_shape("fp16", cache=kind), [3, -1, 17], 3, scales=True) == 0


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("dtype", "choice", "group"), [("fp32", "v1", 1), ("fp16", "mma", 3), ("bf16", "mma", 3)])
def test_every_8_bit_code_is_read_exactly(kernels: Kernels, kind: str, dtype: str, choice: str, group: int) -> None:
    """One token, whose values are all 256 codes: the output is its values, NaN and infinity included."""
    problem = Problem(make_shape(dtype, 256, 8, group, 1, cache=kind), (1,))
    problem.grid[problem.tables[0, 0], -1, 1, 0, 0] = np.arange(256, dtype=np.uint8)
    out = decode(problem.run_decode(kernels.launch, problem.decode_plan(choice, 1)), dtype)
    for head in range(group):
        assert np.array_equal(out[0, head], fp8_table(kind), equal_nan=True)
