"""Runs step plans on a real model: moves blocks, then one flattened forward over the paged cache.

The models are torch's, or a native program made of their weights, which runs without torch: nothing here imports it.
"""

from __future__ import annotations

import time
from dataclasses import replace

from pagedcli.attention.host_arrays import inference_mode
from pagedcli.attention.interface import AttentionBackend
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.wording import counted
from pagedcli.execution.decoder import Decoder
from pagedcli.execution.device_path import Steps
from pagedcli.execution.flat_batch import flatten
from pagedcli.execution.host_memory import holding
from pagedcli.execution.interface import Executor, ExecutorInfo, ExecutorLimits
from pagedcli.execution.kv_store import KVStore

STEP_WAY_OUT = "Lower --max-num-batched-tokens or --max-num-seqs, or leave more memory free by --kv-cache-memory"


class TorchExecutor(Executor):
    """Owns a decoder, its KV pool and an attention backend; `loading.load_executor` makes one from a config.

    `StepResult.logits` is [rows, vocabulary] in the model's dtype or float32 where it was computed, an array or a
    tensor (see decoder.Decoder), or None when no row wants any.
    `parts` (seconds): memory (swaps and copies), layout, and on a CPU attention and linear (the rest of the forward);
    on a GPU these two are one, forward, and count launches only: its work is not done when a call returns, and the wait
    for it shows where tokens are chosen.
    """

    def __init__(self, decoder: Decoder, backend: AttentionBackend, store: KVStore, steps: Steps,
                 limits: ExecutorLimits, info: ExecutorInfo) -> None:
        self.decoder = decoder
        self.backend = backend
        self.store = store
        self.steps = steps
        self.limits = limits
        self._info = info

    @property
    def info(self) -> ExecutorInfo:
        """Grows notes on how steps run."""
        return replace(self._info, notes=(*self._info.notes, *self.steps.notes)) if self.steps.notes else self._info

    @info.setter
    def info(self, value: ExecutorInfo) -> None:
        self._info = replace(value, notes=tuple(note for note in value.notes if note not in self.steps.notes))

    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        with inference_mode():
            self.store.swap_out(plan.swap_out)
            self.store.swap_in(plan.swap_in)
            self.store.copy(plan.copies)
            moved = time.perf_counter()
            if not plan.slices:
                return StepResult(None, moved - began, {"memory": moved - began})
            batch = flatten(plan, self.limits.block_size, self.decoder.row_tile)
            laid_out = time.perf_counter()
            what = (f"a step of {counted(len(batch.ids), 'token')} and {counted(len(batch.rows), 'row')} of logits "
                    f"({self.limits.vocab_size:,} each)")
            with holding(what, self.decoder.device, STEP_WAY_OUT):
                logits = self.steps.run(batch)
        ended = time.perf_counter()
        parts = {"memory": moved - began, "layout": laid_out - moved, **self.steps.parts(ended - laid_out)}
        return StepResult(logits, ended - began, parts)

    def close(self) -> None:
        self.store.close()
