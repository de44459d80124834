"""The arithmetic of `make profile`: where seconds are booked, what steps cost, and what is left over."""

from __future__ import annotations

import pytest

from pagedcli.attention.interface import LayerSpec
from pagedcli.core.plan import Slice, StepPlan
from tests.acceptance.ledger import BETWEEN, BUCKETS, Account, Ledger, bucket, least_seconds, markdown
from tests.acceptance.profile import BATCH, Sizes, edge_of, full_only, overhead, where_time_goes


class Clock:
    """Tells what it was set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_buckets_hold_their_edge_and_begin_after_the_last() -> None:
    assert [bucket(edge) for edge in BUCKETS] == list(BUCKETS)
    assert [bucket(edge + 1) for edge in BUCKETS[:-1]] == list(BUCKETS[1:])
    for rows in (0, BUCKETS[-1] + 1):
        with pytest.raises(ValueError, match=f"a step of {rows} rows"):
            bucket(rows)


def test_time_goes_to_the_innermost_kind_and_adds_up() -> None:
    clock = Clock()
    ledger = Ledger(clock)

    def inner() -> None:
        clock.now += 3.0

    def outer() -> None:
        clock.now += 1.0
        ledger.timed("inner", inner)()
        clock.now += 0.5
        ledger.timed("inner", inner)()

    clock.now = 7.0  # what passes while nothing is open is nobody's
    ledger.timed("outer", outer)()
    clock.now += 0.25
    ledger.close(8, {"rows": 5})
    assert dict(ledger.seconds) == {("outer", 8): 1.5, ("inner", 8): 6.0}
    account = Account(ledger.seconds, clock.now, ledger.counts)
    assert account.unaccounted == pytest.approx(7.25)
    assert account.of(["outer", "inner"]) + account.unaccounted == account.wall == 14.75
    assert (account.count("rows", 8), account.count("rows", 4), account.kinds) == (5, 0, ["inner", "outer"])


def test_a_fault_leaves_nothing_open() -> None:
    clock = Clock()
    ledger = Ledger(clock)

    def fails() -> None:
        clock.now += 1.0
        raise KeyError("x")

    with pytest.raises(KeyError):
        ledger.timed("a", fails)()
    clock.now += 5.0
    ledger.timed("b", lambda: None)()
    assert ledger.step == {"a": 1.0, "b": 0.0}


def test_rebooking_keeps_the_sum() -> None:
    ledger = Ledger(Clock())
    ledger.step.update({"program": 8.0, "execute": 5.0})
    ledger.split("program", {"qkv": 0.1, "attention": 0.3})
    ledger.move("execute", {"layout": 2.0, "memory": 0.5})
    assert dict(ledger.step) == pytest.approx({"qkv": 2.0, "attention": 6.0, "execute": 2.5, "layout": 2.0,
                                               "memory": 0.5})
    ledger.step["program"] += 1.0
    ledger.split("program", {"qkv": 0.0})
    assert ledger.step["program"] == 1.0, "parts that tell nothing leave the time where it is"


def test_a_table_adds_up() -> None:
    seconds = {("qkv", 64): 2.0, ("qkv", 8): 1.0, ("sampling", 64): 0.5, ("admission", BETWEEN): 0.25}
    page = where_time_goes(Account(seconds, 4.0, {("steps", 64): 3.0, ("rows", 64): 190.0}))
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
             for line in page.splitlines()}
    assert cells["seconds, by rows of a step"] == ["between", "to 8", "to 64", "all", "%"]
    assert cells["qkv"] == ["0.00", "1.00", "2.00", "3.00", "75.0"]
    assert cells["not accounted for"] == ["", "", "", "0.25", "6.2"]
    assert cells["wall time"] == ["0.25", "1.00", "2.50", "4.00", "100.0"]
    assert cells["(rows)"] == ["0", "0", "190", "190", ""]
    columns = [name for name in cells if name in ("qkv", "sampling", "admission", "not accounted for")]
    assert sum(float(cells[name][-2]) for name in columns) == 4.0


def test_overhead_is_what_neither_torch_nor_native_code_has() -> None:
    seconds = {("qkv", BATCH): 5.0, ("attention", BATCH): 4.5, ("this profile itself", BATCH): 0.1,
               ("sampling", BATCH): 0.3, ("scheduling", BATCH): 0.1, ("sampling", 8): 7.0}
    share, line = overhead(Account(seconds, 20.0, {("steps", BATCH): 10.0}))
    assert share == pytest.approx(0.04)
    assert line == "4.0 % of 1000.0 ms (10 steps; ms a step: sampling 30.00, scheduling 10.00)"


def test_only_steps_in_which_all_decode_are_of_the_full_batch() -> None:
    full = StepPlan([Slice(seq, [5], 40, [0]) for seq in range(BATCH)])
    mixed = StepPlan([*full.slices[:40], Slice(99, list(range(BATCH - 40)), 0, [0])])
    assert mixed.num_tokens == full.num_tokens == BATCH
    assert (full_only(full), full_only(mixed), edge_of(mixed)) == (BATCH, BETWEEN, BATCH)
    assert edge_of(StepPlan(copies=[(0, 1)])) == BETWEEN


def test_what_a_step_costs_at_least() -> None:
    sizes = Sizes(LayerSpec(3, 1, 8, 8, 1.0), layers=2, hidden=24, inner=40, vocabulary=100, cell=2)
    plan = StepPlan([Slice(0, [1, 2, 3], 4, [0, 1], 0), Slice(1, [9], 10, [2])])
    counts = sizes.counts(plan)
    assert (counts["steps"], counts["rows"], counts["logit rows"]) == (1, 4, 1)
    assert counts["qkv flop"] == 4 * 2 * 2 * 24 * (3 + 1 + 1) * 8
    assert counts["gate_up flop"] == 4 * 2 * 2 * 24 * 80 and counts["down flop"] == 4 * 2 * 2 * 24 * 40
    assert counts["out flop"] == 4 * 2 * 2 * 24 * 24 and counts["out bytes"] == 2 * 24 * 24 * 2
    assert counts["head flop"] == 2 * 24 * 100 and counts["head bytes"] == 24 * 100 * 2
    pairs = (5 + 6 + 7) + 11
    assert counts["attention flop"] == 2 * pairs * 3 * (8 + 8) * 2
    assert counts["attention bytes"] == (7 + 11) * 1 * (8 + 8) * 2 * 2
    assert "head bytes" in counts and sizes.counts(StepPlan(plan.slices[:1]))["head bytes"] == 0


def test_the_longer_of_two_times_binds() -> None:
    assert least_seconds(100.0, 50.0, 30.0, 10.0) == 3.0
    assert least_seconds(100.0, 10.0, 30.0, 10.0) == 10.0


def test_tables_line_up() -> None:
    assert markdown(["a", "bb"], [["long", "1"]]).splitlines() == ["| a    | bb |", "|------|---:|", "| long |  1 |"]
