"""The GPU check's parts as tests (`pytest -m gpu`); skipped where torch sees no CUDA device."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.parts import PARTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]


@pytest.mark.parametrize("part", ["kernel_cases", "streams", "graphs", "moves", "sampling", "engine"])
def test_part_holds_on_the_gpu(part: str) -> None:
    found = PARTS[part][0]()
    assert found["ok"], found
