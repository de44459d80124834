"""CUDA attention: torch tensors through the fused kernels, on torch's current stream, without a device-to-host sync.

A step's integers (slots, lengths, tables, work list) go to the device as one copy from pinned memory. Decode rows run
on the split kernels, other rows on the prompt kernels. A batch of decode rows alone, padded to a fixed number of rows
and to a fixed table, keeps every address and every grid from step to step: that is what a CUDA graph replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from pagedcli.attention import cuda_launch as plans
from pagedcli.attention.cuda_launch import Kernel
from pagedcli.attention.cuda_shapes import AttentionShape, DeviceLimits
from pagedcli.attention.cuda_step import DecodeRun, Step, StepBuffer, pack_step
from pagedcli.attention.fresh_prompts import attend_prompts, plain_causal
from pagedcli.attention.interface import AttentionBackend, BatchLayout, KVLayout, LayerSpec
from pagedcli.core.errors import CannotRunError

TYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


class Launcher(Protocol):
    """Where kernels run: a GPU, or the emulator of the tests."""

    limits: DeviceLimits
    device: torch.device

    def launch(self, kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...]) -> None: ...

    def load(self, kernel: Kernel) -> Any: ...

    def pointer(self, tensor: torch.Tensor) -> Any: ...


class TorchLauncher:
    """Launches on torch's current stream of a GPU. CannotRunError: no CuPy, driver, GPU, NVRTC or too old a GPU."""

    def __init__(self, device: int = 0) -> None:
        from pagedcli.attention.cuda_kernels import CudaLauncher, import_cupy
        self._inner = CudaLauncher(device)
        self._stream_type = import_cupy().cuda.Stream
        self._streams: dict[int, Any] = {}
        self.limits = self._inner.limits
        self.device = torch.device("cuda", device)

    def launch(self, kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        current = torch.cuda.current_stream(self.device)
        stream = self._streams.get(current.cuda_stream)
        if stream is None:
            stream = self._streams[current.cuda_stream] = self._external(current)
        self._inner.launch(kernel, grid, args, stream)

    def _external(self, stream: torch.cuda.Stream) -> Any:
        wrap = getattr(self._stream_type, "from_external", None)   # CuPy 14; ExternalStream before it
        if wrap is not None:
            return wrap(stream)
        from pagedcli.attention.cuda_kernels import import_cupy
        return import_cupy().cuda.ExternalStream(stream.cuda_stream, self.device.index)

    def load(self, kernel: Kernel) -> Any:
        return self._inner.load(kernel)

    def pointer(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class _Bound:
    """The pool and one layer's place in it."""

    keys: torch.Tensor
    values: torch.Tensor
    block_stride: int


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim] with rows that 16-byte loads can take: itself, or a copy where strides do not allow it."""
    size = x.element_size()
    fits = x.stride(2) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) * size % 16 == 0 and x.stride(1) * size % 16 == 0
    return x if fits else x.contiguous()


class CudaBackend(AttentionBackend):
    """Fused paged attention on an NVIDIA GPU of compute capability 8.0 or more. Tiles are [slot, dim].

    same_bits: every row goes through the prompt kernel, whose arithmetic for a row depends on nothing but the row's
    own tokens; decode then loses the split over long contexts. flash_prompts: steps of fresh prompts alone attend by
    torch's scaled_dot_product_attention where it knows the layer's rule; last bits then depend on the kernel it picks.
    decode_kernel: v1, split or mma instead of the planner's choice, for measurements.
    """

    name = "cuda"

    def __init__(self, launcher: Launcher | None = None, same_bits: bool = False, flash_prompts: bool = False,
                 decode_kernel: str | None = None) -> None:
        self._launcher: Launcher = launcher or TorchLauncher()
        self.same_bits = same_bits
        self.flash_prompts = flash_prompts and not same_bits
        self.decode_kernel = decode_kernel
        self.device = self._launcher.device
        self._layout: KVLayout | None = None
        self._layers: list[_Bound] = []
        self._pool: torch.Tensor | None = None
        self._buffer = StepBuffer(self.device)
        self._graph_buffers: dict[tuple[int, int], StepBuffer] = {}
        self._step: Step | None = None
        self._sinks: dict[int, torch.Tensor] = {}
        self._scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._part_o = torch.empty(0, dtype=torch.float32, device=self.device)
        self._part_ml = torch.empty(0, dtype=torch.float32, device=self.device)
        self._outgrown: list[torch.Tensor] = []

    def supports(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        if dtype not in TYPE_NAMES:
            return f"cache type {dtype}: the CUDA kernels take {', '.join(str(known) for known in TYPE_NAMES)}"
        if spec.key_dim != spec.value_dim:
            return f"keys of {spec.key_dim} and values of {spec.value_dim} elements: the CUDA kernels need them equal"
        cache = TYPE_NAMES[dtype]
        return self._shape(spec, "bf16" if cache.startswith("fp8") else cache, cache, block_size).unsupported()

    def bind(self, layout: KVLayout, pool: torch.Tensor) -> None:
        size = pool.element_size()
        if pool.data_ptr() % 16 or layout.block_elements * size % 16:
            raise CannotRunError(f"blocks of {layout.block_elements * size} bytes at {pool.data_ptr():#x}: the CUDA "
                                 "kernels need both to be multiples of 16", "unsupported_shape")
        self._layout, self._pool = layout, pool
        flat = pool.view(-1)
        self._layers = [_Bound(flat[layout.key_offset(i):], flat[layout.value_offset(i):], layout.block_elements)
                        for i in range(len(layout.layers))]

    def set_scales(self, layer: int, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
        """Factors [kv_heads] of an 8-bit cache's elements: what is stored times the factor is the value."""
        self._scales[layer] = (k_scale.to(self.device, torch.float32).contiguous(),
                               v_scale.to(self.device, torch.float32).contiguous())

    def prepare(self, batch: BatchLayout) -> None:
        self._step = self._upload(batch, self._buffer, len(batch.slots), batch.tables.shape[1],
                                  int(batch.context_len.max(initial=1)), fixed=False)

    def prepare_graph(self, batch: BatchLayout, rows: int, max_blocks: int) -> None:
        """As `prepare`, for a batch of decode rows alone, into the buffers of a graph of `rows` rows and tables of
        `max_blocks` entries: addresses and grids depend on these two numbers only. Call it before a capture, and again
        with the next batch before each replay. CannotRunError: the batch does not fit or holds prompt rows.
        """
        assert self._layout is not None, "bind() comes before use"
        if not batch.decode_only or batch.num_seqs > rows or batch.tables.shape[1] > max_blocks:
            raise CannotRunError(f"{batch.num_tokens} rows of {batch.num_seqs} sequences with tables of "
                                 f"{batch.tables.shape[1]} blocks do not fit a decode graph of {rows} rows and "
                                 f"{max_blocks} blocks: run this step without a graph", "graph_mismatch")
        buffer = self._graph_buffers.setdefault((rows, max_blocks), StepBuffer(self.device))
        self._step = self._upload(batch, buffer, rows, max_blocks, max_blocks * self._layout.block_size, fixed=True)

    def _upload(self, batch: BatchLayout, buffer: StepBuffer, rows: int, width: int, max_context: int,
                fixed: bool) -> Step:
        assert self._layout is not None, "bind() comes before use"
        work = set()
        if self.same_bits or not batch.decode_only:
            for spec in self._layout.layers:
                for dtype in self._query_types():
                    shape = self._shape(spec, dtype, self._cache_type(), self._layout.block_size)
                    work.add((shape.group, plans.prefill(shape, self._launcher.limits)[1]))
        return pack_step(batch, buffer, rows, width, max_context, sorted(work), decode=not self.same_bits, fixed=fixed)

    def _cache_type(self) -> str:
        assert self._pool is not None, "bind() comes before use"
        return TYPE_NAMES[self._pool.dtype]

    def _query_types(self) -> tuple[str, ...]:
        cache = self._cache_type()
        return ("fp32", "fp16") if cache.startswith("fp8") else (cache,)   # fp16 and bf16 tiles are alike

    @staticmethod
    def _shape(spec: LayerSpec, dtype: str, cache: str, block_size: int) -> AttentionShape:
        return AttentionShape(dtype, cache, spec.heads, spec.kv_heads, spec.key_dim, block_size, spec.scale,
                              spec.window or 0, spec.softcap or 0.0)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               spec: LayerSpec, sinks: torch.Tensor | None = None) -> torch.Tensor:
        step, layout, pool = self._step, self._layout, self._pool
        assert step is not None and layout is not None and pool is not None, "prepare() comes before attend()"
        cache = self._cache_type()
        compute = q.dtype if cache.startswith("fp8") and TYPE_NAMES.get(q.dtype) else pool.dtype
        shape = self._shape(spec, TYPE_NAMES[compute], cache, layout.block_size)
        bound, point = self._layers[layer], self._launcher.pointer
        rows = _aligned(q.to(compute))
        scales = self._scales.get(layer)
        shared: dict[str, Any] = {
            "k_cache": point(bound.keys), "v_cache": point(bound.values), "block_stride": bound.block_stride,
            "k_scale": None if scales is None else point(scales[0]),
            "v_scale": None if scales is None else point(scales[1])}
        self._write(shape, step, shared, _aligned(k.to(compute)), _aligned(v.to(compute)))
        if self.flash_prompts and step.prompts and plain_causal(spec, step.prompts) and compute is pool.dtype:
            return attend_prompts(q, k, v, step.prompts, spec)
        out = torch.empty(q.shape[0], spec.heads, spec.value_dim, dtype=compute, device=self.device)
        shared |= {"sinks": None if not spec.sinks else point(self._sink(layer, sinks)), "group": shape.group,
                   "window": shape.window, "scale": shape.scale, "softcap": shape.softcap, "q_stride": rows.stride(0),
                   "q_head_stride": rows.stride(1), "max_blocks": step.width}
        if step.decode.count:
            self._decode(shape, step.decode, step, shared, rows, out)
        if step.prompt_tokens:
            kernel, per_tile = plans.prefill(shape, self._launcher.limits)
            tiles, count = step.tiles[(shape.group, per_tile)]
            self._launcher.launch(kernel, (count, spec.kv_heads), kernel.pack({
                **shared, "out": point(out), "q": point(rows), "tables": point(step.tables),
                "starts": point(step.starts), "positions": point(step.positions), "tiles": point(tiles)}))
            if step.num_tokens < q.shape[0]:
                out[step.num_tokens:].zero_()
        return out.to(q.dtype)

    def _write(self, shape: AttentionShape, step: Step, shared: dict[str, Any], k: torch.Tensor,
               v: torch.Tensor) -> None:
        kernel, point = plans.reshape_and_cache(shape), self._launcher.pointer
        self._launcher.launch(kernel, (len(step.slots),), kernel.pack({
            **shared, "k": point(k), "v": point(v), "slots": point(step.slots), "kv_heads": shape.kv_heads,
            "k_stride": k.stride(0), "k_head_stride": k.stride(1), "v_stride": v.stride(0),
            "v_head_stride": v.stride(1)}))

    def _decode(self, shape: AttentionShape, run: DecodeRun, step: Step, shared: dict[str, Any], q: torch.Tensor,
                out: torch.Tensor) -> None:
        plan = plans.plan_decode(shape, run.count, run.max_context, self._launcher.limits, self.decode_kernel)
        point, lengths = self._launcher.pointer, step.context_len[run.first_seq:]
        values = {**shared, "out": point(out[run.first_row:]), "q": point(q[run.first_row:]),
                  "tables": point(step.tables[run.first_seq:]), "ctx_lens": point(lengths)}
        if plan.kernel.base != "decode_v1":
            if plan.partials * shape.head_dim > self._part_o.numel() or plan.partials * 2 > self._part_ml.numel():
                self._outgrown += [self._part_o, self._part_ml]   # captured graphs may still write there
                self._part_o = torch.empty(2 * plan.partials * shape.head_dim, dtype=torch.float32,
                                           device=self.device)
                self._part_ml = torch.empty(4 * plan.partials, dtype=torch.float32, device=self.device)
            values |= {"part_o": point(self._part_o), "part_ml": point(self._part_ml), "min_split": plan.min_split}
        self._launcher.launch(plan.kernel, plan.grid, plan.kernel.pack(values))
        if plan.reduce is not None:
            self._launcher.launch(plan.reduce, (run.count, shape.heads), plan.reduce.pack({
                "out": values["out"], "part_o": values["part_o"], "part_ml": values["part_ml"],
                "ctx_lens": values["ctx_lens"], "sinks": shared["sinks"], "splits": plan.splits,
                "window": shape.window, "min_split": plan.min_split}))

    def _sink(self, layer: int, sinks: torch.Tensor | None) -> torch.Tensor:
        if sinks is None:
            raise CannotRunError(f"layer {layer} has sinks but none were passed", "missing_sinks")
        if layer not in self._sinks:   # weights: they do not change
            self._sinks[layer] = sinks.detach().to(self.device, torch.float32).contiguous()
        return self._sinks[layer]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks of the pool, all layers, as if one pair after the other: copy-on-write."""
        assert self._pool is not None and self._layout is not None, "bind() comes before use"
        block_bytes = self._layout.block_elements * self._pool.element_size()
        pool, kernel = self._launcher.pointer(self._pool), plans.COPY_BLOCKS
        for wave in plans.copy_waves(pairs):
            on_device = torch.from_numpy(np.ascontiguousarray(wave)).to(self.device)
            self._launcher.launch(kernel, (len(wave), -(-block_bytes // plans.COPY_PIECE)), kernel.pack({
                "dst": pool, "src": pool, "pairs": self._launcher.pointer(on_device), "block_bytes": block_bytes,
                "piece_bytes": plans.COPY_PIECE}))

    def warm_up(self, specs: Sequence[LayerSpec], dtype: torch.dtype) -> float:
        import time
        assert self._layout is not None, "bind() comes before use"
        started, cache = time.perf_counter(), self._cache_type()
        limits = self._launcher.limits
        kernels = {plans.COPY_BLOCKS}
        for spec in specs:
            for name in (TYPE_NAMES[dtype],) if cache.startswith("fp8") else (cache,):
                shape = self._shape(spec, name, cache, self._layout.block_size)
                for context in (1, 1 << 20):   # unsplit and split
                    for seqs in (1, 1 << 16):
                        plan = plans.plan_decode(shape, seqs, context, limits)
                        kernels |= {plan.kernel, plans.reduce_splits(shape)}
                kernels |= {plans.prefill(shape, limits)[0], plans.reshape_and_cache(shape)}
        for kernel in kernels:
            self._launcher.load(kernel)
        return time.perf_counter() - started
