"""Arrays in host memory, numpy's and torch's alike: the native CPU path runs without torch, others bring tensors.

Numpy has no bfloat16 and no 8-bit floats; ml_dtypes gives it both. Nothing here imports torch unless it is handed one
of its objects.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from math import prod
from sys import modules
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pagedcli.core.dtypes import dtype_name

HOST_DTYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
LINE = 64
"""Bytes of a cache line, and of the widest vectors."""
_WORDS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.int16), 4: np.dtype(np.int32)}


def as_array(values: Any) -> NDArray[Any]:
    """An array, or a CPU tensor of any float type as the array that shares its memory."""
    if isinstance(values, np.ndarray):
        return values
    import torch

    tensor: torch.Tensor = values.detach()
    if not tensor.is_floating_point():
        return tensor.numpy()
    words: Any = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    array: NDArray[Any] = tensor.view(words).numpy()
    return array.view(HOST_DTYPES[dtype_name(tensor.dtype)])


def as_tensor(values: Any) -> Any:
    """A tensor, or an array as the CPU tensor that shares its memory."""
    import torch

    if isinstance(values, torch.Tensor):
        return values
    if values.dtype.kind in "iu":
        return torch.from_numpy(values)
    words = torch.from_numpy(values.view(_WORDS[values.itemsize]))
    return words.view(getattr(torch, str(values.dtype)))


def words_of(values: Any) -> NDArray[Any]:
    """The memory of an array or a CPU tensor as integers of its element size: moves are the same for every type."""
    array = as_array(values)
    return array.view(_WORDS[array.itemsize])


def host_floats(values: Any) -> NDArray[np.float32]:
    """Numbers as float32 in host memory, C-contiguous: what is given where it is so already, else a copy."""
    if not isinstance(values, np.ndarray):
        values = as_array(values.detach().float().cpu())
    return np.ascontiguousarray(values, np.float32)


def address(values: Any) -> int:
    """Where the first element lies."""
    return int(values.ctypes.data if isinstance(values, np.ndarray) else values.data_ptr())


def zeros(shape: Sequence[int], dtype: Any, device: Any) -> Any:
    """An array of a numpy dtype, or a tensor of a torch dtype on `device`."""
    if isinstance(dtype, np.dtype):
        return np.zeros(shape, dtype)
    import torch

    return torch.zeros(tuple(shape), dtype=dtype, device=device)


def aligned_zeros(shape: Sequence[int], dtype: Any) -> NDArray[Any]:
    """Zeros on a cache line's boundary, which vector kernels ask for and numpy does not promise."""
    kind = np.dtype(dtype)
    size = prod(shape) * kind.itemsize
    raw = np.zeros(size + LINE, np.uint8)
    skip = -int(raw.ctypes.data) % LINE
    return raw[skip:skip + size].view(kind).reshape(shape)


def aligned_copy(values: Any) -> NDArray[Any]:
    """The same numbers in the same order on a cache line's boundary, C-contiguous."""
    array = as_array(values)
    copy = aligned_zeros(array.shape, array.dtype)
    copy[...] = array
    return copy


def lazy_zeros(shape: Sequence[int], dtype: Any) -> Any:
    """Zeros on a page boundary of the host, whose pages the system makes when they are first touched; an array for a
    numpy dtype, else a tensor.

    Ordinary zeros are written at once, which takes seconds for a pool of some gigabytes, most of it never used.
    """
    host = HOST_DTYPES[dtype_name(dtype)] if not isinstance(dtype, np.dtype) else dtype
    count = prod(shape)
    if count == 0:
        made = np.zeros(shape, host)
    else:
        memory = mmap.mmap(-1, count * host.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # not every kernel has huge pages; they only save time
                memory.madvise(mmap.MADV_HUGEPAGE)
        made = np.frombuffer(memory, host, count).reshape(shape)
    return made if isinstance(dtype, np.dtype) else as_tensor(made)


def inference_mode() -> AbstractContextManager[Any]:
    """torch's inference mode where torch is in use, else nothing."""
    torch: Any = modules.get("torch")
    return nullcontext() if torch is None else torch.inference_mode()
