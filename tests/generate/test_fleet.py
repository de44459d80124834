"""Several engines on one journal, without Ray: replicas in this process whose answers come in any order, some never."""

from __future__ import annotations

import json
import random
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedcli.core.config import CacheConfig, ModelConfig, RunConfig, SchedulerConfig
from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.engine.interface import Counters
from pagedcli.generate.fleet import CALLS, FleetJob, ReplicaLost, add_counters
from pagedcli.generate.job import Interrupted, Job
from pagedcli.generate.journal import Journal
from pagedcli.generate.reader import RowReader, driver_reader
from pagedcli.generate.replica import Ready, Replica, Task, pin_shared_prefix, prefix_tokens
from pagedcli.generate.sampling import SamplingDefaults
from pagedcli.generate.source import InputRows
from pagedcli.generate.tokens import TextCodec
from tests.generate.fake_engine import lines

SEATS = 4
CONFIG = RunConfig(model=ModelConfig(model="null"), cache=CacheConfig(prefix_cache=False, num_blocks=256),
                   scheduler=SchedulerConfig(max_num_seqs=SEATS))
SHARING = replace(CONFIG, cache=CacheConfig(num_blocks=2048))
BEGINNINGS = ("a", "You are a helpful assistant. ", "You are a helpful assistant of few words. ",
              "Translate what follows into French, and keep its tone: ", "x" * 300)
PINNED = "You are a helpful assistant"


class ScriptedCrew:
    """Replicas that compute when their call is looked at. `lose` says which calls (counted from 0) kill theirs."""

    def __init__(self, seed: int = 0, lose: Sequence[int] = (), config: RunConfig = CONFIG,
                 pinned: str | None = None) -> None:
        self._rng = random.Random(seed)
        self._lose = set(lose)
        self._config = config
        self._pinned = pinned
        self._replicas: dict[int, Replica | None] = {}
        self._calls: dict[int, tuple[int, str, tuple[Any, ...]]] = {}
        self.most_held = 0
        self.given: list[int] = []

    def hire(self) -> Hashable:
        self._replicas[len(self._replicas)] = Replica(self._config, {"max_tokens": 9}, self._pinned)
        return len(self._replicas) - 1

    def start(self, worker: Any) -> Hashable:
        return self._note(worker, "start", ())

    def work(self, worker: Any, tasks: Sequence[Task], more: bool) -> Hashable:
        self.given += [task.raw.index for task in tasks]
        return self._note(worker, "work", (list(tasks), more))

    def _note(self, worker: int, what: str, arguments: tuple[Any, ...]) -> int:
        number = len(self._calls)
        self._calls[number] = (worker, what, arguments)
        return number

    def done(self, calls: Sequence[Any], seconds: float) -> Sequence[Any]:
        del seconds
        firsts: dict[int, int] = {}
        for call in sorted(calls):  # a replica answers in the order it was asked
            firsts.setdefault(self._calls[call][0], call)
        return [self._rng.choice(sorted(firsts.values()))]

    def answer(self, call: Any) -> Any:
        worker, what, arguments = self._calls[call]
        if call in self._lose:
            self._replicas[worker] = None
        replica = self._replicas[worker]
        if replica is None:
            raise ReplicaLost("it was told to die")
        return getattr(replica, what)(*arguments)

    def close(self) -> None:
        return


def rows(count: int) -> bytes:
    return lines(*({"prompt": "x" * (1 + index * 7 % 30), "max_tokens": 1 + index % 11} if index % 13 else
                   {"prompt": ""} for index in range(count)))


def open_rows(folder: Path, count: int) -> InputRows:
    path = folder / "in.jsonl"
    path.write_bytes(rows(count))
    return InputRows.open(str(path), None)  # type: ignore[arg-type]


def single(folder: Path, count: int) -> bytes:
    """What one engine makes of the same rows."""
    from pagedcli.engine.build import build_engine

    source, engine = open_rows(folder, count), build_engine(CONFIG)
    journal = Journal(folder / "single", {}, count)
    Job(source, source.scan(), engine, TextCodec(engine.tokenizer), journal, SamplingDefaults({"max_tokens": 9})).run()
    return b"".join(journal.ordered())


def run_fleet(folder: Path, count: int, crew: ScriptedCrew, replicas: int) -> tuple[FleetJob, Journal]:
    source = open_rows(folder, count)
    journal = Journal(folder / "fleet", {}, count)
    job = FleetJob(source, source.scan(), crew, replicas, journal)
    job.run()
    return job, journal


