"""Faults that others met in kernels of this kind, each as a case or a refusal. Numbers are this project's own list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pagedcli.attention import cuda_launch as plans
from pagedcli.attention.cuda_launch import Kernel
from pagedcli.attention.cuda_shapes import H200, AttentionShape
from tests.emulator.cases import Case, decode_case, prefill_case
from tests.emulator.numbers import TOLERANCE, decode, worst_error
from tests.emulator.problems import Launch, Problem, copy_error, make_shape, write_error

_PAST_INT32 = 2**31
CHOICES: tuple[tuple[str, int | None, int], ...] = (("v1", None, 1), ("split", 2, 4), ("mma", 2, 4))
"""(kernel, splits, group) of the three decode kernels."""


def _far(shape: AttentionShape) -> int:
    """Blocks that a pool of more than 2^31 elements has; untouched pages cost no memory."""
    return _PAST_INT32 // (2 * 2 * shape.kv_heads * shape.block_size * shape.head_dim) + 64


def _far_write(launch: Launch) -> float:
    """One token into the last block of a pool of more than 2^31 elements: wrong elements in that slot."""
    s = make_shape(kv_heads=8)
    stride = 4 * s.kv_heads * s.block_size * s.head_dim
    blocks = _far(s)
    pool = np.empty(blocks * stride, np.float16)
    pool[(blocks - 1) * stride:] = np.nan
    k = np.random.default_rng(0).standard_normal((1, s.kv_heads, s.head_dim)).astype(np.float16)
    kernel = plans.reshape_and_cache(s)
    row = s.kv_heads * s.head_dim
    launch(kernel, (1,), kernel.pack({
        "k": k, "v": -k, "k_cache": pool, "v_cache": pool[stride // 4:],
        "slots": np.array([(blocks - 1) * s.block_size + 5], np.int64), "k_scale": None, "v_scale": None,
        "kv_heads": s.kv_heads, "k_stride": row, "k_head_stride": s.head_dim, "v_stride": row,
        "v_head_stride": s.head_dim, "block_stride": stride}))
    tiles = pool[(blocks - 1) * stride:].reshape(4, s.kv_heads, s.block_size, s.head_dim)
    return float(np.count_nonzero(tiles[0, :, 5] != k[0]) + np.count_nonzero(tiles[1, :, 5] != -k[0]))


def _far_copy(launch: Launch) -> float:
    block_bytes, blocks = 1 << 20, 4100
    pool = np.empty(blocks * block_bytes, np.uint8)
    pool[-block_bytes:] = 7
    kernel = plans.COPY_BLOCKS
    launch(kernel, (1, 16), kernel.pack({"dst": pool, "src": pool, "pairs": np.array([[blocks - 1, 3]], np.int64),
                                         "block_bytes": block_bytes, "piece_bytes": block_bytes // 16}))
    return float(np.count_nonzero(pool[3 * block_bytes:4 * block_bytes] != 7))


def _far_decode(choice: str, splits: int | None, group: int) -> Case:
    s = make_shape(group=group)
    return Case(f"1 far {choice}", "fp16", TOLERANCE["fp16"],
                lambda launch: Problem(s, (40, 70), spread=_far(s)).decode_error(launch, choice, splits))


def _far_prefill(dtype: str) -> Case:
    s = make_shape(dtype)
    return Case(f"1 far prefill {dtype}", dtype, TOLERANCE[dtype],
                lambda launch: Problem(s, (40,), (9,), spread=_far(s)).prefill_error(launch))


def far_offsets() -> list[Case]:
    """1: cache offsets past 2^31 elements."""
    return [*(_far_decode(*choice) for choice in CHOICES), _far_prefill("fp16"), _far_prefill("fp32"),
            Case("1 far write", "bytes", 0.0, _far_write), Case("1 far copy", "bytes", 0.0, _far_copy)]


SAMPLED = (0, 40_000, 65_599)
"""Sequences with any tokens, out of more than grid.y and grid.z could count."""


def _sampled(launch: Launch) -> Launch:
    def run(kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], only: Sequence[int] = ()) -> None:
        launch(kernel, grid, args, only or SAMPLED)
    return run


def _many(choice: str, splits: int | None, group: int) -> Case:
    """6: more sequences than grid.y and grid.z may count; all but a few are empty."""
    s = make_shape(head_dim=32, group=group, kv_heads=1)
    contexts = [0] * 65_600
    for row, length in zip(SAMPLED, (3, 20, 17), strict=True):
        contexts[row] = length

    def run(launch: Launch) -> float:
        problem = Problem(s, contexts)
        out = problem.run_decode(_sampled(launch), problem.decode_plan(choice, splits))
        return worst_error(decode(out[list(SAMPLED)], s.dtype), problem.want())

    return Case(f"6 65,600 sequences {choice}", "fp16", TOLERANCE["fp16"], run)


def _many_prompts(dtype: str) -> Case:
    s = make_shape(dtype, head_dim=32, kv_heads=1, block_size=8)

    def run(launch: Launch) -> float:
        problem = Problem(s, [1] * 65_600, [1] * 65_600, layers=1)
        out = decode(problem.run_prefill(_sampled(launch)), s.dtype)
        picked = list(SAMPLED)
        return worst_error(out[picked], np.stack([problem.values[i][0][[0] * s.heads] for i in picked]))

    return Case(f"6 65,600 sequences prefill {dtype}", dtype, TOLERANCE[dtype], run)


def many_sequences() -> list[Case]:
    return [_many("v1", None, 1), _many("split", 1, 2), _many("mma", 2, 3), _many_prompts("fp32"),
            _many_prompts("fp16")]


def _extreme(choice: str, splits: int | None, group: int, dtype: str) -> Case:
    """12: all logits near -6e4, where float32 itself resolves 4e-3; a finite stand-in for -inf would win."""
    s = make_shape(dtype, group=group)
    return Case(f"12 logits near -6e4 {choice} {dtype}", dtype, 0.05,
                lambda launch: Problem(s, (33, 70), level=-6e4).decode_error(launch, choice, splits))


def _numbered(number: str, case: Case) -> Case:
    return replace(case, name=f"{number} {case.name}")


def _decode_faults(choice: str, splits: int | None, group: int) -> list[Case]:
    def case(number: str, note: str, **options: Any) -> Case:
        return _numbered(number, decode_case(choice, splits, group=group, note=note, **options))

    return [case("2", "NaN in unused slots", contexts=(33,)),
            *(case("4", "head size", head_dim=dim, dtype="bf16") for dim in (32, 80, 96, 120)),
            case("5", "context a multiple of the block", contexts=(8, 24), block_size=8),
            case("8", "empty beside 17", contexts=(0, 17, 0)),
            case("11", "window BS + 3 over 3 BS + 5", contexts=(53,), window=19),
            _extreme(choice, splits, group, "fp16")]


def cases() -> list[Case]:
    """The faults that are cases on the fast build, by number."""
    found = far_offsets()
    for choice, splits, group in CHOICES:
        found += _decode_faults(choice, splits, group)
    found += [_extreme("v1", None, 1, "fp32"), _extreme("split", 2, 2, "fp32")]
    found += [_numbered("7", decode_case(choice, 2, group=group, contexts=(5, 100), note="output poisoned"))
              for group in (1, 2, 3, 5, 7, 8, 12, 16) for choice in ("split", "mma")]
    found += [_numbered("2", prefill_case(((33, 5),), note="NaN in unused slots")),
              _numbered("5", prefill_case(((64, 64),), note="context a multiple of the block")),
              _numbered("8", prefill_case(((0, 0), (17, 17)), note="empty beside 17")),
              _numbered("11", prefill_case(((53, 20),), window=19, note="window BS + 3 over 3 BS + 5"))]
    long = make_shape(kv_heads=1)
    found += [
        Case("9 slots fewer than rows, -1 among them", "bytes", 0.0, lambda launch: write_error(
            launch, make_shape(), [5, -1, 40, -1], 4, rows=9)),
        Case("10 context 16,384, one head", "fp16", TOLERANCE["fp16"],
             lambda launch: Problem(long, (16_384,)).decode_error(launch, "v1")),
        Case("13 overlapping copies in waves", "bytes", 0.0, lambda launch: copy_error(
            launch, [(0, 1), (1, 2)], 4, 8192)),
        *many_sequences()]
    return found


def refusals() -> dict[str, str]:
    """3 and 14: what must be refused before a kernel sees it -> the message. Empty text: it was accepted."""
    def message(act: Callable[[], object]) -> str:
        try:
            act()
        except Exception as fault:
            return f"{type(fault).__name__}: {fault}"
        return ""

    shape = make_shape()
    kernel = plans.reduce_splits(shape)
    good = {"out": np.zeros(1), "part_o": np.zeros(1), "part_ml": np.zeros(1), "ctx_lens": np.zeros(1), "sinks": None,
            "splits": 1, "window": 0, "min_split": 64}
    odd = make_shape("bf16", head_dim=46)
    return {
        "3 head size 46": message(lambda: plans.plan_decode(odd, 1, 10, H200)),
        "14 float for an integer": message(lambda: kernel.pack({**good, "splits": 2.0})),
        "14 number for a pointer": message(lambda: kernel.pack({**good, "out": np.float32(1)})),
        "14 array for a number": message(lambda: kernel.pack({**good, "window": np.zeros(1)})),
        "14 missing": message(lambda: kernel.pack({k: v for k, v in good.items() if k != "window"})),
        "14 too large": message(lambda: kernel.pack({**good, "splits": 2**40})),
    }
