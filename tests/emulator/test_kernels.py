"""The CUDA kernels, run on the CPU, against float64."""

from __future__ import annotations

import pytest

from tests.emulator.cases import Case, Kernels, all_cases, copies, decode_case, prefill_case, write_case

QUICK = [
    decode_case("v1", dtype="fp32", head_dim=80, block_size=8),
    decode_case("v1", dtype="fp16", head_dim=120, block_size=32, window=19, sinks=True),
    decode_case("split", 3, dtype="fp16", head_dim=64, group=3),
    decode_case("split", 2, dtype="bf16", head_dim=128, group=5, softcap=5.0),
    decode_case("mma", 3, dtype="fp16", head_dim=64, group=7, block_size=8),
    decode_case("mma", 2, dtype="bf16", head_dim=120, group=16, window=40, sinks=True),
    decode_case("mma", 2, cache="fp8_e4m3", head_dim=64, group=5, scales=True),
    prefill_case(dtype="fp32", head_dim=96, group=2),
    prefill_case(dtype="fp16", head_dim=64, group=4, window=19),
    prefill_case(dtype="bf16", head_dim=80, block_size=8),
    write_case(dtype="bf16", head_dim=112), write_case(True, dtype="fp16", cache="fp8_e5m2"),
    *copies(),
]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_kernel_agrees_with_float64(kernels: Kernels, case: Case) -> None:
    assert case.run(kernels.launch) <= case.limit


@pytest.mark.slow
def test_every_case_agrees_with_float64(kernels: Kernels) -> None:
    cases = all_cases()
    kernels.build([kernel for case in cases for kernel in case.kernels()], jobs=2)
    errors = {case.name: case.run(kernels.launch) for case in cases}
    limits = {case.name: case.limit for case in cases}
    assert not {name: error for name, error in errors.items() if not error <= limits[name]}
