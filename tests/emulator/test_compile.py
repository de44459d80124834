"""Compilation without a GPU, the disk cache, and what a user is told where something is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagedcli.attention import cuda_kernels
from pagedcli.attention import cuda_launch as plans
from pagedcli.attention.cuda_kernels import CubinCache, architecture, cache_key, compile_kernels
from pagedcli.attention.cuda_shapes import H200
from pagedcli.core.errors import CannotRunError
from tests.emulator import nvrtc
from tests.emulator.problems import make_shape

ROOT = Path(__file__).resolve().parents[2]
needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=f"no compile gate: {nvrtc.missing()}")


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_main_kernels_compile_without_spills(arch: str) -> None:
    limits = nvrtc.ARCHES[arch]
    grouped = make_shape(head_dim=128, group=8)
    kernels = [plans.decode_v1(make_shape(head_dim=128)), plans.decode_mma(grouped, limits), plans.COPY_BLOCKS,
               plans.reshape_and_cache(grouped)]
    reports = nvrtc.run_gate((arch,), jobs=1, kernels={arch: kernels})
    assert {r.kernel for r in reports} == {k.name for k in kernels}
    assert not {r.kernel: r.faults() for r in reports if r.faults()}


@pytest.mark.slow
@needs_nvrtc
def test_every_kernel_passes_the_gate() -> None:
    assert not {(r.arch, r.kernel): r.faults() for r in nvrtc.run_gate() if r.faults()}


@needs_nvrtc
def test_cache_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CubinCache(tmp_path / "new")
    path, symbols = cache.get("cache_ops.cu", ["copy_blocks"], "sm_80")
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert symbols == {"copy_blocks": "copy_blocks"}

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(cuda_kernels, "compile_kernels", refuse)
    assert cache.get("cache_ops.cu", ["copy_blocks"], "sm_80") == (path, symbols)
    assert sorted(item.suffix for item in (tmp_path / "new").iterdir()) == [".cubin", ".json"]


def test_cache_key_depends_on_all_that_matters() -> None:
    base: dict[str, Any] = {"file": "cache_ops.cu", "names": ["copy_blocks"], "arch": "sm_80", "version": (12, 9)}
    keys = [cache_key(**{**base, **change}) for change in (
        {}, {"names": ["other"]}, {"arch": "sm_90"}, {"version": (13, 0)}, {"text": "other"},
        {"file": "paged_prefill.cu"})]
    assert len(set(keys)) == len(keys)


@needs_nvrtc
def test_source_that_does_not_compile_shows_the_log() -> None:
    with pytest.raises(CannotRunError, match=r"cannot compile cache_ops.cu for sm_80[\s\S]*nonsense"):
        compile_kernels("cache_ops.cu", ["k"], "sm_80", text="__global__ void k() { nonsense; }")


def test_old_gpu_is_refused_by_name() -> None:
    assert architecture((9, 0)) == "sm_90"
    with pytest.raises(CannotRunError, match=r"compute capability 7.5, the CUDA kernels need 8.0"):
        architecture((7, 5))


def test_missing_cupy_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cupy" else find(name))
    with pytest.raises(CannotRunError, match=r"pip install 'pagedcli\[cuda12\]'.*--device cpu"):
        cuda_kernels.import_cupy()


def _fake_cupy(monkeypatch: pytest.MonkeyPatch, **runtime: Any) -> None:
    fault = type("CUDARuntimeError", (RuntimeError,), {})
    values: dict[str, Any] = {"CUDARuntimeError": fault, **runtime}

    def fail() -> int:
        raise fault("cudaErrorInsufficientDriver")

    values.setdefault("getDeviceCount", fail)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(**values)))
    monkeypatch.setattr(cuda_kernels, "import_cupy", lambda: cupy)


def _properties(major: int, minor: int) -> dict[str, int]:
    return {"multiProcessorCount": 132, "sharedMemPerBlockOptin": 227 << 10, "sharedMemPerMultiprocessor": 228 << 10,
            "major": major, "minor": minor}


def test_missing_driver_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_cupy(monkeypatch)
    with pytest.raises(CannotRunError, match=r"no NVIDIA driver .*InsufficientDriver.*--device cpu"):
        cuda_kernels.device_limits()


def test_missing_gpu_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_cupy(monkeypatch, getDeviceCount=lambda: 1)
    with pytest.raises(CannotRunError, match="GPU 1 was asked for, this machine shows 1"):
        cuda_kernels.device_limits(1)


def test_limits_come_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_cupy(monkeypatch, getDeviceCount=lambda: 1, getDeviceProperties=lambda _: _properties(9, 0))
    assert cuda_kernels.device_limits() == H200
    _fake_cupy(monkeypatch, getDeviceCount=lambda: 1, getDeviceProperties=lambda _: _properties(7, 0))
    with pytest.raises(CannotRunError, match=r"compute capability 7.0"):
        cuda_kernels.device_limits()


def test_missing_nvrtc_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    from cupy.cuda import nvrtc as binding

    def fail() -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.12: cannot open shared object file")

    monkeypatch.setattr(binding, "getVersion", fail)
    with pytest.raises(CannotRunError, match=r"libnvrtc.so.12.*pip install nvidia-cuda-nvrtc-cu12"):
        compile_kernels("cache_ops.cu", ["copy_blocks"], "sm_80")


def test_missing_headers_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernels, "_nvrtc", lambda: (None, (12, 9)))
    monkeypatch.setattr(cuda_kernels, "include_folders", list)
    with pytest.raises(CannotRunError, match=r"cuda_fp16.h.*nvidia-cuda-runtime-cu12"):
        compile_kernels("cache_ops.cu", ["copy_blocks"], "sm_80")


def test_checkout_on_the_path_does_not_hide_nvidias_cuda_package() -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    done = subprocess.run([sys.executable, "-c", "import cupy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
