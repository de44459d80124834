"""CUDA sources: kernels (.cu) and what they share (.cuh). Compiled by pagedcli.attention.cuda_kernels."""

from __future__ import annotations

from importlib.resources import files
from pkgutil import extend_path

if __name__ == "cuda":
    # The checkout is on the import path, so this folder hides NVIDIA's namespace package `cuda`, of which CuPy needs
    # parts: look for those elsewhere on the path too.
    __path__ = extend_path(__path__, __name__)

KERNEL_FILES: tuple[str, ...] = ("cache_ops.cu", "paged_attention.cu", "paged_attention_mma.cu", "paged_prefill.cu")
HEADER_FILES: tuple[str, ...] = ("common.cuh", "convert.cuh", "ptx.cuh", "simt_attention.cuh", "mma_attention.cuh")


def source(name: str) -> str:
    """Text of one file. ValueError: there is no such file."""
    if name not in KERNEL_FILES + HEADER_FILES:
        raise ValueError(f"no CUDA source {name!r}; there are {', '.join(KERNEL_FILES + HEADER_FILES)}")
    return (files(__name__) / name).read_text(encoding="utf-8")


def headers() -> dict[str, str]:
    """Text of every header, by the name that the kernels include it under."""
    return {name: source(name) for name in HEADER_FILES}
