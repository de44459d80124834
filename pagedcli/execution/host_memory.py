"""How much memory a device has free, and the one error for what does not fit in it.

What an option makes the program hold is compared with free memory before it is made: a system that promises more than
it has kills the process later, without a word.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sys import modules
from typing import Any

from pagedcli.core.devices import Device
from pagedcli.core.errors import CannotRunError
from pagedcli.core.wording import counted

WEIGHTS_WAY_OUT = "Choose a smaller --model, or a --dtype of fewer bytes (fp32 has 4 for each weight, bf16 2)"
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory",
          "Storage size calculation overflowed")
"""What torch's allocators say, whose errors on a CPU have no type of their own."""


GROUP = Path("/sys/fs/cgroup")


def free_memory(device: Device) -> int:
    """Bytes free for this process: on a CPU the least of the machine's and of the control group's."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device.index)[0])
    return min([_available_memory(), *_free_in_group(GROUP)])


def _free_in_group(group: Path) -> list[int]:
    """Bytes left under each limit of the control group (version 2 or 1); none where nothing is limited.

    Pages of files that were read count as used there, but the kernel gives them up when memory is asked for.
    """
    free = []
    for folder, limit_file, used_file, prefix in ((group, "memory.max", "memory.current", ""),
                                                  (group / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                                   "total_")):
        try:
            limit = int((folder / limit_file).read_text())  # "max" when there is no limit
            used = int((folder / used_file).read_text())
            account = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(account.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        except (OSError, ValueError):
            continue
        free.append(max(0, limit - max(0, used - files)))
    return free


def _available_memory() -> int:
    """Bytes that the machine can give without swapping: by the kernel's own account where there is one."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        import psutil

        return int(psutil.virtual_memory().available)
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemAvailable:"))


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether an allocation failed, whoever made it."""
    torch: Any = modules.get("torch")  # where it is not in use, none of its errors is about
    if isinstance(fault, MemoryError) or (torch is not None and isinstance(fault, torch.OutOfMemoryError)):
        return True
    return isinstance(fault, RuntimeError) and any(sign in str(fault) for sign in _SIGNS)


def check_room(what: str, size: int, device: Device, way_out: str) -> None:
    """CannotRunError when `what`, of `size` bytes, is more than the device has free; `way_out` says what to do.

    A GPU is not asked: it refuses by itself, at once, and knows better what its allocator can use again.
    """
    if device.type != "cpu":
        return
    free = free_memory(device)
    if size > free:
        raise CannotRunError(f"{what}: {counted(size, 'byte')}, and {device.type} memory has {free:,} free. {way_out}",
                             "out_of_memory")


@contextmanager
def holding(what: str, device: Device, way_out: str, size: int = 0) -> Iterator[None]:
    """While `what` is made: CannotRunError when `size` bytes or anything allocated inside does not fit."""
    if size:
        check_room(what, size, device, way_out)
    try:
        yield
    except (MemoryError, RuntimeError) as fault:
        if not is_out_of_memory(fault):
            raise
        raise CannotRunError(f"{what}: does not fit in {device.type} memory, which has {free_memory(device):,} bytes "
                             f"free. {way_out}", "out_of_memory") from fault


def give_back() -> None:
    """Ask the C library to return to the system what it keeps of freed memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
