"""Which device a model runs on, and in which type its weights are."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Any

from llvmlite import binding

from pagedcli.attention import cpu_team
from pagedcli.core.devices import HOST, Device
from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.core.wording import counted

if TYPE_CHECKING:
    import torch

DRIVERS = {"linux": "libcuda.so.1", "win32": "nvcuda.dll"}
"""NVIDIA's driver library, which every machine with a CUDA device has."""
THREADS_A_CORE, ALWAYS_ALLOWED_THREADS = 16, 64
"""Threads beyond 16 a core are refused, unless they are no more than the 64 that every machine is allowed: thousands
end in the OpenMP library's death, and long before that they only wait for each other."""


def set_threads(wanted: int) -> None:
    """Give the whole process `wanted` CPU threads, torch included. CannotRunError for more than can be of use."""
    cores = os.cpu_count() or 1
    most = max(ALWAYS_ALLOWED_THREADS, THREADS_A_CORE * cores)
    if wanted > most:
        raise CannotRunError(f"--threads = {wanted:,}: this machine has {counted(cores, 'core')}, for which at most "
                             f"{most:,} threads are of any use. Lower it, or leave it out to use every core",
                             "too_many_threads")
    cpu_team.set_threads(wanted)


def sees_gpu() -> bool:
    """Whether torch sees a CUDA device. Where there is no driver there is none, and torch need not be imported."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        try:
            ctypes.CDLL(DRIVERS[sys.platform])
        except (KeyError, OSError):
            return False
        import torch
    return bool(torch.cuda.is_available())


def pick_device(wanted: str, attention: str = "auto") -> Device:
    """The device to run on. `auto` is a GPU where torch sees one, unless `attention` names a backend of the CPU.

    UsageError: the attention backend runs elsewhere. CannotRunError: CUDA is asked for and absent.
    """
    if attention == "cuda" and wanted == "cpu":
        raise UsageError("--attention-backend cuda runs on a GPU, but --device is cpu: choose --attention-backend cpu "
                         "or reference, or --device cuda")
    if attention in ("cpu", "reference") and wanted == "cuda":
        raise UsageError(f"--attention-backend {attention} runs on the CPU, but --device is cuda: choose "
                         "--attention-backend cuda, or --device cpu")
    if wanted == "cpu" or attention in ("cpu", "reference"):
        return HOST
    here = sees_gpu()
    if not here and "cuda" in (wanted, attention):
        option = "--device" if wanted == "cuda" else "--attention-backend"
        raise CannotRunError(f"{option} cuda: this machine has no CUDA device that torch can use; choose --device cpu "
                             "(and --attention-backend cpu, reference or auto)", "no_device")
    if not here:
        return HOST
    import torch

    return torch.device("cuda")


def pick_dtype(wanted: str, device: Device) -> str:
    """The name of the weights' dtype. `auto`: bf16 where the processor multiplies it natively, else fp32 (fp16 on older
    GPUs)."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        import torch

        return "bf16" if torch.cuda.get_device_capability(torch_device(device))[0] >= 8 else "fp16"
    features = binding.get_host_cpu_features()
    return "bf16" if features.get("avx512bf16", False) or features.get("amx-tile", False) else "fp32"


def torch_device(device: Device) -> torch.device:
    """torch's own name of a device."""
    import torch

    return torch.device(device.type) if device.index is None else torch.device(device.type, device.index)


def torch_dtype(name: str) -> torch.dtype:
    """torch's type of a short name."""
    import torch

    found: torch.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
                          "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn,
                          "fp8_e5m2": torch.float8_e5m2}[name]
    return found