@pytest.mark.parametrize("seed", range(3))
def test_three_replicas_make_the_bytes_of_one(tmp_path: Path, seed: int) -> None:
    job, journal = run_fleet(tmp_path, 150, ScriptedCrew(seed), 3)
    assert b"".join(journal.ordered()) == single(tmp_path, 150)
    assert sum(worker.rows for worker in job.members) == 150 and min(worker.rows for worker in job.members) > 0
    assert job.counters().output_tokens == sum(
        len(output["token_ids"]) for line in b"".join(journal.ordered()).splitlines()
        for output in json.loads(line)["outputs"])


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_lost_replicas_are_done_once_by_others(tmp_path: Path, seed: int) -> None:
    crew = ScriptedCrew(seed, lose=(9, 17, 30))
    job, journal = run_fleet(tmp_path, 150, crew, 3)
    assert job.lost == 3 and len(crew.given) > 150
    assert b"".join(journal.ordered()) == single(tmp_path, 150)
    written = [json.loads(line)["index"] for line in (tmp_path / "fleet").read_text().split("\n")
               if line.startswith('{"index"')]
    assert sorted(written) == [*range(150)], "each row is in the journal once"


def test_rows_in_flight_are_bounded(tmp_path: Path) -> None:
    class Counting(ScriptedCrew):
        def done(self, calls: Sequence[Any], seconds: float) -> Sequence[Any]:
            self.most_held = max(self.most_held, sum(len(worker.held) for worker in job.members))
            return super().done(calls, seconds)

    crew = Counting()
    source, journal = open_rows(tmp_path, 400), Journal(tmp_path / "fleet", {}, 400)
    job = FleetJob(source, source.scan(), crew, 2, journal)
    job.run()
    assert SEATS < crew.most_held <= 2 * (CALLS + 1) * SEATS


def test_replicas_that_always_die_end_the_job(tmp_path: Path) -> None:
    with pytest.raises(CannotRunError, match=r"replicas lost.*it was told to die.*kept in .*fleet"):
        run_fleet(tmp_path, 50, ScriptedCrew(lose=range(1000)), 2)


def test_a_replica_that_cannot_start_ends_the_job_with_its_reason(tmp_path: Path) -> None:
    config = RunConfig(model=ModelConfig(model="null"), policy="hf")
    with pytest.raises(UsageError.__base__, match="has no engine of its own") as caught:
        run_fleet(tmp_path, 5, ScriptedCrew(config=config), 2)
    assert caught.value.exit_status == 2


def test_a_stopped_job_goes_on_where_it_was(tmp_path: Path) -> None:
    source, journal = open_rows(tmp_path, 150), Journal(tmp_path / "fleet", {}, 150)
    crew = ScriptedCrew()
    job = FleetJob(source, source.scan(), crew, 2, journal)
    flush = journal.flush

    def stop_once_rows_are_done() -> None:
        flush()
        if journal.finished:
            job.stop()

    journal.flush = stop_once_rows_are_done  # type: ignore[method-assign]  # called once a round
    with pytest.raises(Interrupted, match="of 150 rows done"):
        job.run()
    done = journal.finished
    journal.close()
    assert 0 < done < 150
    again = ScriptedCrew()
    _, journal = run_fleet(tmp_path, 150, again, 2)
    assert journal.resumed == done and len(again.given) == 150 - done
    assert b"".join(journal.ordered()) == single(tmp_path, 150)


def test_counters_add_up() -> None:
    total = add_counters([Counters(steps=2, seconds={"execute": 1.5}), Counters(steps=3, seconds={"execute": 1.0})])
    assert total.steps == 5 and total.seconds == {"execute": 2.5}


# -- prefix caches -----------------------------------------------------------------------------------------------------


def sharing_rows(count: int) -> bytes:
    """Rows of which many begin alike: some bad, some refused by the engine, some scored, some with several samples."""
    dice = random.Random(8)
    made: list[dict[str, Any]] = []
    for index in range(count):
        row: dict[str, Any] = {"prompt": f"{dice.choice(BEGINNINGS)}{dice.choice('abc') * 16}{dice.random()}",
                               "max_tokens": 1 + dice.randrange(12)}
        if index % 17 == 3:
            row = {"prompt": ""}
        elif index % 17 == 5:
            row["max_tokens"] = 1 << 20
        elif index % 17 == 7:
            row["prompt_logprobs"] = 0
        elif index % 17 == 9:
            row["n"] = 2
        made.append(row)
    return lines(*made)


