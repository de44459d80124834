"""Vector routines compiled for one shape of layer, as a table of addresses that the loops call through.

The loops are the same for every model and compiled once a machine; what depends on head size, group and types is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pagedcli.attention import cpu_pairs as pairs
from pagedcli.attention import cpu_routines as routines
from pagedcli.attention.cpu_vectors import (
    BYTES,
    CHUNKS,
    I64,
    LANES,
    TILE,
    Emit,
    chunk_counts,
    pairs_keys,
    routine,
    row_counts,
)
from pagedcli.attention.kept_code import kept_cfunc

ITEM_ROWS = 96
"""Query rows (tokens x group) of one item: enough to hide reading a tile, few enough to stay in the L2 cache."""
MOST_ROWS = 8

# The table, int64 each (byte offsets). Routines: scores by [rows][log2 chunks], weighted by [rows], the rest one each.
SCORES, WEIGHTED = 0, 8 * 4 * MOST_ROWS
ROUTINES = range(WEIGHTED + 8 * MOST_ROWS, WEIGHTED + 8 * MOST_ROWS + 64, 8)
(WEIGHTS, FINISH, LOAD_Q, STORE_K, STORE_V, MOVE_K, MOVE_8, MOVE_V) = ROUTINES
SIZES = range(ROUTINES.stop, ROUTINES.stop + 80, 8)
(GROUP, ROWS, KEY_DIM, VALUE_DIM, KEY_CELL, KEY_LINES, VALUE_CELL, OUT_CELL, CONVERTS, QUERY_CELL) = SIZES
PARTS = range(SIZES.stop, SIZES.stop + 88, 8)
(Q_AT, SUMS_AT, DENOMINATORS_AT, MAXIMA_AT, WEIGHTS_AT, SCALES_AT, POINTERS_AT, KEYS_AT, VALUES_AT, ROW_AT,
 SCRATCH_BYTES) = PARTS
TABLE_BYTES = PARTS.stop


def vector_budget() -> int:
    """Vectors of 16 floats to keep as sums: 24 of the 32 registers where they are this wide, else a few pairs."""
    return 24 if binding.get_host_cpu_features().get("avx512f", False) else 6


def pair_products() -> bool:
    """Whether this processor multiplies pairs of bfloat16 and adds them to a float in one instruction."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512f", False) and features.get("avx512bf16", False))


