"""Llama-like decoders as one native program a step, on CPUs that linear_kernels has products for.

The same mathematics as the Hugging Face modules, with fewer roundings: what lies between two matrix products is
computed in float32 and rounded once, and the residual stream stays in float32. The probe at load compares it with the
model's own eager forward like any other. A row's bits depend on the row alone, so no padding.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedcli.attention.cpu import CpuBackend
from pagedcli.attention.cpu_program import AttentionProgram, Rows
from pagedcli.attention.cpu_team import Team, threads
from pagedcli.attention.host_arrays import address, aligned_zeros
from pagedcli.attention.interface import AttentionBackend
from pagedcli.core.devices import HOST
from pagedcli.core.dtypes import dtype_name
from pagedcli.execution import linear_kernels as linear
from pagedcli.execution.native_program import Program
from pagedcli.execution.native_weights import LayerWeights, NativeWeights, Packed
from pagedcli.execution.row_team import compiled, float_bits, rotary_table

NATIVE = "one native program for this CPU"
"""What reports call it."""
ROOM = 256
"""Buffers grow by multiples of this many rows."""


class Product:
    """One packed product: fills in the argument block of its operation."""

    def __init__(self, packed: Packed, epilogue: str) -> None:
        self.columns = packed.columns
        self._packed, self._epilogue = packed, epilogue
        self._fill = linear.build_tiles(dtype_name(packed.weights.dtype), epilogue)
        self._tiles = np.zeros(linear.TILE_ROWS + 1, np.int64)
        self._fill.ctypes(self._tiles.ctypes.data)

    def arguments(self, x: int, x_stride: int, out: int, out_stride: int) -> tuple[int, ...]:
        """The block from word X on; strides in bytes."""
        weights, width = self._packed.weights, self._packed.width
        cell = weights.itemsize
        kept = {"store": linear.COLUMNS * cell, "gate": linear.COLUMNS // 2 * cell, "add": linear.COLUMNS * 4,
                "wide": linear.COLUMNS * 4}
        return (x, address(weights), out, width * cell // 4, self.columns // linear.COLUMNS,
                address(self._packed.bias), x_stride, out_stride, kept[self._epilogue],
                int(self._tiles.ctypes.data), linear.block_rows(width * cell))


class LayerProducts:
    """One layer's products and the norms between them."""

    def __init__(self, weights: LayerWeights) -> None:
        self.norm_in, self.norm_mid, self.head_norms = weights.norm_in, weights.norm_mid, weights.head_norms
        self.qkv, self.out = Product(weights.qkv, "store"), Product(weights.out, "add")
        self.gate_up, self.down = Product(weights.gate_up, "gate"), Product(weights.down, "add")


