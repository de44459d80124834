"""The CUDA backend with the emulator in the GPU's place: tensors on the CPU, the real kernels and plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedcli.attention.cuda_launch import Kernel
from pagedcli.attention.cuda_shapes import H200, DeviceLimits
from pagedcli.attention.interface import AttentionBackend, KVLayout, LayerSpec, build_layout
from pagedcli.core.plan import Slice, StepPlan
from tests.emulator.cases import Kernels


class EmulatedLauncher:
    """Runs launches on the emulator and notes kernel and grid of each."""

    def __init__(self, kernels: Kernels, limits: DeviceLimits = H200) -> None:
        self.kernels, self.limits = kernels, limits
        self.device = torch.device("cpu")
        self.launched: list[tuple[str, tuple[int, ...]]] = []

    def launch(self, kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        self.launched.append((kernel.base, grid))
        self.kernels.launch(kernel, grid, args)

    def load(self, kernel: Kernel) -> None:
        self.kernels.build([kernel])

    def pointer(self, tensor: torch.Tensor) -> NDArray[np.uint8]:
        """The bytes from the tensor's first element to the end of its storage."""
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return memory[tensor.storage_offset() * tensor.element_size():].numpy()


@dataclass
class Batch:
    """Sequences that grow: `steps[i][s]` tokens of sequence s are computed in step i; no step is empty."""

    steps: Sequence[Sequence[int]]
    block_size: int
    seed: int = 0
    pad_to: int = 1

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        totals = [sum(step[s] for step in self.steps) for s in range(len(self.steps[0]))]
        counts = [-(-total // self.block_size) for total in totals]
        self.num_blocks = sum(counts) + 2
        order = rng.permutation(self.num_blocks)[: sum(counts)]
        ends = np.cumsum([0, *counts])
        self.tables = [order[ends[s]:ends[s + 1]].tolist() for s in range(len(totals))]

    def run(self, backend: AttentionBackend, spec: LayerSpec, dtype: torch.dtype, cache: torch.dtype,
            sinks: torch.Tensor | None = None, layers: int = 2) -> list[torch.Tensor]:
        """Outputs [tokens, heads, dim] of each step; keys and values depend on sequence and position alone."""
        layout = KVLayout((spec,) * layers, self.block_size)
        pool = torch.full((self.num_blocks, layout.block_elements), float("nan")).to(cache)
        backend.bind(layout, pool)
        at, outs = [0] * len(self.tables), []
        for step in self.steps:
            items = [Slice(s, [0] * count, at[s], self.tables[s]) for s, count in enumerate(step) if count]
            batch = build_layout(StepPlan(slices=items), self.block_size, self.pad_to)
            backend.prepare(batch)
            rows = [self._row(s, at[s] + i, spec, dtype) for s, count in enumerate(step) for i in range(count)]
            rows += [torch.full_like(rows[0], float("nan"))] * (len(batch.slots) - len(rows))
            whole = torch.stack(rows)
            # Views as the model hands them over: heads before tokens, one projection behind the three.
            q, k, v = whole.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
            out = backend.attend(layers - 1, q, k, v, spec, sinks)
            assert not out[batch.num_tokens:].any(), "padding rows must be zeros"
            outs.append(out[: batch.num_tokens])
            at = [done + count for done, count in zip(at, step, strict=True)]
        return outs

    def _row(self, seq: int, position: int, spec: LayerSpec, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + seq * 10_007 + position)
        return torch.randn(spec.heads + 2 * spec.kv_heads, spec.key_dim, generator=generator).to(dtype)
