"""The GPU check's own code, as far as it runs without a GPU: so that the first GPU it meets is not its first run."""

from __future__ import annotations

import sys

import pytest
import torch

from pagedcli.attention.cuda import CudaBackend
from pagedcli.attention.interface import LayerSpec
from tests.emulator.backend import EmulatedLauncher
from tests.emulator.cases import Kernels
from tests.emulator.emulator import compiler
from tests.execution.test_cuda_store import LateStream
from tests.gpu import check
from tests.gpu.moves import random_moves

SMALL = LayerSpec(4, 2, 32, 32, 0.1)


@pytest.mark.skipif(compiler() is None, reason="the CUDA emulator needs g++, which is not installed")
def test_moves_on_the_slowest_stream_and_the_emulated_copy_kernel() -> None:
    backend = CudaBackend(EmulatedLauncher(Kernels(per_module=1)))
    assert random_moves(60, "cpu", LateStream(), backend, SMALL) == {"steps": 60, "different": 0}


def test_moves_notice_a_copy_that_is_not_waited_for() -> None:
    class Hasty(LateStream):
        def main_waits(self, mark: int) -> None: ...

    backend = CudaBackend(EmulatedLauncher(Kernels(per_module=1)))
    backend.copy_blocks = lambda pairs: None  # type: ignore[method-assign]  # only swaps matter here
    assert random_moves(60, "cpu", Hasty(), backend, SMALL)["different"] > 0


def test_engine_part_compares_runs_and_wants_swaps() -> None:
    found = check.engine((("cpu", "reference", check.ROOMY), ("cpu", "cpu", check.TIGHT)))
    assert found["ok"], found
    assert (found["prompts"], found["equal"]) == (12, 12)
    assert found["runs"][0]["swaps"] == 0 and found["runs"][1]["swaps"] > 0


def test_without_a_gpu_the_check_says_so_and_passes(capsys: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees a CUDA device here")
    monkeypatch.setattr(sys, "argv", ["check"])
    assert check.main() == 0
    assert "gpu-check skipped: torch sees no CUDA device" in capsys.readouterr().out
