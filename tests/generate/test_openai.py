"""OpenAI batch rows: what bodies may hold, and the form of the answers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import Sequence, SequenceGroup, TokenChoice
from pagedcli.generate.formats import parse_row, render_failure, render_result
from pagedcli.generate.row import Row
from pagedcli.generate.source import RawRow
from pagedcli.generate.tokens import TextCodec
from tests.generate.fake_engine import ByteTokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def envelope(body: Any, url: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
    return {"custom_id": "q-1", "method": "POST", "url": url, "body": body, **more}


def parse(record: dict[str, Any]) -> Row:
    return parse_row(RawRow(3, 4, json.dumps(record).encode()))


def group_of(row: Row, ids: list[int], *, top: bool = False, **fields: Any) -> SequenceGroup:
    group = SequenceGroup(Request(row.index, row.key, (1, 2), SamplingParams(**fields)), 0)
    seq = Sequence(0, group, [1, 2, *ids], 2, 0)
    seq.text, seq.finish_reason, seq.cumulative_logprob = bytes(ids).decode(), "stop", -1.5
    if top:
        seq.logprobs = [TokenChoice(0, ids[0], -math.inf, ((65, -0.5), (66, -math.inf)))]
        seq.logprobs += [TokenChoice(0, token, -1.0, ((token, -1.0),)) for token in ids[1:]]
    group.done.append(seq)
    group.cached_tokens = 1
    return group


def answer(row: Row, group: SequenceGroup) -> dict[str, Any]:
    line = render_result(row, group, TextCodec(ByteTokenizer()), "the-model")
    assert isinstance(line, bytes)
    return json.loads(line)


def test_chat_settings() -> None:
    row = parse(envelope({"model": "m", "messages": MESSAGES, "max_completion_tokens": 5, "n": 2, "stop": ["x"],
                          "temperature": 0.5, "top_p": 0.9, "logprobs": True, "top_logprobs": 3, "seed": 4,
                          "logit_bias": {"5": 2}, "user": "u", "stream": False, "top_k": 7, "presence_penalty": None}))
    assert row.error is None and row.id == "q-1" and row.model == "m" and row.messages == MESSAGES
    assert row.settings == {"max_tokens": 5, "n": 2, "stop": ["x"], "temperature": 0.5, "top_p": 0.9, "logprobs": 3,
                            "seed": 4, "logit_bias": {"5": 2}, "top_k": 7}


def test_completion_prompts() -> None:
    for prompt, text, ids in (("a", "a", None), (["a"], "a", None), ([1, 2], None, [1, 2]), ([[1, 2]], None, [1, 2])):
        row = parse(envelope({"prompt": prompt, "logprobs": 2}, "/v1/completions"))
        assert (row.error, row.text, row.ids, row.settings) == (None, text, ids, {"logprobs": 2})


@pytest.mark.parametrize(("record", "code", "words"), [
    (envelope({"messages": MESSAGES, "stream": True}), "unsupported", "stream is true"),
    (envelope({"messages": MESSAGES, "tools": []}), "unknown_field", "'tools' in the body of /v1/chat/completions"),
    (envelope({"prompt": "a"}), "unknown_field", "'prompt'"),
    (envelope({}), "missing_prompt", "no messages"),
    (envelope({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}), "invalid_value", "= 4"),
    (envelope({"messages": MESSAGES, "logprobs": 3}), "wrong_type", "logprobs is the number 3"),
    (envelope({"messages": MESSAGES, "top_logprobs": 3}), "invalid_value", "top_logprobs = 3"),
    (envelope({"messages": MESSAGES, "model": 3}), "wrong_type", "model"),
    (envelope({"prompt": ["a", "b"]}, "/v1/completions"), "several_prompts", "2 prompts"),
    (envelope({"prompt": "a", "echo": True}, "/v1/completions"), "unsupported", "echo is true"),
    (envelope({"prompt": {}}, "/v1/completions"), "wrong_type", "prompt is an object"),
    (envelope({"messages": MESSAGES}, "/v1/embeddings"), "invalid_value", '"/v1/embeddings"'),
    (envelope({"messages": MESSAGES}, method="GET"), "invalid_value", '"GET"'),
    (envelope([1]), "wrong_type", "body is a list"),
    (envelope({"messages": MESSAGES}, id="x"), "unknown_field", "'id' beside custom_id"),
    ({**envelope({"messages": MESSAGES}), "custom_id": 5}, "wrong_type", "custom_id is the number 5"),
    ({"url": "/v1/completions", "body": {"prompt": "a"}}, "wrong_type", "custom_id is null"),
])
def test_faults_answer_400(record: dict[str, Any], code: str, words: str) -> None:
    row = parse(record)
    assert row.error is not None and row.error[0] == code and words in row.error[1], row.error
    line = render_failure(row)
    assert isinstance(line, bytes)
    out = json.loads(line)
    assert set(out) == {"id", "custom_id", "response", "error"}
    assert out["response"]["status_code"] == 400 and out["response"]["body"]["error"]["message"] == row.error[1]
    assert out["error"] == {"code": code, "message": row.error[1]}
    assert out["custom_id"] == (record.get("custom_id") if isinstance(record.get("custom_id"), str) else None)


def test_chat_answer() -> None:
    row = parse(envelope({"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "metadata": {"k": "v"}}))
    out = answer(row, group_of(row, [72, 105], top=True))
    body = out["response"]["body"]
    assert out["custom_id"] == "q-1" and out["error"] is None and out["response"]["status_code"] == 200
    assert (body["object"], body["model"], body["created"]) == ("chat.completion", "the-model", 0)
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4,
                             "prompt_tokens_details": {"cached_tokens": 1}}
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hi", "refusal": None}
    assert choice["finish_reason"] == "stop" and body["metadata"] == {"k": "v"}
    assert choice["logprobs"]["content"] == [
        {"token": "H", "logprob": -9999.0, "bytes": [72],
         "top_logprobs": [{"token": "A", "logprob": -0.5, "bytes": [65]}]},
        {"token": "i", "logprob": -1.0, "bytes": [105],
         "top_logprobs": [{"token": "i", "logprob": -1.0, "bytes": [105]}]},
    ]


def test_completion_answer() -> None:
    row = parse(envelope({"prompt": "a", "model": "mine", "logprobs": 1}, "/v1/completions"))
    body = answer(row, group_of(row, [72, 105], top=True))["response"]["body"]
    # The model that answered, whatever the row calls it.
    assert (body["object"], body["model"], body["choices"][0]["text"]) == ("text_completion", "the-model", "Hi")
    assert body["choices"][0]["logprobs"] == {"tokens": ["H", "i"], "token_logprobs": [-9999.0, -1.0],
                                              "top_logprobs": [{"A": -0.5}, {"i": -1.0}], "text_offset": [0, 1]}


def test_answers_are_the_same_bytes_every_time() -> None:
    row = parse(envelope({"messages": MESSAGES}))
    assert answer(row, group_of(row, [72])) == answer(row, group_of(row, [72]))
    other = parse_row(RawRow(5, 6, json.dumps(envelope({"messages": MESSAGES})).encode()))
    assert answer(row, group_of(row, [72]))["id"] != answer(other, group_of(other, [72]))["id"]
