"""Compiles CUDA sources for the CPU and launches their kernels with the calling convention of cupy.RawModule.

Builds: `fast` (a library in this process), `asan` (address and undefined-behaviour sanitizers) and `tsan` (data races),
both as programs, one launch a run. Built modules are kept in a cache folder, keyed by all the text that enters them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagedcli.cuda import headers as project_headers
from pagedcli.cuda import source as project_source

HERE = Path(__file__).resolve().parent
HEADERS = HERE / "cuda_emu"
_SANITIZED = ["-O1", "-g", "-DEMU_EXE", "-pie", "-fPIE"]
FLAGS: dict[str, list[str]] = {
    "fast": ["-O1", "-shared", "-fPIC"],
    "asan": [*_SANITIZED, "-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"],
    "tsan": [*_SANITIZED, "-fsanitize=thread"],
}
_COMMON = ["-std=c++20", "-x", "c++", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?([\w: ]+?)\s+(\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(r"(?<!extern )\b__shared__\s+([\w:<>, ]+?)\s+(\w+)\s*((?:\[[^\]]*\])*)\s*;")
_INCLUDE = re.compile(r'^[ \t]*#include[ \t]+"([^"]+)"', re.M)


class EmulatorError(RuntimeError):
    """A kernel that does not compile, misuses the machine, trips a sanitizer or is called with wrong types."""


def compiler() -> str | None:
    """The C++ compiler, or None where there is none."""
    return shutil.which("g++")


def cache_folder() -> Path:
    """Where built modules are kept: PAGEDCLI_EMULATOR_CACHE, else a folder of this user's in the system's temp."""
    given = os.environ.get("PAGEDCLI_EMULATOR_CACHE")
    folder = Path(given) if given else Path(tempfile.gettempdir()) / f"pagedcli-emulator-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def rewrite_shared(text: str) -> str:
    """Shared-memory declarations as calls into the emulator, which poisons and bounds them."""
    text = _DYNAMIC.sub(r"\1* \2 = reinterpret_cast<\1*>(emu::dyn_smem());", text)
    return _STATIC.sub(r"static char \2_key; typedef \1 \2_t\3; "
                       r"\2_t& \2 = *(\2_t*)emu::shared_alloc(&\2_key, sizeof(\2_t));", text)


def translate(source: str, name: str, headers: dict[str, str]) -> str:
    """A .cu text and the project headers it includes as one C++ text with the original line numbers."""
    seen: set[str] = set()

    def inline(text: str, label: str) -> str:
        def included(match: re.Match[str]) -> str:
            header = match.group(1)
            if header not in headers:
                return match.group(0)
            line = text[: match.start()].count("\n") + 2
            body = "" if header in seen else f'#line 1 "{header}"\n' + inline(headers[header], header)
            seen.add(header)
            return f'{body}\n#line {line} "{label}"'
        return rewrite_shared(_INCLUDE.sub(included, text))

    return '#include "cuda_emu.h"\n#line 1 "' + name + '"\n' + inline(source, name) + "\n"


class EmuModule:
    """The kernels `names` (template expressions) of one source file.

    source: text to compile instead of the project's own file `name` (planted bugs); headers likewise.
    schedule: 0 threads in order, 1 in reverse, above that a random order from this seed.
    """

    def __init__(self, name: str, names: Sequence[str], mode: str = "fast", schedule: int = 0,
                 source: str | None = None, headers: dict[str, str] | None = None, extra: str = "") -> None:
        self.mode, self.schedule = mode, schedule
        text = translate(project_source(name) if source is None else source, name,
                         {**project_headers(), **(headers or {})})
        text += "".join(f'EMU_KERNEL("{kernel}", &{kernel})\n' for kernel in names) + extra
        self._binary = self._build(name.split(".")[0], text)
        if mode == "fast":
            self._lib = ctypes.CDLL(str(self._binary))
            self._lib.emu_sig.restype = ctypes.c_char_p

    def _build(self, label: str, text: str) -> Path:
        gpp = compiler()
        if gpp is None:
            raise EmulatorError("g++ is not installed")
        march = ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
        command = [gpp, *_COMMON, *march, *FLAGS[self.mode], f"-I{HEADERS}", f"-I{HEADERS / 'include'}"]
        runtime = "".join(path.read_text() for path in sorted(HEADERS.glob("*.h")))
        key = hashlib.sha256("\0".join([text, runtime, *command]).encode()).hexdigest()[:20]
        binary = cache_folder() / f"{label}_{self.mode}_{key}{'.so' if self.mode == 'fast' else ''}"
        if not binary.exists():
            with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
                cpp, made = Path(scratch) / "module.cpp", Path(scratch) / "module"
                cpp.write_text(text)
                done = subprocess.run([*command, str(cpp), "-o", str(made)], capture_output=True, text=True)
                if done.returncode:
                    raise EmulatorError("does not compile:\n" + done.stderr[:4000])
                os.replace(made, binary)
        return binary

    def signature(self, name: str) -> list[str]:
        """Argument types of a kernel as compiled: p, i4, i8, f4 (fast build only)."""
        text = self._lib.emu_sig(name.encode())
        if text is None:
            raise EmulatorError(f"no kernel {name}")
        return text.decode().split(",") if text else []

    def launch(self, name: str, grid: Sequence[int], threads: int, args: Sequence[Any], shared: int = 0,
               only: Sequence[int] = ()) -> None:
        """Runs one kernel. Arrays are written in place. EmulatorError: anything at all went wrong.

        only: the blockIdx.x to run, all when empty; the grid is checked whole (fast build).
        """
        full = [*grid, 1, 1][:3]
        if self.mode == "fast":
            self._check(name, args)
            self._in_process(name, full, threads, args, shared, only)
        else:
            self._as_program(name, full, threads, args, shared)

    def _check(self, name: str, args: Sequence[Any]) -> None:
        wanted = self.signature(name)
        if len(wanted) != len(args):
            raise EmulatorError(f"{name}: takes {len(wanted)} arguments, got {len(args)}")
        for place, (want, value) in enumerate(zip(wanted, args, strict=True)):
            if isinstance(value, np.ndarray):
                got = "p"
            elif isinstance(value, np.generic):
                got = value.dtype.kind + str(value.dtype.itemsize)
            else:
                got = {int: "i8", float: "f8"}.get(type(value), type(value).__name__)
            if got != want and not (got == "i8" and want == "p" and value == 0):
                raise EmulatorError(f"{name}: argument {place}: kernel wants {want}, call passes {got}")

    def _in_process(self, name: str, grid: list[int], threads: int, args: Sequence[Any], shared: int,
                    only: Sequence[int]) -> None:
        keep: list[Any] = []
        pointers = (ctypes.c_void_p * len(args))()
        for place, value in enumerate(args):
            if isinstance(value, np.ndarray):
                if not value.flags.c_contiguous:
                    raise EmulatorError(f"{name}: argument {place} is not contiguous")
                keep.append(ctypes.c_void_p(value.ctypes.data))
                pointers[place] = ctypes.addressof(keep[-1])
            else:
                keep.append(np.array(value, None if isinstance(value, np.generic) else np.int64))
                pointers[place] = keep[-1].ctypes.data
        message = ctypes.create_string_buffer(2048)
        status = self._lib.emu_launch(name.encode(), (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1),
                                      ctypes.c_size_t(shared), pointers, self.schedule,
                                      (ctypes.c_uint * len(only))(*only), len(only), message, 2048)
        if status:
            raise EmulatorError(message.value.decode())

    def _as_program(self, name: str, grid: list[int], threads: int, args: Sequence[Any], shared: int) -> None:
        encoded = name.encode()
        parts = [struct.pack("<I", len(encoded)), encoded,
                 struct.pack("<6IQ2i", *grid, threads, 1, 1, shared, self.schedule, len(args))]
        arrays: list[np.ndarray] = []
        first: dict[int, int] = {}
        for place, value in enumerate(args):
            if isinstance(value, np.ndarray) and id(value) in first:
                kind, data = 3, struct.pack("<i", first[id(value)])
            elif isinstance(value, np.ndarray):
                first[id(value)] = place
                arrays.append(value)
                kind, data = 1, value.tobytes()
            elif isinstance(value, int):
                kind, data = 2, b""
            else:
                kind, data = 0, np.array(value).tobytes()
            parts += [struct.pack("<iQ", kind, len(data)), data]
        with tempfile.TemporaryDirectory() as folder:
            job, out = Path(folder) / "job", Path(folder) / "out"
            job.write_bytes(b"".join(parts))
            # TSan needs its fixed address ranges free: no address randomisation.
            prefix = [shutil.which("setarch") or "setarch", "-R"] if self.mode == "tsan" else []
            env = dict(os.environ, ASAN_OPTIONS="detect_leaks=0:halt_on_error=1",
                       TSAN_OPTIONS="halt_on_error=1:exitcode=66:report_signal_unsafe=0")
            done = subprocess.run([*prefix, str(self._binary), str(job), str(out)], capture_output=True, text=True,
                                  env=env)
            if done.returncode:
                raise EmulatorError(f"status {done.returncode}: {done.stderr[:6000]}")
            data, offset = out.read_bytes(), 0
        for array in arrays:
            array[...] = np.frombuffer(data, array.dtype, array.size, offset).reshape(array.shape)
            offset += array.nbytes
