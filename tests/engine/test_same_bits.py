"""A cut of `make same-bits`: every pair of settings, a tiny model, no differing bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.same_bits import compare, pairwise_cells
from tests.execution.tiny_models import save_model


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_bit_depends_on_what_surrounds_a_row(dtype: str, tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "llama")
    prompts = [tuple(3 + (row * 31 + 7 * place) % 90 for place in range(5 + row % 36)) for row in range(24)]
    cells = list(compare(pairwise_cells(), model=str(folder), load_format="auto", dtype=dtype, prompts=prompts,
                         tokens=8, threads=1))
    assert [(cell, differing) for cell, differing, _, _ in cells if differing] == []
    pressed = {cell.pool: preemptions for cell, _, preemptions, _ in cells if preemptions}
    assert {"recompute", "swap"} <= set(pressed), "the tight pools were meant to preempt"
