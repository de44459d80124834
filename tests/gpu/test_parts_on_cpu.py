"""The GPU check's own code, as far as it runs without a GPU: so that the first GPU it meets is not its first run."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagedcli.attention.cuda import CudaBackend
from pagedcli.attention.cuda_shapes import AttentionShape
from pagedcli.attention.interface import LayerSpec
from tests.emulator.backend import EmulatedLauncher
from tests.emulator.cases import Kernels
from tests.emulator.emulator import compiler
from tests.execution.test_cuda_store import LateStream
from tests.gpu import cache_speed, check, parts
from tests.gpu.moves import random_moves
from tests.gpu.sampling import compare_sampling

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


@pytest.mark.skipif(compiler() is None, reason="the CUDA emulator needs g++, which is not installed")
def test_rates_of_moves_are_of_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_speed, "TOKENS", (5,))
    calls = []

    def seconds(call: Callable[[], object]) -> float:
        calls.append(call())
        return 0.25

    shape = AttentionShape("fp16", "fp16", 2, 2, 32, 16, 0.1)
    written, copied = cache_speed.cache_table(1e6, EmulatedLauncher(Kernels(per_module=1)), shape, 4, seconds)
    assert len(calls) == 2
    assert (written["kernel"], written["bytes"]) == ("reshape_and_cache", 5 * 2 * 32 * 2 * 2 * 2)
    assert (copied["kernel"], copied["bytes"]) == ("copy_blocks", 2 * (4 * 2 * 2 * 16 * 32 * 2) * 2)
    assert copied["share_of_copy"] == round(copied["bytes"] / 0.25 / 1e6, 3)


def test_sampling_part_compares_every_row() -> None:
    found = compare_sampling("cpu", 60, 3000)
    assert (found["rows"], found["same_as_cpu"], found["changed_by_neighbours"]) == (60, 60, 0)


def test_engine_part_compares_runs_and_wants_swaps() -> None:
    found = parts.engine((("cpu", "reference", parts.ROOMY), ("cpu", "cpu", parts.TIGHT)))
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


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device here")


@no_gpu
def test_parts_that_fail_or_hang_cost_only_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU each part fails in its own process, one way or another, and the file tells of all of them."""
    for module in (check, parts):
        monkeypatch.setattr(module, "ROOT", tmp_path)   # holds no tests.gpu.check: the process ends at once
    monkeypatch.setattr(check, "LEAST", 0.0)
    assert check.run_all(["streams", "graphs"], "here") == 1
    record = json.loads((tmp_path / "results" / "gpu" / "here.json").read_text())
    assert list(record["parts"]) == ["environment", "streams", "graphs"]
    assert record["parts"]["graphs"]["fault"] == "its process ended with status 1"
    assert "No module named" in record["parts"]["graphs"]["said"]
    assert "gpu-check: FAILED environment, streams, graphs in" in capsys.readouterr().out
    assert check.run_all(["streams"], "here", seconds=-1.0) == 1
    record = json.loads((tmp_path / "results" / "gpu" / "here.json").read_text())
    assert record["parts"]["streams"]["fault"].startswith("not run: the -1 s")


@no_gpu
def test_a_part_s_own_fault_is_told_and_one_that_takes_too_long_is_stopped() -> None:
    found = check.run_part("streams", 100.0)
    assert not found["ok"] and found["fault"].startswith("Traceback") and "in streams" in found["fault"]
    stopped = check.run_part("streams", 0.3)
    assert stopped["fault"] == "stopped after 0 s"


def test_the_check_runs_from_a_checkout_that_is_not_installed() -> None:
    """-I -S: neither the installation nor anything else but the standard library, so only what needs no more."""
    root = Path(check.__file__).parents[2]
    code = (f"import sys; sys.path.insert(0, {str(root)!r}); from tests.gpu.checkout import use_checkout; "
            "use_checkout(); import pagedcli.cuda; print(pagedcli.cuda.__file__)")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == str(root / "cuda" / "__init__.py"), done.stderr


ALLOWED = {"torch", "cupy", "numpy", "numba", "transformers", "typer", "rich", "pandas", "pagedcli", "tests"}


def test_the_check_imports_only_what_it_says_it_needs() -> None:
    here = Path(check.__file__).parent
    files = [here / f"{name}.py" for name in ("cache_speed", "check", "checkout", "compile", "launch", "moves", "parts",
                                               "sampling", "speed")]
    files += [here.parent / "emulator" / f"{name}.py"
              for name in ("cases", "emulator", "faults", "numbers", "problems")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            for name in (name.split(".")[0] for name in names):
                assert name in ALLOWED or name in sys.stdlib_module_names, (file.name, name)
