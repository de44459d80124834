"""Times attention over a paged cache against the same attention over contiguous memory, on the device at hand.

Each row runs both on the same keys and values in turns, compares their outputs, and holds the rate at which the paged
one reads keys and values against a plain copy measured in the same run. The rows to run are in micro_cases.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right

from pagedcli.attention.interface import AttentionBackend, BatchLayout, KVLayout, LayerSpec, build_layout
from pagedcli.bench.micro_cases import Case
from pagedcli.core.errors import CannotRunError
from pagedcli.core.plan import Slice, StepPlan
from pagedcli.execution.hf_model import fill_repeating

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference from contiguous attention, relative to the largest output; both round to the type at the end."""
RANDOM_NUMBERS = 262_139
"""Random numbers drawn, then repeated: drawing all would take longer than measuring. A prime, so that no two rows of a
cache come out equal."""
FILL_TOKENS = 1 << 14
"""Tokens that are written into the cache at once when it is filled."""

Call = Callable[[], object]
BackendMaker = Callable[[str | None], AttentionBackend]
"""Decode kernel to force, or None -> a new backend."""


@dataclass(frozen=True)
class Bench:
    """Where and how to measure. `cycle_bytes`: keys and values that one pass goes over at least (by taking several
    layers in turn), so that they come from memory; `row_seconds`: time given to a row's timing, s."""

    device: torch.device
    dtype: torch.dtype
    backend: BackendMaker
    cycle_bytes: int
    memory_bytes: int
    row_seconds: float

    def now(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def seconds(self, call: Call) -> float:
        """Seconds of one call, by the device's own clock where it has one."""
        if self.device.type != "cuda":
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Row:
    """One measured case. Times are of one layer's call, the fastest round, which is the one least disturbed by others;
    the medians stand beside them. Bytes are the keys and values that must be read."""

    kernel: str
    model: str
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context_tokens: int
    block_tokens: int
    paged_microseconds: float
    contiguous_microseconds: float
    one_block_microseconds: float | None
    paged_median_microseconds: float
    contiguous_median_microseconds: float
    paged_over_contiguous: float
    kv_gigabytes_per_second: float
    share_of_copy_bandwidth: float
    gigaflops: float
    relative_error: float
    good: bool
    rounds: int

    def record(self) -> dict[str, Any]:
        """Plain JSON values, rounded to what the clock can tell."""
        return {key: float(f"{value:.5g}") if isinstance(value, float) else value
                for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Skipped:
    """A case that was not measured, and why."""

    case: str
    why: str


@dataclass(frozen=True)
class Table:
    """What came of a list of cases, in its order."""

    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]


def copy_bandwidth(bench: Bench) -> float:
    """Bytes a second, read plus written, of a copy far larger than the caches; the fastest of seven."""
    size = 4 << 30 if bench.device.type == "cuda" else 192 << 20
    source = torch.ones(size // 8, dtype=torch.int64, device=bench.device)
    target = torch.ones_like(source)
    taken = [bench.seconds(lambda: target.copy_(source)) for _ in range(8)][1:]
    return 2 * source.nbytes / min(taken)


class _Setup:
    """One case's tensors: a filled pool, the same keys and values side by side, and queries."""

    def __init__(self, case: Case, bench: Bench, layers: int) -> None:
        heads, self.case, self.layers = case.heads, case, layers
        self.spec = LayerSpec(heads.heads, heads.kv_heads, heads.dim, heads.dim, heads.dim**-0.5)
        per = -(-case.context // case.block_size)
        order = np.random.default_rng(0).permutation(case.batch * per).reshape(case.batch, per)
        self.tables: list[list[int]] = order.tolist()
        drawn = torch.randn(RANDOM_NUMBERS, generator=torch.Generator().manual_seed(0))
        drawn = drawn.to(bench.device, bench.dtype)

        def noise(place: int, *shape: int) -> torch.Tensor:
            made = torch.empty(shape, dtype=bench.dtype, device=bench.device)
            fill_repeating(made.view(-1), drawn, place * RANDOM_NUMBERS // 3)
            return made

        shape = (case.batch, heads.kv_heads, case.context, heads.dim)
        self.keys, self.values = noise(0, *shape), noise(1, *shape)
        self.queries = noise(2, case.batch, case.fresh, heads.heads, heads.dim)
        layout = KVLayout((self.spec,) * layers, case.block_size)
        self.backend = bench.backend(case.decode_kernel)
        reason = self.backend.supports(self.spec, bench.dtype, case.block_size)
        if reason is not None:
            raise CannotRunError(reason, "unsupported_shape")
        pool = torch.empty(case.batch * per, layout.block_elements, dtype=bench.dtype, device=bench.device)
        self.backend.bind(layout, pool)
        self.backend.warm_up((self.spec,), bench.dtype)
        self._fill()
        self._q = self.queries.flatten(0, 1)
        self._k, self._v = (x[:, :, case.context - case.fresh:].transpose(1, 2).flatten(0, 1).contiguous()
                            for x in (self.keys, self.values))

    def prepare(self) -> None:
        """Give the backend the batch that `paged` then runs, on the threads that torch has now."""
        case = self.case
        plan = StepPlan([Slice(seq, range(case.fresh), case.context - case.fresh, self.tables[seq])
                         for seq in range(case.batch)])
        self.backend.prepare(build_layout(plan, case.block_size))

    def paged(self) -> torch.Tensor:
        """[batch, fresh, heads, dim] of the last layer."""
        out = self._q
        for layer in range(self.layers):
            out = self.backend.attend(layer, self._q, self._k, self._v, self.spec)
        return out.unflatten(0, (self.case.batch, self.case.fresh))

    def contiguous(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """The same by torch over contiguous keys and values, one pair a layer."""
        case, out = self.case, self.queries
        queries = self.queries.transpose(1, 2)
        whole = case.fresh == case.context > 1
        mask: Any = None if whole or case.fresh == 1 else causal_lower_right(case.fresh, case.context)
        for keys, values in copies:
            out = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=whole, enable_gqa=self.spec.group > 1)
        return out.transpose(1, 2)

    def _fill(self) -> None:
        """Write keys and values of all sequences into every layer. Rows that belong to no sequence are written and do
        not attend, so a batch of one short sequence and many such rows is little but writing."""
        case, at_once = self.case, max(1, FILL_TOKENS // self.case.context)
        tables = np.array(self.tables, np.int64)
        positions = np.arange(case.context)
        for first in range(0, case.batch, at_once):
            some = tables[first:first + at_once]
            slots = (some[:, positions // case.block_size] * case.block_size + positions % case.block_size).reshape(-1)
            batch = BatchLayout(len(slots), slots, np.zeros(len(slots), np.int64), np.array([0, 1], np.int32),
                                np.ones(1, np.int32), some[:1, :1].astype(np.int32))
            keys, values = (x[first:first + at_once].transpose(1, 2).flatten(0, 1).contiguous()
                            for x in (self.keys, self.values))
            queries = self.queries[0, :1].expand(len(slots), -1, -1)
            self.backend.prepare(batch)
            for layer in range(self.layers):
                self.backend.attend(layer, queries, keys, values, self.spec)


def measure(case: Case, bench: Bench, copy: float, against_one_block: bool = False) -> Row:
    """One row. `copy`: bytes a second of a copy. CannotRunError: no kernel takes the case, or memory does not hold it.

    `against_one_block` times the same kernel with each sequence in one block too, where a block can be that large:
    what the block table itself costs.
    """
    heads = case.heads
    layer_bytes = 2 * case.batch * case.context * heads.kv_heads * heads.dim * bench.dtype.itemsize
    layers = max(1, min(8, -(-bench.cycle_bytes // layer_bytes)))
    need = layer_bytes * (2 * layers + 3 + against_one_block * layers)
    if need > bench.memory_bytes:
        raise CannotRunError(f"needs about {need / 2**30:.1f} GiB, of {bench.memory_bytes / 2**30:.1f} GiB to spare")
    with _one_thread():
        setup = _Setup(case, bench, layers)
        copies = [(setup.keys.clone(), setup.values.clone()) for _ in range(layers)]
    setup.prepare()
    want, got = setup.contiguous(copies[:1]).float(), setup.paged().float()
    error = float((got - want).abs().max() / want.abs().max())
    calls: list[Call] = [setup.paged, lambda: setup.contiguous(copies)]
    if against_one_block:
        try:
            with _one_thread():
                whole = _Setup(replace(case, block_size=case.context), bench, layers)
            whole.prepare()
            whole.paged()
            calls.append(whole.paged)
        except CannotRunError:
            against_one_block = False  # this backend has no block that large: the row says so by an empty place
    taken = _in_turns(calls, bench)
    seconds = [min(times) / layers for times in taken]
    medians = [statistics.median(times) / layers * 1e6 for times in taken]
    pairs = case.batch * sum(range(case.context - case.fresh + 1, case.context + 1))
    return Row(
        kernel=case.kernel, model=heads.name, heads=heads.heads, kv_heads=heads.kv_heads, head_dim=heads.dim,
        batch=case.batch, context_tokens=case.context, block_tokens=case.block_size,
        paged_microseconds=seconds[0] * 1e6, contiguous_microseconds=seconds[1] * 1e6,
        one_block_microseconds=seconds[2] * 1e6 if against_one_block else None,
        paged_median_microseconds=medians[0], contiguous_median_microseconds=medians[1],
        paged_over_contiguous=seconds[0] / seconds[1], kv_gigabytes_per_second=layer_bytes / seconds[0] / 1e9,
        share_of_copy_bandwidth=layer_bytes / seconds[0] / copy,
        gigaflops=4 * pairs * heads.heads * heads.dim / seconds[0] / 1e9,
        relative_error=error, good=error <= TOLERANCE[bench.dtype], rounds=len(taken[0]))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch on one CPU thread, for work with many small parts: on a busy machine threads wait for one another in each.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_turns(calls: Sequence[Call], bench: Bench) -> list[list[float]]:
    """Seconds of each call (that has run before), taken in turns so that a change of the machine's speed meets all;
    3 to 50 rounds."""
    taken: list[list[float]] = [[] for _ in calls]
    end = bench.now() + bench.row_seconds
    while len(taken[0]) < 3 or (len(taken[0]) < 50 and time.perf_counter() < end):
        for call, times in zip(calls, taken, strict=True):
            times.append(bench.seconds(call))
    return taken


def run_cases(cases: Iterable[Case], bench: Bench, copy: float, deadline: float,
              against_one_block: bool = False) -> Table:
    """Every case in turn, measured or skipped with a reason. deadline: of time.perf_counter, s."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for case in cases:
        if time.perf_counter() > deadline:
            skipped.append(Skipped(case.label, "the time for this run was over (--full has no limit)"))
            continue
        try:
            rows.append(measure(case, bench, copy, against_one_block))
        except CannotRunError as fault:
            skipped.append(Skipped(case.label, fault.message))
        except torch.OutOfMemoryError:
            skipped.append(Skipped(case.label, "the device ran out of memory"))
    return Table(tuple(rows), tuple(skipped))
