"""Llama-like decoders as one native program a step, on CPUs that linear_kernels has products for.

The same mathematics as the Hugging Face modules, with fewer roundings: what lies between two matrix products is
computed in float32 and rounded once, and the residual stream stays in float32. The probe at load compares it with the
model's own eager forward like any other. A row's bits depend on the row alone, so no padding.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from typing import Any

import numpy as np
import torch

from pagedcli.attention.cpu import CpuBackend
from pagedcli.attention.cpu_program import AttentionProgram, Rows
from pagedcli.attention.cpu_team import Team
from pagedcli.attention.interface import AttentionBackend
from pagedcli.execution import linear_kernels as linear
from pagedcli.execution.fused_decoder import rotary_table, unfusable
from pagedcli.execution.hf_model import HFDecoder
from pagedcli.execution.native_program import Program
from pagedcli.execution.row_team import compiled, float_bits

ROOM = 256
"""Buffers grow by multiples of this many rows."""


def not_native(decoder: HFDecoder, backend: AttentionBackend) -> str | None:
    """None when the decoder can run as a native program over this backend, else the reason that it cannot."""
    reason = unfusable(decoder) or linear.lacks(decoder.dtype)
    if reason is not None:
        return reason
    if not isinstance(backend, CpuBackend):
        return f"the {backend.name} attention backend"
    config: Any = decoder.module.config
    if any(hasattr(layer.self_attn.o_proj, "combine") for layer in decoder.module.model.layers):
        return "layers split among ranks"
    if config.hidden_size % 2 or config.intermediate_size % 2:
        return "odd widths"
    if len({(spec.heads, spec.kv_heads, spec.value_dim) for spec in decoder.specs}) > 1:
        return "layers of several shapes"
    return None


class Product:
    """One packed product: fills in the argument block of its operation."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: str) -> None:
        kind = linear.KINDS[weight.dtype]
        self.columns = linear.padded(weight.shape[0])
        self._width, self._epilogue = weight.shape[1], epilogue
        self._weights = linear.pack(weight)
        self._bias = torch.zeros(self.columns, dtype=torch.float32)
        if bias is not None:
            self._bias[:len(bias)] = bias
        self._fill = linear.build_tiles(kind, epilogue)
        self._tiles = np.zeros(linear.TILE_ROWS + 1, np.int64)
        self._fill.ctypes(self._tiles.ctypes.data)

    def arguments(self, x: int, x_stride: int, out: int, out_stride: int) -> tuple[int, ...]:
        """The block from word X on; strides in bytes."""
        cell = self._weights.itemsize
        kept = {"store": linear.COLUMNS * cell, "gate": linear.COLUMNS // 2 * cell, "add": linear.COLUMNS * 4}
        return (x, self._weights.data_ptr(), out, self._width * cell // 4, self.columns // linear.COLUMNS,
                self._bias.data_ptr(), x_stride, out_stride, kept[self._epilogue], int(self._tiles.ctypes.data),
                linear.block_rows(self._width * cell))


class NativeLayer:
    """One layer's packed weights; the originals are let go, so that memory holds one copy of each."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [item.bias.detach() for item in projections if item.bias is not None]
        norms = [getattr(attention, name).weight.detach() for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        self.norm_in, self.norm_mid = (_own(norm.weight) for norm in (
            layer.input_layernorm, layer.post_attention_layernorm))
        self.head_norms = torch.stack(norms) if norms else None
        self.qkv = Product(torch.cat([item.weight.detach() for item in projections]),
                            torch.cat(biases) if biases else None, "store")
        self.out = Product(attention.o_proj.weight.detach(), attention.o_proj.bias, "add")
        self.gate_up = Product(linear.gated(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()), None, "gate")
        self.down = Product(mlp.down_proj.weight.detach(), mlp.down_proj.bias, "add")
        for item in (*projections, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            item.weight = torch.nn.Parameter(item.weight.new_empty(0), requires_grad=False)


class NativeDecoder:
    """Implements `decoder.Decoder` over the weights of an HFDecoder, whose own copies it takes apart as it goes."""

    row_tile = 1

    def __init__(self, source: HFDecoder, max_positions: int) -> None:
        module: Any = source.module
        self.specs, self.vocab_size = source.specs, source.vocab_size
        self.dtype, self.device = source.dtype, source.device
        self._hidden, self._inner = int(module.config.hidden_size), int(module.config.intermediate_size)
        self._eps = float(module.config.rms_norm_eps)
        self._embedding: torch.Tensor = _own(module.model.embed_tokens.weight)
        self._norm: torch.Tensor = _own(module.model.norm.weight)
        self._head = Product(module.lm_head.weight.detach(), module.lm_head.bias, "store")
        self._table = rotary_table(module.model.rotary_emb, max_positions)
        self._layers = [NativeLayer(layer) for layer in module.model.layers]
        _give_back()
        self._team = Team()
        self._product = linear.build_product()
        self._backend: CpuBackend | None = None
        self._room = 0
        self._names: list[str] = []
        self._seconds = 0.0

    @property
    def attention_seconds(self) -> float:
        return float(self._program.shares[self._attending].sum()) * self._seconds

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

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See `Decoder.forward`; the logits hold until the next call."""
        began = time.perf_counter()
        if max(len(ids), len(rows)) > self._room:
            self._build(-(-max(len(ids), len(rows)) // ROOM) * ROOM)
        threads = torch.get_num_threads()
        logits = self._logits[:len(rows)]
        blocks = self._blocks
        blocks[:, 0], blocks[-3:, 0] = len(ids), len(rows)
        blocks[:, 1] = np.maximum(blocks[:, 0] // (4 * threads), 1)
        blocks[:, 2] = 0
        blocks[0, 3] = ids.data_ptr()
        blocks[self._turning, 4] = positions.data_ptr()
        blocks[-3, 3] = rows.data_ptr()
        blocks[-1, linear.OUT] = logits.data_ptr()
        self._attention.refresh()
        self._program.run(threads)
        self._seconds = time.perf_counter() - began
        return logits if self._head.columns == self.vocab_size else logits[:, :self.vocab_size].contiguous()

    def _build(self, room: int) -> None:
        """Buffers for `room` rows, and the program over them."""
        assert self._backend is not None, "attach() comes before forward()"
        cell, spec, dtype = self.dtype.itemsize, self.specs[0], self.dtype
        wide = linear.padded(self._hidden)
        mixed_wide = spec.heads * spec.value_dim
        qkv_wide = self._layers[0].qkv.columns
        inner_wide = self._layers[0].gate_up.columns // 2
        residual, normed, qkv, mixed, active, last, last_normed = self._buffers = [
            torch.zeros(room, width, dtype=kind)
            for width, kind in ((wide, torch.float32), (wide, dtype), (qkv_wide, dtype), (mixed_wide, dtype),
                                (inner_wide, dtype), (wide, torch.float32), (wide, dtype))]
        q, k, v = (Rows(qkv.data_ptr() + first * spec.key_dim * cell, qkv_wide * cell)
                   for first in (0, spec.heads, spec.heads + spec.kv_heads))
        self._attention = AttentionProgram(self._backend, self.specs, dtype, q, k, v,
                                           Rows(mixed.data_ptr(), mixed_wide * cell))
        words: list[tuple[int, ...]] = []
        order: list[tuple[str, int]] = []

        def row_op(label: str, name: str, *given: int, kind: torch.dtype | None = None) -> None:
            order.append((label, compiled(name, kind or dtype).address))
            words.append((0, 0, 0, *given))

        def norm(weight: torch.Tensor, here: torch.Tensor, there: torch.Tensor) -> None:
            row_op("norm", "norm of stream", here.data_ptr(), 0, weight.data_ptr(), there.data_ptr(), self._hidden,
                   float_bits(self._eps), wide, wide)

        def product(label: str, made: Product, x: torch.Tensor, out: torch.Tensor | None) -> None:
            order.append((label, self._product.address))
            words.append((0, 0, 0, *made.arguments(x.data_ptr(), x.stride(0) * cell, 0 if out is None else
                                                   out.data_ptr(), made.columns * cell if out is None else
                                                   out.stride(0) * out.itemsize)))

        row_op("embedding", "take to stream", 0, self._embedding.data_ptr(), residual.data_ptr(), self._hidden,
               self._hidden, wide)
        turning = []
        for number, layer in enumerate(self._layers):
            norm(layer.norm_in, residual, normed)
            product("qkv", layer.qkv, normed, qkv)
            turning.append(len(words))
            row_op("rope", "rope", qkv.data_ptr(), 0, self._table.data_ptr(),
                   0 if layer.head_norms is None else layer.head_norms.data_ptr(), qkv_wide, float_bits(self._eps),
                   spec.heads + spec.kv_heads, spec.key_dim, spec.heads, self._table.shape[0])
            order += [("write", -number - 1), ("attention", -number - 1)]
            product("out", layer.out, mixed, residual)
            norm(layer.norm_mid, residual, normed)
            product("gate_up", layer.gate_up, normed, active)
            product("down", layer.down, active, residual)
        row_op("last rows", "take", 0, residual.data_ptr(), last.data_ptr(), self._hidden, wide, wide,
               kind=torch.float32)
        norm(self._norm, last, last_normed)
        product("head", self._head, last_normed, None)
        self._turning = np.array(turning)
        self._blocks = _aligned(len(words), linear.WORDS)
        for block, given in zip(self._blocks, words, strict=True):
            block[:len(given)] = given
        operations, places = [], iter(self._blocks[n:].ctypes.data for n in range(len(words)))
        for label, function in order:
            if function < 0:
                operations.append(self._attention.operations(-function - 1)[label == "attention"])
            else:
                operations.append((function, next(places)))
        self._names = [label for label, _ in order]
        self._attending = np.array([label in ("attention", "write") for label in self._names])
        self._program = Program(self._team, operations)
        self._logits = torch.empty(room, self._head.columns, dtype=dtype)
        self._room = room


def _give_back() -> None:
    """Ask the C library to return what it keeps of freed memory: some 200 MiB of the originals of a small model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _own(weight: torch.Tensor) -> torch.Tensor:
    """A copy: a view into the file of weights would keep all of it in memory."""
    return weight.detach().clone(memory_format=torch.contiguous_format)


def _aligned(rows: int, words: int) -> Any:
    """int64 [rows, words] of zeros, from a cache line on."""
    raw = np.zeros(rows * words + 8, np.int64)
    skip = (-raw.ctypes.data % 64) // 8
    return raw[skip:skip + rows * words].reshape(rows, words)