class Shared:
    """One input, served by one engine or by several."""

    def __init__(self, folder: Path, count: int, pinned: str | None = None, config: RunConfig = SHARING) -> None:
        self.folder, self.count, self.pinned, self.config = folder, count, pinned, config
        (folder / "in.jsonl").write_bytes(sharing_rows(count))

    def source(self) -> InputRows:
        return InputRows.open(str(self.folder / "in.jsonl"), None)  # type: ignore[arg-type]

    def one(self, name: str = "one", stop_after: int | None = None) -> tuple[Counters, Journal]:
        from pagedcli.engine.build import build_engine

        source, engine = self.source(), build_engine(self.config)
        codec = TextCodec(engine.tokenizer)
        if self.pinned is not None:
            pin_shared_prefix(engine, codec, self.pinned)
        journal = Journal(self.folder / name, {}, self.count)
        job = Job(source, source.scan(), engine, codec, journal, SamplingDefaults({"max_tokens": 9}), None, True,
                  prefix_tokens(codec, self.pinned))
        run(job, journal, stop_after)
        return engine.counters, journal

    def many(self, crew: ScriptedCrew, replicas: int, name: str = "many",
             stop_after: int | None = None) -> tuple[FleetJob, Journal]:
        source = self.source()
        scan, journal = source.scan(), Journal(self.folder / name, {}, self.count)

        def reading(ready: Ready) -> RowReader:
            assert ready.limits is not None
            return driver_reader(self.config, {"max_tokens": 9}, self.pinned, source, scan, journal, ready.limits)

        job = FleetJob(source, scan, crew, replicas, journal, reading=reading)
        run(job, journal, stop_after)
        return job, journal


def run(job: Job | FleetJob, journal: Journal, stop_after: int | None) -> None:
    """To the end, or until so many rows are in the journal."""
    flush = journal.flush

    def flush_and_stop() -> None:
        flush()
        if stop_after is not None and journal.finished >= stop_after:
            job.stop()

    journal.flush = flush_and_stop  # type: ignore[method-assign]  # called once a round
    if stop_after is None:
        job.run()
        return
    with pytest.raises(Interrupted):
        job.run()
    journal.close()


def cached(output: bytes) -> list[int]:
    return [json.loads(line)["usage"]["cached_tokens"] for line in output.splitlines()]


@pytest.mark.parametrize("pinned", [None, PINNED])
@pytest.mark.parametrize(("seed", "replicas", "lose"), [(0, 2, ()), (1, 2, (9, 20)), (2, 5, (15,))])
def test_cached_tokens_are_those_of_one_engine(tmp_path: Path, seed: int, replicas: int, lose: Sequence[int],
                                               pinned: str | None) -> None:
    rows = Shared(tmp_path, 200, pinned)
    alone, journal = rows.one()
    expected = b"".join(journal.ordered())
    job, journal = rows.many(ScriptedCrew(seed, lose, SHARING, pinned), replicas)
    assert b"".join(journal.ordered()) == expected
    assert sum(figure > 0 for figure in cached(expected)) > 60 and job.lost == len(lose)
    if pinned is None:
        assert alone.cached_tokens >= sum(cached(expected))
    together = job.counters()
    if not lose:
        assert together.prompt_tokens == alone.prompt_tokens
        assert together.warmed_tokens > alone.warmed_tokens, "each replica computes for itself, and says so"
        computed = [one.prompt_tokens - one.cached_tokens + one.warmed_tokens for one in (alone, together)]
        assert computed[0] < computed[1] < together.prompt_tokens


def test_cached_tokens_after_stops_and_with_other_numbers_of_replicas(tmp_path: Path) -> None:
    rows = Shared(tmp_path, 200)
    _, journal = rows.one()
    expected = b"".join(journal.ordered())
    rows.one("mixed", stop_after=40)
    rows.many(ScriptedCrew(4, (), SHARING), 3, "mixed", stop_after=80)
    rows.one("mixed", stop_after=120)
    _, journal = rows.many(ScriptedCrew(5, (11,), SHARING), 2, "mixed")
    assert journal.resumed >= 120 and b"".join(journal.ordered()) == expected


@pytest.mark.parametrize("cache", [CacheConfig(num_blocks=40), CacheConfig(idle_share=0.0)], ids=["small", "spared"])
def test_nothing_is_called_cached_that_was_computed_for_the_row(cache: CacheConfig, tmp_path: Path) -> None:
    """A pool so small, or so sparing, that shared blocks are given up: each row says at most what its engine really
    found."""
    config = replace(CONFIG, cache=cache)
    rows = Shared(tmp_path, 150, config=config)
    for job_counters, journal in [rows.one(), (lambda job, kept: (job.counters(), kept))(
            *rows.many(ScriptedCrew(6, (), config), 2))]:
        assert 0 < sum(cached(b"".join(journal.ordered()))) <= job_counters.cached_tokens


def test_a_row_done_again_after_later_ones_says_what_it_would_have_said(tmp_path: Path) -> None:
    """As when its replica is lost: another has computed rows that come after it by then."""
    replica = Replica(SHARING, {"max_tokens": 2})
    replica.start()
    source = Shared(tmp_path, 0)
    (tmp_path / "in.jsonl").write_bytes(lines({"prompt": "y" * 100}, {"prompt": "y" * 101}))
    first, second = source.source()
    later = replica.work([Task(second, shared=96)], more=False)
    earlier = replica.work([Task(first, shared=0)], more=False)
    assert [cached(report.finished[0][1]) for report in (later, earlier)] == [[96], [0]]
    assert earlier.counters.cached_tokens == 96 + 96, "the engine's own count is of what it found"
