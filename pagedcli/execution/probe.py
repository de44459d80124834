"""The trial that every model passes when it loads: paged attention against the model's own, on the same weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedcli.attention.host_arrays import host_floats, zeros
from pagedcli.attention.interface import AttentionBackend, KVLayout, LayerSpec
from pagedcli.core.devices import Device
from pagedcli.core.dtypes import dtype_name
from pagedcli.core.errors import CannotRunError
from pagedcli.core.plan import Slice, StepPlan
from pagedcli.execution.decoder import Decoder
from pagedcli.execution.flat_batch import flatten, forward
from pagedcli.execution.host_memory import holding

LENGTHS = (11, 6)
LOGIT_ROWS = len(LENGTHS) * max(LENGTHS)
CUTS = ((10, 3), (1, 3))
"""Rows of each sequence in each step: two chunks of prompt first, then a single token beside a second chunk."""

TOLERANCE = {"fp32": 1e-4, "fp16": 0.01, "bf16": 0.06}
"""Largest relative error of logits. Eager attention rounds its weights to the model's dtype and ours does not, hence
the room; a model that is not understood lands near 1."""
FP8_TOLERANCE = 0.25


class Judged(Protocol):
    """A model that can say what its own attention computes."""

    @property
    def specs(self) -> tuple[LayerSpec, ...]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def device(self) -> Device: ...

    def eager(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits [B, T, vocab_size] of int64 ids [B, T]."""


Model = TypeVar("Model", bound=Judged)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The decoder that passed, the logits it was judged by (see Judged.eager), the relative error of its own, seconds
    spent on compiling and on the trial itself."""

    decoder: Decoder
    judged: NDArray[np.float32]
    error: float
    compile_seconds: float
    seconds: float


def disagreement(ours: NDArray[np.float32], theirs: NDArray[np.float32], *, exact: bool) -> float:
    """Error of each row of logits, relative to the scale of all: the largest when `exact`, else the middle one.

    Rounding can send a token to another expert, which changes that row for good; attention that is misunderstood
    changes most rows. Infinite when anything is not finite.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        scale = max(float(np.sqrt(np.mean([_power(row) for row in theirs]))), float(np.finfo(np.float32).tiny))
        errors = np.sqrt([_power(mine - other) for mine, other in zip(ours, theirs, strict=True)]) / scale
    if not np.isfinite(errors).all():
        return math.inf
    return float(errors.max() if exact else np.median(errors))


def _power(row: NDArray[np.float32]) -> np.float32:
    """Mean square. Row by row, since all rows of a large vocabulary at once would be the peak of a start's memory."""
    power: np.float32 = np.square(row).mean()
    return power


def check_layers(decoder: Judged, backend: AttentionBackend, cache_dtype: Any, block_size: int,
                 name: str) -> None:
    """CannotRunError names the first layer that the backend cannot run, and why."""
    for place, spec in enumerate(decoder.specs):
        reason = backend.supports(spec, cache_dtype, block_size)
        if reason is not None:
            raise CannotRunError(f"{name}: the {backend.name} attention backend cannot run layer {place}: {reason}",
                                 "layer_unsupported")


def probe(decoder: Model, backend: AttentionBackend, cache_dtype: Any, block_size: int,
          name: str, refine: Callable[[Model], Decoder]) -> ProbeResult:
    """Run two sequences in mixed chunks over scattered blocks and compare all logits with eager attention.

    What runs, and is returned, is `refine(decoder)`; that may take the decoder apart, whose eager run is over by then.

    CannotRunError names the layer that the backend cannot run, or the size of the disagreement. Binds the backend to
    a small pool of its own, so that it can run before the real one is sized; bind it to that afterwards.
    """
    check_layers(decoder, backend, cache_dtype, block_size, name)
    layout = KVLayout(decoder.specs, block_size)
    widths = [-(-length // block_size) for length in LENGTHS]
    shape = sum(widths), layout.block_elements
    with holding(f"--block-size = {block_size:,}: the {sum(widths)} blocks of the trial at load", decoder.device,
                 "Lower it", math.prod(shape) * cache_dtype.itemsize):
        pool = zeros(shape, cache_dtype, decoder.device)
    ids = np.random.Generator(np.random.PCG64(0)).integers(decoder.vocab_size, size=(len(LENGTHS), max(LENGTHS)))
    tokens = [row[:length] for row, length in zip(ids.tolist(), LENGTHS, strict=True)]
    # Block ids run downwards and alternate between the sequences, so that order in memory means nothing.
    free = iter(range(sum(widths) - 1, -1, -1))
    tables: list[list[int]] = [[] for _ in LENGTHS]
    for depth in range(max(widths)):
        for table, width in zip(tables, widths, strict=True):
            if depth < width:
                table.append(next(free))
    began = time.perf_counter()
    backend.bind(layout, pool)
    backend.warm_up(decoder.specs, decoder.dtype)
    compiled = time.perf_counter()
    # A causal model's rows do not see what follows them, so the shorter sequence's padding does no harm here.
    expected = decoder.eager(ids)
    runner = refine(decoder)
    runner.attach(backend)
    done = [0] * len(LENGTHS)
    rows: list[NDArray[np.float32]] = []
    judged: list[NDArray[np.float32]] = []
    for cut in CUTS:
        plan = StepPlan([Slice(seq, tokens[seq][done[seq]:done[seq] + count], done[seq], tables[seq], count)
                         for seq, count in enumerate(cut)])
        logits = forward(runner, backend, flatten(plan, block_size, runner.row_tile))
        rows.append(np.array(host_floats(logits)))
        judged += [expected[seq, done[seq]:done[seq] + count] for seq, count in enumerate(cut)]
        done = [have + count for have, count in zip(done, cut, strict=True)]
    kind = dtype_name(decoder.dtype)
    error = disagreement(np.concatenate(rows), np.concatenate(judged), exact=kind == "fp32")
    limit = max(TOLERANCE[kind], TOLERANCE.get(dtype_name(cache_dtype), FP8_TOLERANCE))
    if error > limit:
        raise CannotRunError(f"{name}: logits over the paged cache differ from the model's own by {error:.2g} "
                             f"(relative, limit {limit:g}), so its attention does something that paging does not",
                             "model_unsupported")
    return ProbeResult(runner, expected, error, compiled - began, time.perf_counter() - compiled)
