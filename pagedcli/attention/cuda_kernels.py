"""Compiles the CUDA kernels with NVRTC, keeps the machine code on disk and launches it through CuPy.

CuPy is imported only when something is compiled or launched. Every way in which a machine can fall short (no CuPy, no
driver, no GPU, no NVRTC, no CUDA headers, a GPU too old) ends in a CannotRunError that says what to do.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.attention.cuda_launch import Kernel
from pagedcli.attention.cuda_shapes import MINIMUM_CAPABILITY, DeviceLimits
from pagedcli.core.errors import CannotRunError
from pagedcli.cuda import headers, source

OPTIONS: tuple[str, ...] = ("--std=c++17", "-ftz=true", "--device-as-default-execution-space")
OTHER_WAYS = "or use --device cpu (--attention-backend cpu or reference)"


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code of some kernels of one source file, and their names in it by template expression."""

    cubin: bytes
    symbols: dict[str, str]


def architecture(capability: tuple[int, int]) -> str:
    """NVRTC's name of a compute capability, e.g. sm_90. CannotRunError: below 8.0."""
    if capability < MINIMUM_CAPABILITY:
        raise CannotRunError(
            f"this GPU has compute capability {capability[0]}.{capability[1]}, the CUDA kernels need "
            f"{MINIMUM_CAPABILITY[0]}.{MINIMUM_CAPABILITY[1]} (A100, RTX 30 or newer): use another GPU {OTHER_WAYS}",
            "gpu_too_old")
    return f"sm_{capability[0]}{capability[1]}"


def import_cupy() -> Any:
    """The cupy module. CannotRunError: it is not installed or does not load."""
    if importlib.util.find_spec("cupy") is None:
        raise CannotRunError("the CUDA kernels need CuPy, which is not installed: pip install 'pagedcli[cuda12]' or "
                             f"'pagedcli[cuda13]', to match the driver, {OTHER_WAYS}", "no_cupy")
    try:
        import cupy
    except ImportError as fault:
        raise CannotRunError(f"CuPy is installed but does not load: {fault}. Reinstall the one that matches the "
                             f"driver (cupy-cuda12x or cupy-cuda13x), {OTHER_WAYS}", "no_cupy") from fault
    return cupy


def _nvrtc() -> tuple[Any, tuple[int, int]]:
    """CuPy's binding and NVRTC's version. CannotRunError: the library does not load."""
    import_cupy()
    from cupy.cuda import nvrtc
    try:
        return nvrtc, tuple(nvrtc.getVersion())
    except (RuntimeError, ImportError, OSError) as fault:
        raise CannotRunError(
            f"NVRTC, the CUDA compiler, does not load: {str(fault).splitlines()[0]}. pip install "
            "nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12 (with cupy-cuda12x) or nvidia-cuda-nvrtc "
            f"nvidia-cuda-runtime nvidia-cuda-crt (with cupy-cuda13x), {OTHER_WAYS}", "no_nvrtc") from fault


