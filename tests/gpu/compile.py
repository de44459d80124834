"""Compiles kernels into the cache on disk beforehand, several processes at a time: one after the other, those of all
cases would take a quarter of the GPU check's time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from pagedcli.attention.cuda_launch import Kernel
from tests.gpu.checkout import use_checkout

MOST_PROCESSES = 16


def _compile(file: str, name: str, arch: str) -> None:
    use_checkout()
    from pagedcli.attention.cuda_kernels import CubinCache
    CubinCache().get(file, [name], arch)


def fill_cache(kernels: Iterable[Kernel], arch: str, processes: int | None = None) -> int:
    """Compile each of `kernels` for `arch` that is not in the cache; returns how many there are. Errors: those of
    `compile_kernels`; BrokenProcessPool when a source takes the compiler's process with it."""
    names = sorted({(kernel.source, kernel.name) for kernel in kernels})
    workers = min(processes or len(os.sched_getaffinity(0)), MOST_PROCESSES, max(1, len(names)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for job in [pool.submit(_compile, file, name, arch) for file, name in names]:
            job.result()
    return len(names)
