"""Faults that users of other tools met, tried on this engine with a tiny real model or the cache model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedcli.core.config import CacheConfig, ModelConfig, RunConfig, SchedulerConfig
from pagedcli.core.errors import CannotRunError, RequestError
from pagedcli.core.request import NO_ROW, Request, SamplingParams
from pagedcli.core.sequence import SequenceGroup
from pagedcli.engine.build import build_engine, load
from pagedcli.engine.engine import Engine
from tests.engine.harness import drain, make_engine, request
from tests.execution.tiny_models import save_model


class Tiny:
    """One tiny llama in fp32, served by engines with settings of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = save_model("llama", folder)
        self.loaded: dict[int, Any] = {}

    def engine(self, blocks: int = 200, block_size: int = 16, prefix: bool = True, swap: int = 1 << 20,
               **scheduler: Any) -> Engine:
        config = RunConfig(
            model=ModelConfig(model=str(self.folder), dtype="fp32", device="cpu", threads=1),
            cache=CacheConfig(num_blocks=blocks, block_size=block_size, prefix_cache=prefix, swap_space=swap),
            scheduler=SchedulerConfig(**scheduler))
        executor, tokenizer = load(config)
        return build_engine(config, executor=executor, tokenizer=tokenizer)

    def run(self, engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[SequenceGroup]:
        groups = [engine.add(Request(index, str(index), tuple(prompt), params)) for index, prompt in enumerate(prompts)]
        drain(engine)
        return groups


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    yield Tiny(tmp_path_factory.mktemp("tiny") / "llama")


def ids(count: int, start: int = 3) -> list[int]:
    return [3 + (start * 31 + 7 * place) % 90 for place in range(count)]


def entries(group: SequenceGroup) -> list[Any]:
    return [(seq.output_ids, [choice.logprob for choice in seq.logprobs or []]) for seq in group.done]


def test_report_10_a_request_larger_than_the_pool_is_refused_and_the_next_is_served() -> None:
    engine = make_engine(blocks=4, block_size=16)
    with pytest.raises(RequestError, match=r"can need 6 KV blocks .* the pool has 4"):
        engine.add(request(0, ids(80), 5))
    small = engine.add(request(1, ids(10), 5))
    assert drain(engine) == [small] and small.done[0].output_len == 5


def test_report_11_samples_without_swap_space_finish_by_recompute() -> None:
    engine = make_engine(blocks=6, block_size=16, swap=0, preemption="auto", prefix=False)
    # 20 + 16 tokens: a shared full block and two own blocks for each of two samples would fit; four do not.
    with pytest.raises(RequestError, match="9 KV blocks"):
        engine.add(request(0, ids(20), 17, n=4))
    groups = [engine.add(request(index, ids(20, index), 17, n=2)) for index in (1, 2)]
    finished = drain(engine)
    assert sorted(group.order for group in finished) == sorted(group.order for group in groups)
    assert [[seq.output_len for seq in group.done] for group in groups] == [[17, 17], [17, 17]]
    assert engine.counters.preempt_recompute > 0 and engine.counters.preempt_swap == 0
    assert engine.counters.swap_fallbacks > 0, "auto wanted to swap the group and must say that it could not"


def test_report_12_a_prompt_preempted_between_chunks_keeps_its_logprobs(tiny: Tiny) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    prompts = [ids(4, 1), ids(40, 2)]
    roomy = tiny.run(tiny.engine(prefix=False, block_size=4), prompts, params)
    tight = tiny.engine(blocks=12, prefix=False, block_size=4, max_num_batched_tokens=16, preemption="recompute")
    first = tight.add(Request(0, "0", tuple(prompts[0]), params))
    while first.live[0].output_len < 3:
        tight.step()
    second = tight.add(Request(1, "1", tuple(prompts[1]), params))
    tight.step()
    assert 0 < second.live[0].computed < 40, "one chunk and no more"
    while not second.preemptions:
        assert second.live[0].computed < 40, "the prompt was computed before memory ran out"
        tight.step()
    drain(tight)
    for before, after in zip(roomy, (first, second), strict=True):
        assert entries(after) == entries(before)
        assert list(after.prompt_logprobs) == list(before.prompt_logprobs)


def test_report_13_too_little_memory_names_both_numbers(tiny: Tiny) -> None:
    config = RunConfig(model=ModelConfig(model=str(tiny.folder), dtype="fp32", device="cpu"),
                       cache=CacheConfig(memory=2000, block_size=16))
    with pytest.raises(CannotRunError, match=r"2,?000"):
        load(config)


def test_report_15_and_16_neighbours_and_cache_hits_change_nothing(tiny: Tiny) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True)
    prompt, others = ids(33), [ids(count, count) for count in (1, 5, 17, 32, 33, 40, 7)]
    alone = entries(tiny.run(tiny.engine(prefix=False), [prompt], params)[0])
    assert entries(tiny.run(tiny.engine(), [*others[:3], prompt, *others[3:]], params)[3]) == alone
    twice = tiny.engine()
    first, second = tiny.run(twice, [prompt], params)[0], tiny.run(twice, [prompt], params)[0]
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert entries(first) == entries(second) == alone


