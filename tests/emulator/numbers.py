"""Element types as numpy sees them, and attention in float64: the reference of every emulator and GPU case."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STORAGE: dict[str, type[np.generic]] = {
    "fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "fp8_e4m3": np.uint8, "fp8_e5m2": np.uint8,
}
"""bf16 and fp8 travel as their bits."""
TOLERANCE: dict[str, float] = {"fp32": 5e-6, "fp16": 2e-3, "bf16": 1.6e-2}
"""Largest error allowed, relative to the largest element of the row: about four units in the last place of the
output type. Tensor-core kernels also round the weights to it."""


def fp8_table(kind: str) -> NDArray[np.float64]:
    """Values of the 256 codes, by the definition of sign, exponent and mantissa (OCP 8-bit floating point, OFP8)."""
    mantissa, bias = (3, 7) if kind == "fp8_e4m3" else (2, 15)
    values = np.empty(256)
    for code in range(256):
        exponent, fraction = (code & 0x7F) >> mantissa, code & ((1 << mantissa) - 1)
        if exponent == 0:
            value = fraction * 2.0 ** (1 - bias - mantissa)
        else:
            value = (1 + fraction / 2**mantissa) * 2.0 ** (exponent - bias)
        if kind == "fp8_e4m3" and code & 0x7F == 0x7F:
            value = np.nan
        if kind == "fp8_e5m2" and exponent == 31:
            value = np.nan if fraction else np.inf
        values[code] = -value if code & 0x80 else value
    return values


def encode_fp8(x: NDArray[np.floating], kind: str) -> NDArray[np.uint8]:
    """Nearest code, ties to the even one, saturating; found by search, so independent of any bit manipulation."""
    table = fp8_table(kind)
    codes = np.flatnonzero(np.isfinite(table[:128]))
    wide = np.abs(np.asarray(x, np.float64))
    right = np.clip(np.searchsorted(table[codes], wide), 0, len(codes) - 1)
    left = np.maximum(right - 1, 0)
    to_left, to_right = wide - table[codes][left], table[codes][right] - wide
    pick_left = (to_left < to_right) | ((to_left == to_right) & (left % 2 == 0))
    code = np.where(pick_left, left, right).astype(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F if kind == "fp8_e4m3" else 0x7E),
                    code | (np.signbit(x).astype(np.uint8) << 7)).astype(np.uint8)


def encode(x: NDArray[np.floating], dtype: str) -> NDArray[np.generic]:
    """Float values to stored elements, rounding to nearest even."""
    if dtype in ("fp32", "fp16"):
        return np.ascontiguousarray(x, STORAGE[dtype])
    if dtype == "bf16":
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)
    return encode_fp8(x, dtype)


def decode(x: NDArray[np.generic], dtype: str) -> NDArray[np.float64]:
    """Stored elements to float64, exactly."""
    if dtype in ("fp32", "fp16"):
        return x.astype(np.float64)
    if dtype == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return fp8_table(dtype)[x]


def poison(dtype: str) -> np.generic:
    """A NaN of the type."""
    return encode(np.array([np.nan], np.float32), dtype)[0]


def attend(q: NDArray[np.float64], keys: NDArray[np.float64], values: NDArray[np.float64], position: int,
           scale: float, window: int = 0, softcap: float = 0.0,
           sinks: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """One query token q [heads, dim] at `position` over keys, values [tokens, kv_heads, dim]: [heads, dim]."""
    heads, kv_heads = q.shape[0], keys.shape[1]
    low = max(0, position + 1 - window) if window else 0
    out = np.zeros_like(q)
    if position < 0:
        return out
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = keys[low:position + 1, kv_head] @ q[head] * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        top = scores.max() if sinks is None else max(scores.max(), sinks[head])
        weights = np.exp(scores - top)
        total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head] - top))
        out[head] = weights / total @ values[low:position + 1, kv_head]
    return out


def worst_error(out: NDArray[np.float64], want: NDArray[np.float64]) -> float:
    """Largest |out - want| over a row's largest |want|; infinite where out is not finite. Rows are the last axis."""
    if not np.isfinite(out).all():
        return float("inf")
    size = np.maximum(np.abs(want).max(-1, keepdims=True), 1e-3)
    return float((np.abs(out - want) / size).max(initial=0.0))
