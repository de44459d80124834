"""The paper's chat rule on hand-made conversations."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from pagedcli.workloads import WorkloadOptions, load_workload
from pagedcli.workloads.chat import Conversation, Turn, pair_turns, schedule


def talk(name: str, *turns: tuple[int, int]) -> Conversation:
    return Conversation(name, tuple(Turn(q, a) for q, a in turns))


def run(conversations: list[Conversation], probability: float, count: int | None = None, seed: int = 0) -> list:
    options = WorkloadOptions(new_conversation=probability)
    return schedule(iter(conversations), count, options, np.random.default_rng(seed))


def test_history_grows_and_is_cut_to_the_last_1024_tokens() -> None:
    requests = run([talk("a", (100, 50), (30, 900), (10, 2000))], 0.5)
    assert [(r.prompt_len, r.offset, r.output_len) for r in requests] == [
        (100, 0, 50), (180, 0, 900), (1024, 66, 1016)]  # 100+50+30+900+10 = 1090 = 1024 + 66


def test_probability_one_opens_every_conversation_first() -> None:
    requests = run([talk("a", (1, 1), (1, 1)), talk("b", (1, 1), (1, 1))], 1.0)
    assert [r.conversation for r in requests[:2]] == ["a", "b"]
    assert Counter(r.conversation for r in requests) == {"a": 2, "b": 2}


def test_share_of_new_conversations() -> None:
    many = [talk(str(n), *[(1, 1)] * 20) for n in range(6_000)]
    for probability in (0.5, 0.1):
        requests = run(many, probability, count=10_000)
        begun = len({r.conversation for r in requests})
        assert begun / 10_000 == pytest.approx(probability, abs=4 * (probability * (1 - probability) / 10_000) ** 0.5)


def test_every_turn_is_served_once_and_in_order() -> None:
    many = [talk(str(n), *[(k + 1, 1) for k in range(n % 5 + 1)]) for n in range(200)]
    requests = run(many, 0.5)
    assert len(requests) == sum(len(c.turns) for c in many)
    for conversation in many:
        own = [r.prompt_len for r in requests if r.conversation == conversation.name]
        assert own == sorted(own) and len(own) == len(conversation.turns)


def test_turns_pair_up_with_tool_calls_in_between() -> None:
    turns = [("human", "q1"), ("function_call", "f"), ("observation", "o"), ("gpt", "a1"), ("gpt", "a2"),
             ("human", "q2"), ("gpt", "a3"), ("human", "no answer")]
    assert pair_turns(turns) == [("human: q1\nfunction_call: f\nobservation: o\ngpt: ", "a1\n"),
                                 ("human: q2\ngpt: ", "a3\n")]
    assert pair_turns([("gpt", "alone")]) == []


def test_text_of_a_turn_holds_its_history() -> None:
    requests = load_workload("chat", num_requests=300).requests
    by_name: dict[str, list] = {}
    for request in requests:
        by_name.setdefault(request.conversation or "", []).append(request)
    grown = [turns for turns in by_name.values() if len(turns) > 1]
    assert len(grown) > 20
    for turns in grown:
        for before, after in pairwise(turns):
            assert after.prompt.startswith(before.prompt)
            assert len(after.prompt.split()) == after.prompt_len + after.offset
    assert max(r.prompt_len for r in requests) <= 1024 and max(r.output_len for r in requests) <= 1016