def include_folders() -> list[str]:
    """Folders that may hold CUDA's headers (cuda_fp16.h): the wheels' first, then an installed toolkit's."""
    nvidia = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    toolkits = [Path(os.environ[name]) for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    folders = [nvidia / "cuda_runtime" / "include", nvidia / "cu13" / "include", nvidia / "cu12" / "include",
               *(toolkit / "include" for toolkit in toolkits), Path("/usr/local/cuda/include")]
    return [str(folder) for folder in folders if (folder / "cuda_fp16.h").exists()]


def cache_key(file: str, names: Sequence[str], arch: str, version: tuple[int, int], text: str | None = None) -> str:
    """Names everything the machine code depends on: source, headers, kernels, target, compiler, options."""
    parts = [source(file) if text is None else text, *(f"{name}\n{body}" for name, body in sorted(headers().items())),
             *sorted(names), arch, str(version), *OPTIONS]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def compile_kernels(file: str, names: Sequence[str], arch: str, text: str | None = None) -> Compiled:
    """Compiles kernels of one source file (`text` in its place where given); needs NVRTC but no GPU.

    CannotRunError: NVRTC or CUDA's headers are missing, or the source does not compile (first lines of the log).
    """
    nvrtc, version = _nvrtc()
    folders = include_folders()
    if not folders:
        raise CannotRunError("CUDA's headers (cuda_fp16.h) are not installed: pip install nvidia-cuda-runtime-cu12 "
                             f"(CUDA 12) or nvidia-cuda-runtime (CUDA 13), {OTHER_WAYS}", "no_cuda_headers")
    own = [(name.encode(), body.encode()) for name, body in headers().items()]
    program = nvrtc.createProgram(source(file) if text is None else text, file,
                                  [body for _, body in own], [name for name, _ in own])
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        nvrtc.compileProgram(program, (f"-arch={arch}", *OPTIONS, *(f"-I{folder}" for folder in folders)))
        # The binding drops the image's last byte; a reader that walks to the end needs one there.
        return Compiled(nvrtc.getCUBIN(program) + b"\0",
                        {name: nvrtc.getLoweredName(program, name) for name in names})
    except nvrtc.NVRTCError as fault:
        log = nvrtc.getProgramLog(program).strip()[:2000]
        raise CannotRunError(f"NVRTC {version[0]}.{version[1]} cannot compile {file} for {arch}: {fault}\n{log}",
                             "kernel_compilation") from fault
    finally:
        nvrtc.destroyProgram(program)


def default_cache() -> Path:
    """Where machine code is kept: PAGEDCLI_CUDA_CACHE, else pagedcli/cuda in the user's cache folder."""
    given = os.environ.get("PAGEDCLI_CUDA_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedcli" / "cuda"


class CubinCache:
    """Compiled kernels on disk. Files are written whole and renamed, so processes may share the folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_cache()

    def get(self, file: str, names: Sequence[str], arch: str) -> tuple[Path, dict[str, str]]:
        """Path of the cubin and its symbols, compiled now if it is not there. Errors: those of compile_kernels."""
        _, version = _nvrtc()
        stem = self.folder / f"{file.split('.')[0]}-{arch}-{cache_key(file, names, arch, version)}"
        cubin, index = stem.with_suffix(".cubin"), stem.with_suffix(".json")
        if not (cubin.exists() and index.exists()):
            made = compile_kernels(file, names, arch)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(cubin, made.cubin)
            self._write(index, json.dumps(made.symbols).encode())
        symbols: dict[str, str] = json.loads(index.read_text())
        return cubin, symbols

    def _write(self, path: Path, data: bytes) -> None:
        handle, name = tempfile.mkstemp(dir=self.folder)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)


def device_limits(device: int = 0) -> DeviceLimits:
    """Limits of a GPU. CannotRunError: no driver, no GPU, or one that is too old."""
    runtime = import_cupy().cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as fault:
        raise CannotRunError(f"no NVIDIA driver that this CuPy can use: {fault}. Install or update the driver, "
                             f"{OTHER_WAYS}", "no_driver") from fault
    if device >= count:
        raise CannotRunError(f"GPU {device} was asked for, this machine shows {count} (CUDA_VISIBLE_DEVICES may hide "
                             f"some): use a lower number {OTHER_WAYS}", "no_gpu")
    found = runtime.getDeviceProperties(device)
    limits = DeviceLimits(found["multiProcessorCount"], found["sharedMemPerBlockOptin"],
                          found["sharedMemPerMultiprocessor"], (found["major"], found["minor"]))
    architecture(limits.capability)
    return limits


class CudaLauncher:
    """Kernels of one GPU, compiled and loaded when first asked for; launches on a given stream.

    Loading synchronises with the device, so ask for every kernel (`load`) before capturing a graph.
    """

    def __init__(self, device: int = 0, cache: CubinCache | None = None) -> None:
        self.device = device
        self.limits = device_limits(device)
        self._cupy = import_cupy()
        self._cache = cache or CubinCache()
        self._loaded: dict[Kernel, Any] = {}

    def load(self, kernel: Kernel) -> Any:
        """The kernel, ready to launch."""
        found = self._loaded.get(kernel)
        if found is None:
            path, symbols = self._cache.get(kernel.source, [kernel.name], architecture(self.limits.capability))
            with self._cupy.cuda.Device(self.device):
                found = self._cupy.RawModule(path=str(path)).get_function(symbols[kernel.name])
                if kernel.shared_bytes > 48 << 10:
                    found.max_dynamic_shared_size_bytes = kernel.shared_bytes
            self._loaded[kernel] = found
        return found

    def launch(self, kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], stream: Any = None) -> None:
        """Starts a kernel with packed arguments (Kernel.pack) on a CuPy stream, the current one by default."""
        self.load(kernel)(grid, (kernel.threads,), args, shared_mem=kernel.shared_bytes, stream=stream)
