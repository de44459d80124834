"""The emulator's cases: every head size, block size, group and type through every kernel, and each rule of attention.

Each case knows the kernels it launches, so that a module compiles all it needs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pagedcli.attention.cuda_launch import Kernel
from pagedcli.attention.cuda_shapes import BLOCK_SIZES, HEAD_DIMS
from tests.emulator.emulator import EmuModule
from tests.emulator.numbers import TOLERANCE
from tests.emulator.problems import Launch, Problem, copy_error, make_shape, write_error


class Kernels:
    """Launches planned kernels on the emulator, compiling modules of up to `per_module` kernels when first needed."""

    def __init__(self, mode: str = "fast", schedule: int = 0, per_module: int = 12) -> None:
        self.mode, self.schedule, self.per_module = mode, schedule, per_module
        self._modules: dict[str, EmuModule] = {}

    def build(self, kernels: Iterable[Kernel], jobs: int = 1) -> None:
        """Compiles what is missing, `jobs` modules at a time."""
        by_source: dict[str, list[str]] = {}
        for kernel in sorted(set(kernels), key=lambda k: (k.source, k.name)):
            if kernel.name not in self._modules:
                by_source.setdefault(kernel.source, []).append(kernel.name)
        parts = [(source, names[i:i + self.per_module]) for source, names in by_source.items()
                 for i in range(0, len(names), self.per_module)]
        with ThreadPoolExecutor(jobs) as pool:
            made = pool.map(lambda part: EmuModule(part[0], part[1], self.mode, self.schedule), parts)
            for (_, names), module in zip(parts, made, strict=True):
                self._modules.update(dict.fromkeys(names, module))

    def launch(self, kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], only: Sequence[int] = ()) -> None:
        if kernel.name not in self._modules:
            self.build([kernel])
        module = self._modules[kernel.name]
        module.schedule = self.schedule
        module.launch(kernel.name, grid, kernel.threads, args, kernel.shared_bytes, only)


class Recorder:
    """Takes launches and runs none: which kernels does a case need?"""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []

    def launch(self, kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], only: Sequence[int] = ()) -> None:
        self.kernels.append(kernel)


@dataclass(frozen=True)
class Case:
    """`run(launch)` gives the worst error, which must not exceed `limit`."""

    name: str
    dtype: str
    limit: float
    run: Callable[[Launch], float]

    def kernels(self) -> list[Kernel]:
        seen = Recorder()
        self.run(seen.launch)
        return seen.kernels


CONTEXTS = (1, 17, 48, 150)
CHUNKS = ((1, 1), (9, 9), (70, 33), (40, 1), (131, 70))
"""(context, queries): a decode row, a whole prompt, chunks behind a cached prefix."""


def decode_case(choice: str, splits: int | None = None, contexts: tuple[int, ...] = CONTEXTS, sinks: bool = False,
                scales: bool = False, sharp: float = 1.0, note: str = "", **shape: Any) -> Case:
    s = make_shape(**shape)
    label = f"{choice}{splits or ''} {s.dtype}/{s.cache_dtype} d{s.head_dim} b{s.block_size} g{s.group} {note}".strip()

    def run(launch: Launch) -> float:
        problem = Problem(s, contexts, sinks=sinks, scales=scales, sharp=sharp)
        return problem.decode_error(launch, choice, splits)

    return Case(label, s.dtype, TOLERANCE[s.dtype], run)


def prefill_case(chunks: tuple[tuple[int, int], ...] = CHUNKS, sinks: bool = False, scales: bool = False,
                 note: str = "", **shape: Any) -> Case:
    s = make_shape(**shape)

    def run(launch: Launch) -> float:
        problem = Problem(s, [c for c, _ in chunks], [n for _, n in chunks], sinks=sinks, scales=scales)
        return problem.prefill_error(launch)

    label = f"prefill {s.dtype}/{s.cache_dtype} d{s.head_dim} b{s.block_size} g{s.group} {note}".strip()
    return Case(label, s.dtype, TOLERANCE[s.dtype], run)


def write_case(scales: bool = False, separate: bool = False, **shape: Any) -> Case:
    s, size = make_shape(**shape), int(shape.get("block_size", 16))
    slots = [3, -1, 4 * size + size - 1, size, 2 * size + 1, -1, 0]
    return Case(f"write {s.dtype}/{s.cache_dtype} d{s.head_dim} b{s.block_size}", s.dtype, 0.0,
                lambda launch: write_error(launch, s, slots, 5, scales, separate=separate))


def matrix() -> list[Case]:
    """All head sizes, block sizes, groups and types; where a full product would be long, they take turns."""
    cases: list[Case] = []
    for i, dim in enumerate(HEAD_DIMS):
        for j, dtype in enumerate(("fp32", "fp16", "bf16")):
            size, turn = BLOCK_SIZES[(i + j) % 5], i * 3 + j
            cases.append(decode_case("v1", dtype=dtype, head_dim=dim, block_size=size))
            cases.append(decode_case("split", 2, dtype=dtype, head_dim=dim, block_size=BLOCK_SIZES[(i + j + 2) % 5],
                                     group=(1, 2, 3, 4, 5, 8)[turn % 6], kv_heads=1))
            cases.append(write_case(dtype=dtype, head_dim=dim, block_size=size))
            if dtype != "fp32":
                cases.append(decode_case("mma", 2, dtype=dtype, head_dim=dim, block_size=BLOCK_SIZES[(i + j + 1) % 5],
                                         group=1 + turn % 16, kv_heads=1))
            cases.append(prefill_case(dtype=dtype, head_dim=dim, block_size=BLOCK_SIZES[(i + j + 3) % 5],
                                      group=(1, 3, 4)[turn % 3], kv_heads=1))
    for size in BLOCK_SIZES:
        for dtype in ("fp16", "fp32"):
            cases.append(decode_case("v1", dtype=dtype, block_size=size))
            cases.append(prefill_case(dtype=dtype, block_size=size, group=2, kv_heads=1))
        cases.append(decode_case("split", 3, block_size=size, group=4, kv_heads=1))
        cases.append(decode_case("mma", 3, block_size=size, group=4, kv_heads=1))
    for group in range(1, 17):
        cases.append(decode_case("split", 2, group=group, kv_heads=2, contexts=(5, 100)))
        cases.append(decode_case("mma", 2, group=group, kv_heads=2, contexts=(5, 100)))
        cases.append(prefill_case(((40, 7), (3, 3)), group=group, kv_heads=2))
    cases.append(decode_case("mma", 2, group=32, kv_heads=1, contexts=(5, 100), note="more than 16 heads"))
    return cases


def float8() -> list[Case]:
    """8-bit caches with and without scales through every kernel."""
    cases: list[Case] = []
    for kind in ("fp8_e4m3", "fp8_e5m2"):
        for i, dim in enumerate((64, 120, 128)):
            size = BLOCK_SIZES[i]
            for dtype in ("fp16", "bf16"):
                cases.append(decode_case("v1", dtype=dtype, cache=kind, head_dim=dim, block_size=size, scales=True))
                cases.append(decode_case("mma", 2, dtype=dtype, cache=kind, head_dim=dim, block_size=size, scales=True,
                                         group=5, kv_heads=2))
                cases.append(prefill_case(dtype=dtype, cache=kind, head_dim=dim, block_size=size, scales=True, group=2))
            cases.append(decode_case("split", 2, cache=kind, head_dim=dim, block_size=size, scales=True, group=4))
            cases.append(decode_case("split", 2, dtype="fp32", cache=kind, head_dim=dim, block_size=size, group=2))
            cases.append(prefill_case(dtype="fp32", cache=kind, head_dim=dim, block_size=size, scales=True))
        for i, dim in enumerate(HEAD_DIMS):
            dtype = ("fp32", "fp16", "bf16")[i % 3]
            size = BLOCK_SIZES[i % 5]
            cases.append(write_case(True, dtype=dtype, cache=kind, head_dim=dim, block_size=size))
            cases.append(write_case(False, dtype=("bf16", "fp32", "fp16")[i % 3], cache=kind, head_dim=dim,
                                    block_size=size))
            cases.append(decode_case("mma", 2, cache=kind, head_dim=dim, block_size=size, group=4, kv_heads=1))
    return cases


def rules() -> list[Case]:
    """Windows, softcap and sinks, alone and together."""
    cases: list[Case] = []
    for dtype in ("fp32", "fp16", "bf16"):
        options: list[dict[str, Any]] = [
            {"window": 19, "note": "window"}, {"softcap": 5.0, "note": "softcap", "sharp": 20.0},
            {"sinks": True, "note": "sinks"},
            {"window": 64, "softcap": 8.0, "sinks": True, "note": "all rules"}, {"window": 1, "note": "window 1"}]
        for option in options:
            cases.append(decode_case("v1", dtype=dtype, **option))
            cases.append(decode_case("split", 3, dtype=dtype, group=3, **option))
            if dtype != "fp32":
                cases.append(decode_case("mma", 3, dtype=dtype, group=6, **option))
            cases.append(decode_case("split", 1, dtype=dtype, group=2, **option))
            kept = {name: value for name, value in option.items() if name != "sharp"}
            cases.append(prefill_case(dtype=dtype, group=2, **kept))
    return cases


def copies() -> list[Case]:
    """Batched block copies."""
    def case(name: str, pairs: list[tuple[int, int]], block_bytes: int) -> Case:
        return Case(f"copy {name}", "bytes", 0.0, lambda launch: copy_error(launch, pairs, 9, block_bytes))
    return [case("one", [(0, 3)], 4096), case("many", [(0, 3), (1, 4), (0, 5), (2, 8)], 8192 + 16),
            case("chain in order", [(0, 1), (1, 2)], 1024), case("swap through a third", [(0, 8), (1, 0), (8, 1)], 512)]


def all_cases() -> list[Case]:
    return [*matrix(), *float8(), *rules(), *copies()]