@dataclass(frozen=True)
class KernelShape:
    """What routines are made for. `source`: type of q, k, v and the output; `cache`: of the blocks (see BYTES)."""

    source: str
    cache: str
    group: int
    key_dim: int
    value_dim: int
    capped: bool
    budget: int
    dots: bool = False
    """Whether scores and weighted sums are of bfloat16 pair products: queries as they came, weights rounded.
    Values then lie in pairs of slots, [slot / 2, dim, 2], in blocks of even size. Else all products are of float32."""

    @property
    def query_kind(self) -> str:
        """Type of the queries in a thread's scratch."""
        return "bf16" if self.dots else "fp32"

    @property
    def item_tokens(self) -> int:
        """Query tokens of the longest item."""
        return max(1, ITEM_ROWS // self.group)

    @cached_property
    def scratch_bytes(self) -> int:
        """Memory a thread needs."""
        return self.parts()[-1]

    def sizes(self) -> tuple[int, ...]:
        """The fields SIZES of the table."""
        pair = 2 if pairs_keys(self.cache, self.key_dim) else 1
        return (self.group, row_counts(self.group, self.budget)[0], self.key_dim, self.value_dim,
                BYTES[self.cache] * pair, self.key_dim // pair, BYTES[self.cache], BYTES[self.source],
                int(self.source != self.cache), BYTES[self.query_kind])

    def parts(self) -> tuple[int, ...]:
        """The fields PARTS of the table: where each part of a thread's scratch begins; last, the size of it all."""
        rows, most = self.item_tokens * self.group, row_counts(self.group, self.budget)[0]
        tile = TILE * BYTES[self.cache]
        sizes = (rows * self.key_dim * 4, rows * self.value_dim * 4, rows * LANES * 4, rows * 4, most * TILE * 4,
                 most * 8, CHUNKS * 32, self.key_dim * tile, self.value_dim * tile,
                 4 * max(self.key_dim, self.value_dim))
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // 64) * 64)
        return tuple(places)


def _fill(builder: ir.IRBuilder, table: Any, shape: KernelShape) -> None:
    """Emits the shape's routines and the stores of their addresses."""
    emit = Emit(builder)
    cache, source, budget = shape.cache, shape.source, shape.budget
    _, _, key_dim, value_dim, cell, lines, *_ = shape.sizes()

    sum_kind = "fp32" if shape.dots else cache  # sums of pairs of slots come in the order of the dims

    def put(place: int, name: str, arguments: int, body: Any) -> None:
        made = routine(builder.module, name, [I64] * arguments, ir.VoidType(), body)
        emit.store(builder.ptrtoint(made, I64), emit.at(table, place))

    for n in row_counts(shape.group, budget):
        for width in chunk_counts(n, budget):
            put(SCORES + 8 * (4 * n + width.bit_length() - 1), f"scores_{n}_{width}", 6,
                lambda e, a, n=n, width=width: routines.emit_scores(e, a, cache, key_dim, n, width, shape.dots))
        put(WEIGHTED + 8 * n, f"weighted_{n}", 11, lambda e, a, n=n: (
            pairs.emit_weighted(e, a, value_dim, n, budget) if shape.dots
            else routines.emit_weighted(e, a, cache, value_dim, n, budget)))
    put(WEIGHTS, "weights", 7, lambda e, a: routines.emit_weights(e, a, shape.capped, shape.dots))
    put(FINISH, "finish", 3, lambda e, a: routines.emit_finish(e, a, sum_kind, value_dim, source))
    put(LOAD_Q, "load_q", 3, lambda e, a: routines.emit_convert(e, a, source, shape.query_kind, key_dim))
    put(STORE_K, "store_k", 3, lambda e, a: routines.emit_convert(e, a, source, cache, key_dim))
    put(STORE_V, "store_v", 3, lambda e, a: routines.emit_convert(e, a, source, cache, value_dim))
    put(MOVE_K, "move_k", 4, lambda e, a: routines.emit_move(e, a, cell, lines))
    put(MOVE_V, "move_v", 4, lambda e, a: routines.emit_move(e, a, BYTES[cache], value_dim))
    put(MOVE_8, "move_8", 4, lambda e, a: routines.emit_move(e, a, 8 * cell, lines))


def _fill_table(typing: Any, table: Any, source: Any, cache: Any, group: Any, key_dim: Any, value_dim: Any,
               capped: Any, budget: Any, dots: Any) -> Any:
    """Stores the addresses of one shape's routines into a table; all but the table are constants."""
    fields = (source, cache, group, key_dim, value_dim, capped, budget, dots)
    shape = KernelShape(*(field.literal_value for field in fields))

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _fill(builder, args[0], shape)
        return context.get_dummy_value()
    return types.void(types.int64, *fields), code


# Any: it is called from compiled code only, where its Python signature means nothing.
fill_table: Any = intrinsic(prefer_literal=True)(_fill_table)


@dataclass(frozen=True, slots=True)
class Routines:
    """A shape's table; `keep` owns the code its addresses point into."""

    table: NDArray[np.int64]
    keep: object


def build_routines(shape: KernelShape) -> Routines:
    """Compiles a shape's routines, or loads them from the disk cache where they were built before."""
    source, cache, group = shape.source, shape.cache, shape.group
    key_dim, value_dim, capped, budget = shape.key_dim, shape.value_dim, int(shape.capped), shape.budget
    dots = int(shape.dots)
    binding.initialize_native_asmparser()  # for the instruction in Emit.pair_fma

    @kept_cfunc(types.void(types.int64), error_model="numpy")
    def fill(table: int) -> None:
        fill_table(table, source, cache, group, key_dim, value_dim, capped, budget, dots)

    table = np.zeros(TABLE_BYTES // 8, np.int64)
    fill.ctypes(table.ctypes.data)
    table[SIZES.start // 8:SIZES.stop // 8] = shape.sizes()
    table[PARTS.start // 8:PARTS.stop // 8] = shape.parts()
    return Routines(table, fill)