class NativeDecoder:
    """Implements `decoder.Decoder` over packed weights."""

    row_tile = 1

    def __init__(self, weights: NativeWeights, max_positions: int) -> None:
        self.weights = weights
        self.specs, self.vocab_size = weights.specs, weights.vocab_size
        self.dtype, self.device = weights.dtype, HOST
        self._head = Product(weights.head, "wide")
        self._table = rotary_table(weights.inv_freq, weights.rotary_scale, max_positions)
        self._layers = [LayerProducts(layer) for layer in weights.layers]
        self._team = Team()
        self._product = linear.build_product()
        self._backend: CpuBackend | None = None
        self._room = 0
        self._names: list[str] = []
        self._seconds = 0.0

    @property
    def attention_seconds(self) -> float:
        return self._program.share(self._attending) * self._seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the last forward by kind of operation."""
        total: Counter[str] = Counter()
        for name, share in zip(self._names, self._program.shares.tolist(), strict=True):
            total[name] += share * self._seconds
        return dict(total)

    def attach(self, backend: AttentionBackend) -> None:
        assert isinstance(backend, CpuBackend)
        self._backend, self._room = backend, 0

    def forward(self, ids: NDArray[np.int64], positions: NDArray[np.int64],
                rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Decoder.forward`; the logits hold until the next call."""
        began = time.perf_counter()
        if max(len(ids), len(rows)) > self._room:
            self._build(-(-max(len(ids), len(rows)) // ROOM) * ROOM)
        many = threads()
        logits = self._logits[:len(rows)]
        blocks = self._blocks
        blocks[:, 0], blocks[-3:, 0] = len(ids), len(rows)
        blocks[:, 1] = np.maximum(blocks[:, 0] // (4 * many), 1)
        blocks[:, 2] = 0
        blocks[0, 3] = address(ids)
        blocks[self._turning, 4] = address(positions)
        blocks[-3, 3] = address(rows)
        blocks[-1, linear.OUT] = address(logits)
        self._attention.refresh()
        self._program.run(many)
        self._seconds = time.perf_counter() - began
        return logits if self._head.columns == self.vocab_size else np.ascontiguousarray(logits[:, :self.vocab_size])

    def _build(self, room: int) -> None:
        """Buffers for `room` rows, and the program over them."""
        assert self._backend is not None, "attach() comes before forward()"
        cell, spec, weights, hidden = self.dtype.itemsize, self.specs[0], self.weights, self.weights.hidden
        dtype, wide_dtype = self.dtype, np.dtype(np.float32)
        wide = linear.padded(hidden)
        mixed_wide = spec.heads * spec.value_dim
        qkv_wide = self._layers[0].qkv.columns
        inner_wide = self._layers[0].gate_up.columns // 2
        residual, normed, qkv, mixed, active, last, last_normed = self._buffers = [
            aligned_zeros((room, width), kind)
            for width, kind in ((wide, wide_dtype), (wide, dtype), (qkv_wide, dtype), (mixed_wide, dtype),
                                (inner_wide, dtype), (wide, wide_dtype), (wide, dtype))]
        q, k, v = (Rows(address(qkv) + first * spec.key_dim * cell, qkv_wide * cell)
                   for first in (0, spec.heads, spec.heads + spec.kv_heads))
        self._attention = AttentionProgram(self._backend, self.specs, dtype_name(dtype), q, k, v,
                                           Rows(address(mixed), mixed_wide * cell))
        words: list[tuple[int, ...]] = []
        order: list[tuple[str, int]] = []

        def row_op(label: str, name: str, *given: int, kind: np.dtype[Any] = dtype) -> None:
            order.append((label, compiled(name, dtype_name(kind)).address))
            words.append((0, 0, 0, *given))

        def norm(weight: NDArray[Any], here: NDArray[Any], there: NDArray[Any]) -> None:
            row_op("norm", "norm of stream", address(here), 0, address(weight), address(there), hidden,
                   float_bits(weights.eps), wide, wide)

        def product(label: str, made: Product, x: NDArray[Any], out: NDArray[Any] | None) -> None:
            order.append((label, self._product.address))
            there, stride = (0, made.columns * 4) if out is None else (address(out), out.strides[0])
            words.append((0, 0, 0, *made.arguments(address(x), x.strides[0], there, stride)))

        if weights.embedding is None:  # the head's weights, where they lie packed
            row_op("embedding", "unpack to stream", 0, address(weights.head.weights), address(residual), hidden,
                   linear.COLUMNS, wide)
        else:
            row_op("embedding", "take to stream", 0, address(weights.embedding), address(residual), hidden,
                   hidden, wide)
        turning = []
        for number, layer in enumerate(self._layers):
            norm(layer.norm_in, residual, normed)
            product("qkv", layer.qkv, normed, qkv)
            turning.append(len(words))
            row_op("rope", "rope", address(qkv), 0, address(self._table),
                   0 if layer.head_norms is None else address(layer.head_norms), qkv_wide, float_bits(weights.eps),
                   spec.heads + spec.kv_heads, spec.key_dim, spec.heads, self._table.shape[0])
            order += [("write", -number - 1), ("attention", -number - 1)]
            product("out", layer.out, mixed, residual)
            norm(layer.norm_mid, residual, normed)
            product("gate_up", layer.gate_up, normed, active)
            product("down", layer.down, active, residual)
        row_op("last rows", "take", 0, address(residual), address(last), hidden, wide, wide,
               kind=wide_dtype)
        norm(weights.norm, last, last_normed)
        product("head", self._head, last_normed, None)
        self._turning = np.array(turning)
        self._blocks = aligned_zeros((len(words), linear.WORDS), np.int64)
        for block, given in zip(self._blocks, words, strict=True):
            block[:len(given)] = given
        operations, places = [], iter(self._blocks[n:].ctypes.data for n in range(len(words)))
        for label, function in order:
            if function < 0:
                operations.append(self._attention.operations(-function - 1)[label == "attention"])
            else:
                operations.append((function, next(places)))
        self._names = [label for label, _ in order]
        self._attending = np.flatnonzero([label in ("attention", "write") for label in self._names])
        self._program = Program(self._team, operations)
        self._logits = aligned_zeros((room, self._head.columns), np.float32)
        self._room = room
