"""Which device a model runs on, and in which type its weights are."""

from __future__ import annotations

import os

import torch

from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.core.wording import counted

THREADS_A_CORE, ALWAYS_ALLOWED_THREADS = 16, 64
"""Threads beyond 16 a core are refused, unless they are no more than the 64 that every machine is allowed: thousands
end in the OpenMP library's death, and long before that they only wait for each other."""


def set_threads(wanted: int) -> None:
    """Give torch, and with it the whole process, `wanted` CPU threads. CannotRunError for more than can be of use."""
    cores = os.cpu_count() or 1
    most = max(ALWAYS_ALLOWED_THREADS, THREADS_A_CORE * cores)
    if wanted > most:
        raise CannotRunError(f"--threads = {wanted:,}: this machine has {counted(cores, 'core')}, for which at most "
                             f"{most:,} threads are of any use. Lower it, or leave it out to use every core",
                             "too_many_threads")
    torch.set_num_threads(wanted)


def pick_device(wanted: str, attention: str = "auto") -> torch.device:
    """The device to run on. `auto` is a GPU where torch sees one, unless `attention` names a backend of the CPU.

    UsageError: the attention backend runs elsewhere. CannotRunError: CUDA is asked for and absent.
    """
    here = torch.cuda.is_available()
    if attention == "cuda" and wanted == "cpu":
        raise UsageError("--attention-backend cuda runs on a GPU, but --device is cpu: choose --attention-backend cpu "
                         "or reference, or --device cuda")
    if attention in ("cpu", "reference") and wanted == "cuda":
        raise UsageError(f"--attention-backend {attention} runs on the CPU, but --device is cuda: choose "
                         "--attention-backend cuda, or --device cpu")
    if not here and "cuda" in (wanted, attention):
        option = "--device" if wanted == "cuda" else "--attention-backend"
        raise CannotRunError(f"{option} cuda: this machine has no CUDA device that torch can use; choose --device cpu "
                             "(and --attention-backend cpu, reference or auto)", "no_device")
    return torch.device("cuda" if here and wanted != "cpu" and attention not in ("cpu", "reference") else "cpu")


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The weights' dtype. `auto`: bf16 where the processor multiplies it natively, else fp32 (fp16 on older GPUs)."""
    if wanted != "auto":
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32