def test_report_17_samples_keep_their_numbers_and_equal_a_run_of_their_own(tiny: Tiny) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": 9, "seed": 5, "logprobs": 0, "ignore_eos": True}
    group = tiny.run(tiny.engine(), [ids(21)], SamplingParams(n=4, **fields))[0]
    assert [seq.sample for seq in group.done] == [0, 1, 2, 3]
    assert len({tuple(seq.output_ids) for seq in group.done}) == 4
    single = tiny.run(tiny.engine(), [ids(21)], SamplingParams(n=1, **fields))[0]
    assert entries(single)[0] == entries(group)[0]
    best = tiny.run(tiny.engine(), [ids(21)], SamplingParams(n=2, best_of=4, **fields))[0]
    totals = sorted((seq.cumulative_logprob for seq in group.done), reverse=True)
    assert [seq.cumulative_logprob for seq in best.done] == totals[:2]


def test_a_prompt_of_many_samples_is_stored_once() -> None:
    engine = make_engine(blocks=100, block_size=4, prefix=False)
    engine.add(request(0, ids(16), 6, n=4))
    engine.step()
    engine.step()
    usage = engine.usage()
    assert (usage.physical, usage.logical) == (4 + 4, 4 * 5)
    drain(engine)


def test_a_row_finds_all_that_a_scored_prompt_before_it_computes() -> None:
    engine = make_engine(blocks=400, block_size=4)  # a step has 256 rows of logits, so the first prompt takes three
    first = engine.add(request(0, ids(600), 1, prompt_logprobs=0))
    second = engine.add(request(1, [*ids(600), 5], 1))
    drain(engine)
    assert (first.cached_tokens, second.cached_tokens) == (0, 600)


def test_what_is_computed_ahead_is_counted_apart() -> None:
    engine = make_engine(blocks=100, block_size=4)
    engine.add(request(NO_ROW, ids(8), 0))
    engine.add(request(0, [*ids(8), 5, 6], 1))
    drain(engine)
    counters = engine.counters
    assert (counters.warmed_tokens, counters.prompt_tokens, counters.cached_tokens) == (8, 10, 8)


def test_a_request_that_a_pinned_prefix_leaves_no_room_for_is_refused() -> None:
    engine = make_engine(blocks=10, block_size=4)
    assert engine.pin_prefix(ids(16)) == 16
    with pytest.raises(RequestError, match=r"can need 8 KV blocks .* the pool has 6"):
        engine.add(request(0, ids(20, 9), 13))
    engine.add(request(1, [*ids(16), 5], 24))  # shares the pinned blocks, so its own six are enough
    assert len(drain(engine)) == 1


def test_beams_carry_logprobs(tiny: Tiny) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, use_beam_search=True, beam_width=3, n=2, logprobs=2)
    for seq in tiny.run(tiny.engine(), [ids(9)], params)[0].done:
        assert seq.logprobs is not None and [choice.token for choice in seq.logprobs] == seq.output_ids
        assert sum(choice.logprob for choice in seq.logprobs) == pytest.approx(seq.cumulative_logprob, abs=1e-4)


def test_a_pinned_prefix_stays_and_is_found(tiny: Tiny) -> None:
    engine = tiny.engine(blocks=12, prefix=False, block_size=4)
    assert engine.pin_prefix(ids(10)) == 8
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    prompts = [[*ids(10), *ids(6, start)] for start in (1, 2, 3)]
    groups = tiny.run(engine, prompts, params)
    assert [group.cached_tokens for group in groups] == [8, 8, 8]
    without = tiny.run(tiny.engine(prefix=False), prompts, params)
    assert [entries(group) for group in groups] == [entries(group) for group in without]
