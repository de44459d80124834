"""A row's result is the same, bit for bit, whatever is computed beside it and however the cache is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagedcli.attention.cpu import CpuBackend
from pagedcli.attention.interface import LayerSpec

from .cases import Sequences, in_chunks, in_one, one_by_one, run

SPECS = {
    "grouped": LayerSpec(9, 3, 64, 64, 0.125),
    "multi-head": LayerSpec(2, 2, 80, 80, 0.11),
    "one head for 7": LayerSpec(7, 1, 32, 48, 0.2),
    "window, cap, sinks": LayerSpec(8, 2, 32, 32, 0.2, window=45, softcap=5.0, sinks=True),
}
LENGTHS = [290, 1, 17, 133]


@pytest.fixture(autouse=True)
def every_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All threads take part however little there is to do, and torch's number is put back."""
    monkeypatch.setattr("pagedcli.attention.cpu.SMALL_WRITE", -1)
    monkeypatch.setattr("pagedcli.attention.cpu.SMALL_WORK", -1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bits(outputs: list[torch.Tensor]) -> list[bytes]:
    return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in outputs]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_nothing_around_a_row_changes_it(spec: LayerSpec, kind: torch.dtype) -> None:
    seqs = Sequences(spec, LENGTHS, kind, seed=11)
    torch.set_num_threads(1)
    base = bits(run(CpuBackend(), seqs, 16, kind, in_one(LENGTHS)))
    assert bits(run(CpuBackend(), seqs, 16, kind, one_by_one(LENGTHS))) == base, "decode rows differ from prompt rows"
    for seed in range(3):
        assert bits(run(CpuBackend(), seqs, 16, kind, in_chunks(LENGTHS, seed), seed)) == base, "chunks"
    for block in (1, 5, 8, 32, 64, 128, 512):
        assert bits(run(CpuBackend(), seqs, block, kind, in_chunks(LENGTHS, 5), block)) == base, f"blocks of {block}"
    assert bits(run(CpuBackend(), seqs, 16, kind, in_chunks(LENGTHS, 7), only=[3, 1, 0, 2])) == base, "order"
    for one in range(len(LENGTHS)):
        alone = run(CpuBackend(), seqs, 16, kind, in_one(LENGTHS), only=[one])
        assert bits([alone[one]]) == [base[one]], "alone"
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert bits(run(CpuBackend(), seqs, 16, kind, in_one(LENGTHS))) == base, f"{threads} threads"


@pytest.mark.parametrize("budget", [6, 24])
def test_register_budget_changes_no_bit(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines with narrower registers use other kernel shapes for the same sums."""
    spec = SPECS["grouped"]
    seqs = Sequences(spec, LENGTHS, torch.bfloat16, seed=4)
    base = bits(run(CpuBackend(), seqs, 16, torch.bfloat16, in_one(LENGTHS)))
    monkeypatch.setattr("pagedcli.attention.cpu.vector_budget", lambda: budget)
    assert bits(run(CpuBackend(), seqs, 16, torch.bfloat16, in_chunks(LENGTHS, 2))) == base


def test_later_tokens_of_any_value_leave_earlier_rows_alone() -> None:
    """Infinite or NaN keys and values at a later position do not reach rows that cannot see them."""
    spec = SPECS["grouped"]
    seqs = Sequences(spec, [100], torch.float32, seed=5)
    base = run(CpuBackend(), seqs, 16, torch.float32, [[100]])[0]
    seqs.k[0][60], seqs.v[0][60] = float("nan"), float("inf")
    spoilt = run(CpuBackend(), seqs, 16, torch.float32, [[100]])[0]
    assert bits([spoilt[:60]]) == bits([base[:60]])
    assert bool(spoilt[60:].isnan().all())
