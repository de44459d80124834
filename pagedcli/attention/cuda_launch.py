"""Which CUDA kernel runs a step, with what grid and arguments. No torch, no CuPy, no GPU: the same plans drive the
GPU and the emulator of the tests.

Kernel argument lists stand here once (`SIGNATURES`); `pack` turns named values into the typed arguments of a launch and
refuses what does not fit, since a launch with a wrong type is undefined behaviour that nothing below reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedcli.attention.cuda_shapes import (
    CPP_TYPES,
    STATIC_SHARED_RESERVE,
    AttentionShape,
    DeviceLimits,
    mma_decode_bytes,
    mma_prefill_bytes,
)
from pagedcli.core.errors import CannotRunError

_CACHE = "k_cache:p v_cache:p tables:p"
_RULES = "sinks:p k_scale:p v_scale:p max_blocks:i32 group:i32 window:i32"
_STRIDES = "scale:f32 softcap:f32 q_stride:i64 q_head_stride:i64 block_stride:i64"
_DECODE = f"q:p {_CACHE} ctx_lens:p {_RULES}"
_PREFILL = f"out:p q:p {_CACHE} starts:p positions:p tiles:p {_RULES} {_STRIDES}"
_SPLIT = f"out:p part_o:p part_ml:p {_DECODE} min_split:i32 {_STRIDES}"

SIGNATURES: dict[str, tuple[tuple[str, str], ...]] = {
    name: tuple((item.split(":")[0], item.split(":")[1]) for item in text.split())
    for name, text in {
        "decode_v1": f"out:p {_DECODE} {_STRIDES}",
        "decode_split": _SPLIT,
        "decode_mma": _SPLIT,
        "reduce_splits": "out:p part_o:p part_ml:p ctx_lens:p sinks:p splits:i32 window:i32 min_split:i32",
        "prefill_mma": _PREFILL,
        "prefill_simt": _PREFILL,
        "reshape_and_cache": "k:p v:p k_cache:p v_cache:p slots:p k_scale:p v_scale:p kv_heads:i32 k_stride:i64 "
                             "k_head_stride:i64 v_stride:i64 v_head_stride:i64 block_stride:i64",
        "copy_blocks": "dst:p src:p pairs:p block_bytes:i64 piece_bytes:i64",
    }.items()
}
"""Kernel -> its arguments in order: (name, p | i32 | i64 | f32)."""

WARPS = 4
MIN_SPLIT = 256
"""Tokens a split holds at least: below it the merge costs more than the parallelism brings."""
FIXED_SPLIT = 512
"""Tokens of every split when the result must not depend on the batch."""
COPY_PIECE = 64 << 10
"""Bytes that one thread block of copy_blocks moves."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled function: source file, template name, threads per block and dynamic shared memory in bytes."""

    source: str
    name: str
    threads: int
    shared_bytes: int = 0

    @property
    def base(self) -> str:
        """Name without template arguments: the key of SIGNATURES."""
        return self.name.split("<")[0]

    def pack(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arguments in order and typed: numpy scalars for numbers, pointers as they are (None becomes address 0).

        TypeError: an argument is missing, unknown or of the wrong kind. OverflowError: a number does not fit.
        """
        signature = SIGNATURES[self.base]
        names = [name for name, _ in signature]
        if set(names) != set(values):
            wrong = sorted(set(names) ^ set(values))
            raise TypeError(f"{self.base} takes {', '.join(names)}; missing or unknown: {', '.join(wrong)}")
        return tuple(_typed(self.base, name, kind, values[name]) for name, kind in signature)


def _typed(kernel: str, name: str, kind: str, value: Any) -> Any:
    if kind == "p":
        if value is None:
            return 0
        if isinstance(value, (bool, float, np.generic)):
            raise TypeError(f"{kernel}: {name} is a pointer, got {type(value).__name__} {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{kernel}: {name} is a number, got {type(value).__name__}")
    if kind == "f32":
        return np.float32(value)
    if isinstance(value, (float, np.floating)):
        raise TypeError(f"{kernel}: {name} is an integer, got {value!r}")
    limits = np.iinfo(np.int32 if kind == "i32" else np.int64)
    if not limits.min <= value <= limits.max:
        raise OverflowError(f"{kernel}: {name} = {value} does not fit in {kind}")
    return limits.dtype.type(value)


def _template(*values: str | int | bool) -> str:
    return "<" + ", ".join(str(v).lower() if isinstance(v, bool) else str(v) for v in values) + ">"


def _types(shape: AttentionShape) -> tuple[str, str, int, int]:
    reason = shape.unsupported()
    if reason is not None:
        raise CannotRunError(f"{reason}. Use --attention-backend cpu or reference", "unsupported_shape")
    return CPP_TYPES[shape.dtype], CPP_TYPES[shape.cache_dtype], shape.head_dim, shape.block_size


def decode_v1(shape: AttentionShape) -> Kernel:
    """One thread block per (sequence, head). Grid (sequences, heads)."""
    return Kernel("paged_attention.cu", "decode_v1" + _template(*_types(shape), WARPS, shape.softcap > 0), WARPS * 32)


def decode_split(shape: AttentionShape) -> Kernel:
    """Split context on CUDA cores. Grid (sequences, kv_heads * ceil(group / rows), splits)."""
    name = "decode_split" + _template(*_types(shape), WARPS, shape.rows, shape.softcap > 0)
    return Kernel("paged_attention.cu", name, WARPS * 32)


def decode_mma(shape: AttentionShape, device: DeviceLimits) -> Kernel:
    """Split context on tensor cores. Grid (sequences, kv_heads * ceil(group / 16), splits).

    Warps and stages: the most that leave two thread blocks on an SM, else one.
    """
    types = _types(shape)
    if not shape.tensor_cores:
        raise CannotRunError(f"decode_mma takes fp16 and bf16 queries, got {shape.dtype}", "unsupported_shape")
    options = [(w, s, mma_decode_bytes(shape, w, s)) for w, s in ((4, 3), (4, 2), (2, 3), (2, 2))]
    for per_block in (device.shared_per_sm // 2, device.shared_per_block):
        for warps, stages, used in options:
            if used + STATIC_SHARED_RESERVE <= per_block:
                name = "decode_mma" + _template(*types, warps, stages, shape.softcap > 0)
                return Kernel("paged_attention_mma.cu", name, warps * 32, used)
    raise CannotRunError(f"decode_mma at head size {shape.head_dim} needs {options[-1][2]} bytes of shared memory, "
                         f"the device has {device.shared_per_block}", "unsupported_shape")


def reduce_splits(shape: AttentionShape) -> Kernel:
    """Merges splits. Grid (sequences, heads)."""
    return Kernel("paged_attention.cu", "reduce_splits" + _template(CPP_TYPES[shape.dtype], shape.head_dim), 128)


def prefill(shape: AttentionShape, device: DeviceLimits) -> tuple[Kernel, int]:
    """Prompt kernel and the (token, head of the group) rows of its tiles. Grid (tiles, kv_heads)."""
    types = _types(shape)
    if not shape.tensor_cores:
        rows = 4 if shape.lane_elements <= 16 else 2
        name = "prefill_simt" + _template(*types, WARPS, rows, shape.softcap > 0)
        return Kernel("paged_prefill.cu", name, WARPS * 32), rows
    for warps in (4, 2):
        used = mma_prefill_bytes(shape, warps)
        if used + STATIC_SHARED_RESERVE <= device.shared_per_block:
            name = "prefill_mma" + _template(*types, warps, shape.softcap > 0)
            return Kernel("paged_prefill.cu", name, warps * 32, used), warps * 16
    raise CannotRunError(f"prefill_mma at head size {shape.head_dim} needs {used} bytes of shared memory, "
                         f"the device has {device.shared_per_block}", "unsupported_shape")


def reshape_and_cache(shape: AttentionShape) -> Kernel:
    """Writes new keys and values. Grid (slots)."""
    vectors = shape.kv_heads * shape.head_dim * (4 if shape.dtype == "fp32" else 2) // 16
    threads = min(256, -(-vectors // 32) * 32)
    return Kernel("cache_ops.cu", "reshape_and_cache" + _template(*_types(shape)), threads)


COPY_BLOCKS = Kernel("cache_ops.cu", "copy_blocks", 256)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How one decode step of one layer runs.

    splits: thread blocks a sequence's context is divided among; above 1 they leave `partials` float32 sums
    (`seqs * heads * splits` rows of head_dim, and as many (maximum, sum) pairs) for `reduce`.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    splits: int
    min_split: int
    reduce: Kernel | None
    partials: int


def plan_decode(shape: AttentionShape, seqs: int, max_context: int, device: DeviceLimits,
                choice: str | None = None, same_bits: bool = False) -> DecodePlan:
    """Kernel and splits for `seqs` sequences of up to `max_context` tokens.

    Groups of three and more run on tensor cores where the type has them. The context is split until there are four
    thread blocks (two on tensor cores, whose blocks fill an SM's shared memory) per SM, never below MIN_SPLIT tokens.
    choice: force v1, split or mma. same_bits: splits of FIXED_SPLIT tokens whatever the batch, so a sequence's result
    depends on its own tokens alone.
    """
    names = {"v1": "decode_v1", "split": "decode_split", "mma": "decode_mma"}
    if choice is not None and choice not in names:
        raise CannotRunError(f"no decode kernel {choice!r}; there are {', '.join(names)}", "unsupported_shape")
    on_tensor_cores = choice == "mma" or (choice is None and shape.tensor_cores and shape.group >= 3)
    if on_tensor_cores:
        kernel, per_sm, heads = decode_mma(shape, device), 2, shape.kv_heads * -(-shape.group // 16)
    else:
        kernel, per_sm = decode_split(shape), 4
        heads = shape.kv_heads * -(-shape.group // shape.rows)
    seen = min(max_context, shape.window + 64) if shape.window else max_context
    if same_bits:
        splits, min_split = -(-max(seen, 1) // FIXED_SPLIT), FIXED_SPLIT
    else:
        wanted = -(-per_sm * device.sm_count // max(1, seqs * heads))
        splits, min_split = max(1, min(wanted, seen // MIN_SPLIT)), MIN_SPLIT
    if choice == "v1" or (choice is None and splits == 1 and shape.group == 1):
        return DecodePlan(decode_v1(shape), (seqs, shape.heads, 1), 1, min_split, None, 0)
    merge = reduce_splits(shape) if splits > 1 else None
    return DecodePlan(kernel, (seqs, heads, splits), splits, min_split, merge,
                      seqs * shape.heads * splits if splits > 1 else 0)


def prefill_tiles(query_lens: Sequence[int], group: int, rows: int) -> NDArray[np.int32]:
    """Work list of the prompt kernels, int32 [n, 2]: (sequence, first row), longest reach last within a sequence.

    A sequence has query_len * group rows; sequences with no rows get no tile.
    """
    counts = [-(-length * group // rows) for length in query_lens]
    total = sum(counts)
    tiles = np.zeros((total, 2), np.int32)
    tiles[:, 0] = np.repeat(np.arange(len(counts)), counts)
    firsts = np.repeat(np.cumsum([0, *counts[:-1]]) if counts else [], counts).astype(np.int64)
    tiles[:, 1] = (np.arange(total) - firsts) * rows
    return tiles


def copy_waves(pairs: Sequence[tuple[int, int]]) -> list[NDArray[np.int64]]:
    """(src, dst) block copies cut into launches whose result equals copying one after the other in the given order.

    Within a launch thread blocks run in any order, so no block is written twice, nor written and read.
    """
    waves: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for src, dst in pairs:
        if src < 0 or dst < 0:
            raise CannotRunError(f"block copy {src} -> {dst}: block numbers must not be negative", "bad_copy")
        if src == dst:
            continue
        if not waves or src in written or dst in written or dst in read:
            waves.append([])
            read, written = set(), set()
        waves[-1].append((src, dst))
        read.add(src)
        written.add(dst)
    return [np.array(wave, np.int64) for wave in waves]
