"""Several engines on one journal, without Ray: replicas in this process whose answers come in any order, some never."""

from __future__ import annotations

import json
import random
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedcli.core.config import CacheConfig, ModelConfig, RunConfig, SchedulerConfig
from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.engine.interface import Counters
from pagedcli.generate.fleet import CALLS, FleetJob, ReplicaLost, add_counters
from pagedcli.generate.job import Interrupted, Job
from pagedcli.generate.journal import Journal
from pagedcli.generate.replica import Replica, Task
from pagedcli.generate.sampling import SamplingDefaults
from pagedcli.generate.source import InputRows
from pagedcli.generate.tokens import TextCodec
from tests.generate.fake_engine import lines

SEATS = 4
CONFIG = RunConfig(model=ModelConfig(model="null"), cache=CacheConfig(prefix_cache=False, num_blocks=256),
                   scheduler=SchedulerConfig(max_num_seqs=SEATS))


class ScriptedCrew:
    """Replicas that compute when their call is looked at. `lose` says which calls (counted from 0) kill theirs."""

    def __init__(self, seed: int = 0, lose: Sequence[int] = (), config: RunConfig = CONFIG) -> None:
        self._rng = random.Random(seed)
        self._lose = set(lose)
        self._config = config
        self._replicas: dict[int, Replica | None] = {}
        self._calls: dict[int, tuple[int, str, tuple[Any, ...]]] = {}
        self.most_held = 0
        self.given: list[int] = []

    def hire(self) -> Hashable:
        self._replicas[len(self._replicas)] = Replica(self._config, {"max_tokens": 9})
        return len(self._replicas) - 1

    def start(self, worker: Any) -> Hashable:
        return self._note(worker, "start", ())

    def work(self, worker: Any, tasks: Sequence[Task], more: bool) -> Hashable:
        self.given += [raw.index for raw, _ in tasks]
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
    with pytest.raises(CannotRunError, match=r"replicas were lost.*it was told to die.*kept in .*fleet"):
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
