"""Calls the compiled row operations on the attention kernels' team of threads."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedcli.attention.cpu_team import Team, threads
from pagedcli.attention.host_arrays import aligned_zeros, as_array
from pagedcli.core.devices import HOST
from pagedcli.core.dtypes import dtype_name
from pagedcli.core.wording import counted
from pagedcli.execution import row_ops
from pagedcli.execution.host_memory import holding

if TYPE_CHECKING:
    import torch

ELEMENTS: dict[str, Any] = {"fp32": np.float32, "bf16": np.uint16}
"""Element types that the row operations are compiled for."""
TABLE_HALVES = 5
"""Arrays of half a rotary table's size that making one holds at once: angles, a wave in float64 (two), the table (two).
"""
ALONE = 1 << 15
"""Elements below which one thread is faster than waking others."""


@cache
def compiled(name: str, dtype: str) -> Any:
    """The row operation `name` for elements of the type that `dtype` names; `.address` is that of a void(address of its
    block)."""
    return row_ops.BUILDERS[name](ELEMENTS[dtype])


def float_bits(value: float) -> int:
    """A float32 as the integer that an argument block carries."""
    return int(np.float32(value).view(np.int32))


def rotary_table(inv_freq: Any, scale: float, positions: int) -> NDArray[np.float32]:
    """[positions, dim] float32: cosines then sines of each position, from inv_freq [dim / 2] (an array or a tensor),
    times `scale`. Angles are float32, as in the models; their waves are right to the last bit.

    CannotRunError when it does not fit in memory.
    """
    frequencies = as_array(inv_freq).astype(np.float32)
    half = len(frequencies)
    with holding(f"the rotary table of {counted(positions, 'position')}", HOST, "Lower --max-model-len",
                 4 * TABLE_HALVES * positions * half):
        table: NDArray[np.float32] = aligned_zeros((positions, 2 * half), np.float32)
        angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
        for first, wave in ((0, np.cos), (half, np.sin)):
            table[:, first:first + half] = wave(angles, dtype=np.float64)
        table *= np.float32(scale)
        return table


class RowTeam:
    """Row operations of one dtype (torch's). Tensors are contiguous; rows are the first dimension.

    Not safe for two threads at once: the argument block is reused between calls.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._team = Team()
        self._norm, self._rope, self._silu = (compiled(name, dtype_name(dtype)) for name in ("norm", "rope", "silu"))
        self._block = np.zeros(row_ops.WORDS, np.int64)
        self._threads = threads()

    def norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float,
             out: torch.Tensor) -> None:
        """residual [T, D] += delta [T, D]; out [T, D] = residual / rms(residual) * weight [D]."""
        added = 0 if delta is None else delta.data_ptr()
        self._run(self._norm, residual.shape[0], residual.numel(), residual.data_ptr(), added, weight.data_ptr(),
                  out.data_ptr(), residual.shape[1], float_bits(eps), residual.shape[1], residual.shape[1])

    def rope(self, qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, weights: torch.Tensor | None,
             eps: float, heads: int, dim: int, queries: int) -> None:
        """Turn the first `heads` heads of qkv [T, width] by table [positions, dim] (cosines, then sines), in place."""
        norms = 0 if weights is None else weights.data_ptr()
        self._run(self._rope, qkv.shape[0], qkv.numel(), qkv.data_ptr(), positions.data_ptr(), table.data_ptr(), norms,
                  qkv.shape[1], float_bits(eps), heads, dim, queries, table.shape[0])

    def silu(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, W] = silu(gate) * up of gate_up [T, 2 W]."""
        self._run(self._silu, out.shape[0], gate_up.numel(), gate_up.data_ptr(), out.data_ptr(), out.shape[1])

    def _run(self, function: Any, rows: int, elements: int, *words: int) -> None:
        many = 1 if elements < ALONE else self._threads
        block = self._block
        block[0] = rows
        block[1] = max(1, rows // (4 * many)) if many > 1 else rows
        block[2] = 0
        block[3:3 + len(words)] = words
        self._team.run(function.address, block.ctypes.data, many)
