"""Emulator problems on a real GPU: their arrays go to the device before a launch and come back after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedcli.attention.cuda_kernels import CudaLauncher
from pagedcli.attention.cuda_launch import Kernel


def owner(array: NDArray[Any]) -> NDArray[Any]:
    """The array whose memory a view looks into."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class GpuLaunch:
    """A `Launch` of tests.emulator.problems that runs on the GPU. Views of one array share its device copy."""

    def __init__(self, launcher: CudaLauncher) -> None:
        import cupy
        self._launcher, self._cupy = launcher, cupy

    def __call__(self, kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], only: Sequence[int] = ()) -> None:
        del only
        host: dict[int, NDArray[Any]] = {}
        for value in args:
            if isinstance(value, np.ndarray):
                host[id(owner(value))] = owner(value)
        device = {key: self._cupy.asarray(array.view(np.uint8).reshape(-1)) for key, array in host.items()}
        passed = []
        for value in args:
            if isinstance(value, np.ndarray):
                whole = owner(value)
                passed.append(device[id(whole)].data.ptr + value.ctypes.data - whole.ctypes.data)
            else:
                passed.append(value)
        self._launcher.launch(kernel, grid, tuple(passed))
        self._cupy.cuda.get_current_stream().synchronize()
        for key, array in host.items():
            if array.flags.writeable:
                device[key].get(out=array.view(np.uint8).reshape(-1))
