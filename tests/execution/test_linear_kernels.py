"""Native products against float64, and that a row's bits depend on the row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedcli.attention.cpu_team import Team
from pagedcli.execution import linear_kernels as linear
from pagedcli.execution.native_decoder import Product
from pagedcli.execution.native_program import Program
from pagedcli.execution.native_weights import pack_product

TYPES = {torch.float32: 3e-6, torch.bfloat16: 2.0 ** -8}
"""Relative errors of a product of some hundreds of terms, rounded once."""


@pytest.fixture(params=TYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    reason = linear.lacks(kind)
    if reason is not None:
        pytest.skip(f"no native products on this processor: {reason}")
    return kind


def multiply(made: Product, x: torch.Tensor, out: torch.Tensor, threads: int = 2) -> None:
    block = np.zeros(linear.WORDS, np.int64)
    given = made.arguments(x.data_ptr(), x.stride(0) * x.itemsize, out.data_ptr(), out.stride(0) * out.itemsize)
    block[:3 + len(given)] = (len(x), 0, 0, *given)
    Program(Team(), [(linear.build_product().address, int(block.ctypes.data))]).run(threads)


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 576, 960), (5, 64, 64), (6, 2, 70), (13, 130, 1),
                                                        (97, 34, 200), (301, 576, 192)])
def test_products_equal_float64(dtype: torch.dtype, rows: int, width: int, columns: int) -> None:
    x, weight, bias = random(dtype, rows, width), random(dtype, columns, width), random(dtype, columns)
    made = Product(pack_product(weight, bias), "store")
    out = torch.full((rows, made.columns), 7.0, dtype=dtype)
    multiply(made, x, out)
    exact = x.double() @ weight.double().T + bias.double()
    assert torch.allclose(out[:, :columns].double(), exact, rtol=TYPES[dtype], atol=TYPES[dtype] * width ** 0.5)
    assert not out[:, columns:].any(), "columns that pad a group come out as zeros"


def test_a_sum_joins_the_float32_that_is_there(dtype: torch.dtype) -> None:
    x, weight, there = random(dtype, 9, 96), random(dtype, 128, 96), random(torch.float32, 9, 128)
    out = there.clone()
    multiply(Product(pack_product(weight), "add"), x, out)
    exact = there.double() + x.double() @ weight.double().T
    assert torch.allclose(out.double(), exact, rtol=1e-5, atol=1e-4)


def test_wide_results_keep_the_sums_in_float32(dtype: torch.dtype) -> None:
    x, weight, bias = random(dtype, 7, 576), random(dtype, 70, 576), random(dtype, 70)
    made = Product(pack_product(weight, bias), "wide")
    out = torch.full((7, made.columns), 7.0)
    multiply(made, x, out)
    exact = x.double() @ weight.double().T + bias.double()
    assert torch.allclose(out[:, :70].double(), exact, rtol=1e-5, atol=1e-4)
    assert not out[:, 70:].any()


def test_gates(dtype: torch.dtype) -> None:
    x, gate, up = random(dtype, 9, 96), random(dtype, 100, 96), random(dtype, 100, 96)
    x[0] *= 30  # gates of some hundreds on both sides
    made = Product(pack_product(linear.gated(gate, up)), "gate")
    out = torch.zeros(9, made.columns // 2, dtype=dtype)
    multiply(made, x, out)
    exact = torch.nn.functional.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    assert torch.allclose(out[:, :100].double(), exact, rtol=2 * TYPES[dtype], atol=1e-4)
    assert not out[:, 100:].any()


def test_a_number_that_is_none_spoils_its_own_row_only(dtype: torch.dtype) -> None:
    x, weight = random(dtype, 8, 64), random(dtype, 64, 64)
    x[3, 5] = float("nan")
    out = torch.zeros(8, 64, dtype=dtype)
    multiply(Product(pack_product(weight), "store"), x, out)
    assert out[3].isnan().all() and not out[[0, 1, 2, 4, 5, 6, 7]].isnan().any()


def test_rows_do_not_depend_on_how_many_there_are_nor_on_threads(dtype: torch.dtype) -> None:
    x, weight = random(dtype, 230, 576), random(dtype, 192, 576)
    made = Product(pack_product(weight), "store")
    whole = torch.zeros(230, 192, dtype=dtype)
    multiply(made, x, whole)
    for first, last, threads in ((0, 1, 1), (0, 6, 2), (3, 10, 2), (100, 229, 1), (7, 120, 3), (229, 230, 2)):
        part = torch.zeros(last - first, 192, dtype=dtype)
        multiply(made, x[first:last], part, threads)
        assert torch.equal(part, whole[first:last]), (first, last, threads)


def test_blocks_are_whole_tiles_and_fit_the_second_level_cache() -> None:
    assert linear.block_rows(576 * 2) == 96
    assert linear.block_rows(4096 * 2) == 48, 48 * 4096 * 2
    assert linear.block_rows(1 << 20) == 12
