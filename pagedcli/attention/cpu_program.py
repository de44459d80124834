"""CPU attention as operations of a native program: a layer's argument block stays, only the step's fields change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedcli.attention import cpu_kernels as kernels
from pagedcli.attention.cpu import CpuBackend
from pagedcli.attention.host_arrays import aligned_zeros
from pagedcli.attention.interface import LayerSpec
from pagedcli.core.dtypes import DTYPE_BYTES

_WORDS = kernels.ARGUMENT_BYTES // 8


def _span(fields: range) -> slice:
    return slice(fields.start // 8, fields.stop // 8)


@dataclass(frozen=True, slots=True)
class Rows:
    """Where rows of heads lie: address, bytes from row to row; heads of a row lie side by side."""

    address: int
    stride: int


class AttentionProgram:
    """The layers of a bound backend over fixed places for q, k, v and the result, all of the type that
    `dtype` names.

    The places hold as many rows as any step has; `refresh` comes after the backend's prepare().
    """

    def __init__(self, backend: CpuBackend, specs: Sequence[LayerSpec], dtype: str, q: Rows, k: Rows, v: Rows,
                 out: Rows) -> None:
        if len({(spec.heads, spec.kv_heads, spec.value_dim) for spec in specs}) != 1 or specs[0].sinks:
            raise ValueError("layers of one shape and without sinks share their places")
        self._backend = backend
        self._layers = [backend.make_layer(number, spec, dtype) for number, spec in enumerate(specs)]
        spec, cell = specs[0], DTYPE_BYTES[dtype]
        if out.stride != spec.heads * spec.value_dim * cell:
            raise ValueError(f"the result's rows are {out.stride} bytes apart, and the kernels write them side by side")
        self._blocks = aligned_zeros((len(specs), _WORDS), np.int64)
        for block, layer in zip(self._blocks, self._layers, strict=True):
            block[_span(kernels.LAYER_FIELDS)] = layer.fields
            block[_span(kernels.CALL_FIELDS)] = (
                0, 0, 0, 0, out.address, q.address, q.stride, spec.key_dim * cell, k.address, k.stride,
                spec.key_dim * cell, v.address, v.stride, spec.value_dim * cell)

    def operations(self, layer: int) -> list[tuple[int, int]]:
        """(address of the function, address of its argument block) of the write and of the attention of a layer."""
        block = int(self._blocks[layer:].ctypes.data)
        loops = self._backend.loops
        return [(loops.write, block), (loops.attend, block)]

    def refresh(self) -> None:
        """Take over the step that the backend was prepared for."""
        blocks = self._blocks
        blocks[:, :32] = 0
        blocks[:, _span(kernels.STEP_FIELDS)] = self._backend.step_values
        # Layers of one shape cut the step alike; windows and caps change neither items nor scratch.
        items, many, _ = self._backend.work(self._layers[0])
        where = kernels.CALL_FIELDS.start // 8
        blocks[:, where:where + 3] = items, many, self._backend.scratch_for(self._layers[0])
