"""What a row may say, fault by fault: each has a code and a message with the value and the limit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedcli.core.errors import RequestError, UsageError
from pagedcli.core.request import SamplingParams
from pagedcli.generate.formats import parse_row, render_failure
from pagedcli.generate.row import MAX_MESSAGE, Form, Row
from pagedcli.generate.row_ids import id_of, lenient_fields
from pagedcli.generate.sampling import SamplingDefaults
from pagedcli.generate.source import RawRow
from pagedcli.generate.tokens import TextCodec, Tokeniser
from tests.generate.fake_engine import ByteTokenizer


def parse(data: Any, first_line: int | None = None) -> Row:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return parse_row(RawRow(4, 9, raw), first_line)


def check(data: Any, **given: Any) -> Row:
    """Parse, tokenise and settle a row."""
    row = parse(data)
    Tokeniser(TextCodec(ByteTokenizer()), 256, SamplingDefaults(given)).requests([row])
    return row


GIANT = b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}

FAULTS: list[tuple[Any, str, str]] = [
    (b"{", "invalid_json", "column 2"),
    (b"", "invalid_json", "column 1"),
    (b'{"prompt": "a"} x', "invalid_json", "Extra data"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "NaN"),
    (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json", "-Infinity"),
    (b'{"prompt": "\xff"}', "not_utf8", "0xff at offset 12"),
    (b'{"prompt": "\xed\xa0\x80"}', "not_utf8", "0xed"),
    (b'{"prompt": "\\ud83d"}', "lone_surrogate", "\\ud83d"),
    (b'{"prompt": "a", "id": "\\udc00"}', "lone_surrogate", "\\udc00"),
    (b'{"prompt": ' + b"[" * 100000, "nested_too_deeply", "100001 deep"),
    (GIANT, "number_too_long", "4300"),
    (b'{"prompt": "a", "prompt": "b"}', "repeated_field", "'prompt'"),
    (b'{"prompt": "a", "metadata": {"x": 1, "x": 2}}', "repeated_field", "'x'"),
    (b"[1, 2, 3]", "not_an_object", "a list of 3 items"),
    (b'"text"', "not_an_object", '"text"'),
    (b"7", "not_an_object", "number 7"),
    (b"null", "not_an_object", "null"),
    ({}, "missing_prompt", "prompt_token_ids"),
    ({"prompt": None}, "missing_prompt", "messages"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "several_prompts", "2 prompts (prompt, prompt_token_ids)"),
    ({"prompt": ["a"]}, "wrong_type", "is a list of 1 item:"),
    ({"prompt": 5}, "wrong_type", "number 5"),
    ({"prompt": ""}, "empty_prompt", "0 tokens"),
    ({"prompt_token_ids": []}, "empty_prompt", "0 tokens"),
    ({"prompt_token_ids": "1 2"}, "wrong_type", 'the string "1 2"'),
    ({"prompt_token_ids": [1, 2.0]}, "wrong_type", "prompt_token_ids[1] is the number 2.0"),
    ({"prompt_token_ids": [True]}, "wrong_type", "prompt_token_ids[0] is true"),
    ({"prompt_token_ids": [1, 256]}, "token_out_of_range", "256 at position 1 is outside the model's vocabulary"),
    ({"prompt_token_ids": [-1]}, "token_out_of_range", "-1 at position 0"),
    ({"prompt_token_ids": [10**30]}, "token_out_of_range", "0 to 255"),
    ({"messages": []}, "empty_prompt", "0 entries"),
    ({"messages": "hi"}, "wrong_type", 'messages is the string "hi"'),
    ({"messages": [{"content": "hi"}]}, "wrong_type", "messages[0].role is null"),
    ({"messages": [{"role": "user"}]}, "wrong_type", "messages[0].content is null"),
    ({"messages": ["hi"]}, "wrong_type", "messages[0]"),
    ({"messages": [{"role": "user", "content": "a", "tool": 1}]}, "unknown_field", "'tool' in messages[0]"),
    ({"messages": [{"role": "teapot", "content": "a"}]}, "chat_template", "teapot"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "unsupported_modality",
     "messages[0].content[0] has type 'image_url'"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "wrong_type", "number 3"),
    ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "wrong_type", "messages[0].tool_calls is the number 3"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "wrong_type",
     'messages[0].tool_calls[0].function.arguments is the string "{"'),
    ({"messages": [{"role": "tool", "content": "a", "tool_call_id": 4}]}, "wrong_type", "messages[0].tool_call_id is "),
    ({"prompt": "a", "logprobs": True}, "invalid_value", "logprobs = true: must be a number: how many"),
    ({"prompt": "a", "logprobs": 257}, "invalid_value", "logprobs = 257: must be -1 (all) or at most 256"),
    ({"prompt": "a", "prompt_logprobs": 10**6}, "invalid_value", "prompt_logprobs = 1000000: must be -1 "),
    ({"prompt": "a", "logit_bias": {"x": None}}, "invalid_value", 'logit_bias = {"x": null}'),
    ({"prompt": "a", "max_new_tokens": 5}, "unknown_field", "did you mean 'max_tokens'"),
    (b'\xef\xbb\xbf{"prompt": "a"}', "invalid_json", "column 1, where U+FEFF stands (a byte order mark"),
    (b'{"prompt": "a"}\x1a', "invalid_json", "column 16, where U+001A stands (Ctrl-Z"),
    (b'{\x00"prompt": "a"}', "invalid_json", "column 2, where U+0000 stands (NUL)"),
    ({"prompt": "a", "image": "x.png"}, "unknown_field", "'image'"),
    ({"prompt": "a", "temprature": 1}, "unknown_field", "did you mean 'temperature'"),
    ({"prompt": "a", "id": 1.5}, "wrong_type", "id is the number 1.5"),
    ({"prompt": "a", "id": False}, "wrong_type", "id is false"),
    ({"prompt": "a", "metadata": [1]}, "wrong_type", "metadata is a list"),
    (b'{"prompt": "a", "metadata": {"x": 1e999}}', "invalid_value", "too large"),
    ({"prompt": "a", "temperature": 2.5}, "invalid_value", "temperature = 2.5: must be between 0 and 2"),
    ({"prompt": "a", "temperature": "hot"}, "invalid_value", 'temperature = "hot"'),
    (b'{"prompt": "a", "temperature": 1e999}', "invalid_value", "finite"),
    ({"prompt": "a", "temperature": 10**400}, "invalid_value", "temperature"),
    ({"prompt": "a", "top_p": 0}, "invalid_value", "top_p = 0.0"),
    ({"prompt": "a", "repetition_penalty": 1e-320}, "invalid_value", "between 1e-06 and 1e+06"),
    ({"prompt": "a", "repetition_penalty": 1e39}, "invalid_value", "repetition_penalty = 1e+39: must be between"),
    ({"prompt": "a", "top_k": 10 ** 22}, "invalid_value", "between 1 and 2147483647"),
    ({"prompt": "a", "top_k": 1.5}, "invalid_value", "top_k = 1.5"),
    ({"prompt": "a", "n": 0}, "invalid_value", "n = 0: must be at least 1"),
    ({"prompt": "a", "n": 2, "temperature": 0}, "invalid_value", "greedy"),
    ({"prompt": "a", "max_tokens": -1}, "invalid_value", "max_tokens = -1"),
    ({"prompt": "a", "max_tokens": True}, "invalid_value", "max_tokens = true"),
    ({"prompt": "a", "max_tokens": 4, "min_tokens": 5}, "invalid_value", "between 0 and max_tokens = 4"),
    ({"prompt": "a", "stop": ""}, "invalid_value", "none of them empty"),
    ({"prompt": "a", "stop": {"x": 1}}, "wrong_type", "stop is an object"),
    ({"prompt": "a", "stop": [1]}, "invalid_value", "stop = [1]"),
    ({"prompt": "a", "stop_token_ids": 3}, "wrong_type", "stop_token_ids is the number 3"),
    ({"prompt": "a", "logit_bias": [[1, 2]]}, "wrong_type", "logit_bias is a list"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    ({"prompt": "a", "logprobs": -2}, "invalid_value", "logprobs = -2"),
    ({"prompt": "a", "ignore_eos": 1}, "invalid_value", "ignore_eos = 1"),
    ({"prompt": "a", "early_stopping": "soon"}, "invalid_value", "early_stopping"),
    ({"prompt": "a", "beam_width": 2}, "invalid_value", "use_beam_search"),
    ({"prompt": "a", "use_beam_search": True, "temperature": 0.7}, "invalid_value", "temperature = 0.7: must be 0 "),
    ({"prompt": "a", "use_beam_search": True, "top_p": 0.9}, "invalid_value", "top_p = 0.9: must be 1 "),
    ({"prompt": "a", "use_beam_search": True, "top_k": 4}, "invalid_value", "top_k = 4: must be 0 "),
    ({"prompt": "a", "use_beam_search": True, "min_p": 0.1}, "invalid_value", "min_p = 0.1: must be 0 "),
]


@pytest.mark.parametrize(("data", "code", "words"), FAULTS, ids=[f"{i}-{fault[1]}" for i, fault in enumerate(FAULTS)])
def test_faults(data: Any, code: str, words: str) -> None:
    row = check(data)
    assert row.error is not None, "the row was taken"
    assert row.error[0] == code and words in row.error[1], row.error
    assert len(row.error[1]) <= MAX_MESSAGE
    rendered = render_failure(row)
    assert isinstance(rendered, bytes)
    record = json.loads(rendered.decode())
    assert record["error"] == {"code": row.error[0], "message": row.error[1]} and record["outputs"] == []


def test_a_long_message_is_cut() -> None:
    row = check({"prompt": "a", "top_p": "x" * 5000})
    assert row.error is not None and len(row.error[1]) <= MAX_MESSAGE and "[...]" in row.error[1]


def test_good_rows() -> None:
    assert check({"prompt": "ab"}).ids == [97, 98]
    assert check(CHAT).ids == list(b"user: hi\n")
    content = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    parts = check({"messages": [{"role": "user", "content": content}]})
    assert parts.ids == list(b"user: hi\n")
    assert check({"prompt_token_ids": [0, 255]}).ids == [0, 255]
    null = check({"prompt": "a", "id": None, "stop": None, "max_tokens": None, "messages": None})
    assert null.error is None and null.id == 4 and null.settings == {}
    assert check({"prompt": "a", "id": "x", "metadata": {"k": [1, None]}}).metadata == {"k": [1, None]}


@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0},
                                    {"top_k": 0, "seed": 3}])
def test_beam_rows_that_draw_nothing_are_taken(fields: dict[str, Any]) -> None:
    assert check({"prompt": "a", "use_beam_search": True, **fields}).error is None


def test_a_temperature_of_the_whole_job_is_refused_in_a_beam_row_and_can_be_overruled() -> None:
    row = check({"prompt": "a", "use_beam_search": True}, temperature=0.5)
    assert row.error is not None and "temperature = 0.5" in row.error[1]
    assert check({"prompt": "a", "use_beam_search": True, "temperature": 0}, temperature=0.5).error is None
    with pytest.raises(UsageError, match=r"top_p = 0\.5"):
        SamplingDefaults({"use_beam_search": True, "top_p": 0.5})


def test_no_field_is_offered_that_only_shares_words() -> None:
    row = check({"prompt": "a", "truncate_prompt_tokens": 5})
    assert row.error == ("unknown_field", "unknown field 'truncate_prompt_tokens'")


def test_log_probabilities_of_the_whole_vocabulary_are_taken() -> None:
    assert check({"prompt": "a", "logprobs": 256, "prompt_logprobs": -1}).error is None


def test_messages_of_tools_reach_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    row = parse({"messages": [{"role": "user", "content": "1+1?", "name": "me"},
                              {"role": "assistant", "content": None, "tool_calls": [call]},
                              {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
                              {"role": "assistant", "content": "2", "tool_calls": None}]})
    assert row.error is None and row.messages == [
        {"role": "user", "content": "1+1?", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "function": {"name": "add",
                                                                                 "arguments": {"x": 1}}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "2"}]


def test_duplicate_names_both_lines() -> None:
    row = parse({"prompt": "a", "id": "x"}, first_line=2)
    assert row.error is not None and row.error[0] == "duplicate_id"
    assert "line 9" in row.error[1] and "line 2" in row.error[1] and '"x"' in row.error[1]
    assert row.id is None, "the id is the other row's"


@pytest.mark.parametrize(("data", "found"), [
    (b"not json", None), (b"[1]", None), (b'{"id": 5, "prompt": "a', None), (b'{"id": 5, "prompt": a b}', None),
    (b'{"id": 5, "prompt": "\\ud83d"}', 5), (b'{"prompt": "\\ud83d"}', 4), (b'{"id": "\\ud83d", "prompt": "a"}', None),
    (b'{"id": 5, "prompt": "\xff"}', 5), (b'{"prompt": "\xff"}', 4), (b'{"id": "\xff", "prompt": "a"}', None),
    (b'{"prompt": "a", "top_p": NaN, "id": "x, \\"y\\""}', 'x, "y"'),
    (b'{"id": "x", "prompt": "a", "prompt": "b"}', "x"), (b'{"id": 1, "prompt": "b", "id": 2}', None),
    (b'{"id": 1, "prompt": "b", "\\u0069d": 2}', None), (b'{"id": "x", "metadata": {"id": 3, "id": 4}}', "x"),
    (b'{"metadata": ' + b'{"x":' * 3000 + b'{"id": 1}' + b"}" * 3000 + b', "id": 7}', 7),
    (b'{"seed": ' + b"1" * 5000 + b', "id": 7}', 7), (b'{"id": ' + b"1" * 5000 + b', "prompt": "a"}', None),
    ({"id": 5}, 5), ({"id": 1.5, "prompt": "a"}, None), ({"prompt": 7}, 4), ({"id": None, "prompt": 7}, 4),
])
def test_a_row_with_a_fault_keeps_the_id_that_can_be_read(data: Any, found: int | str | None) -> None:
    row = parse(data)
    assert row.error is not None
    rendered = render_failure(row)
    assert isinstance(rendered, bytes)
    record = json.loads(rendered)
    assert (record["id"], record["index"]) == (found, 4)
    # The first pass over the file must come to the same: only then is every id one row's.
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    assert id_of(lenient_fields(raw), 4)[0] == found


def test_a_batch_request_with_a_fault_in_its_line_is_answered_as_one() -> None:
    row = parse(b'{"custom_id": "q", "url": "/v1/completions", "body": {"prompt": "\\ud83d"}}')
    assert row.error is not None and (row.error[0], row.form, row.id) == ("lone_surrogate", Form.COMPLETION, "q")


def test_row_fields_win_over_the_jobs() -> None:
    defaults = SamplingDefaults({"temperature": 0.5, "max_tokens": 7})
    assert defaults.params({}) is defaults.shared == SamplingParams(temperature=0.5, max_tokens=7)
    assert defaults.params({"temperature": 0}) == SamplingParams(temperature=0, max_tokens=7)
    assert defaults.limited({}) and not SamplingDefaults().limited({}) and SamplingDefaults().limited({"max_tokens": 1})


def test_equal_settings_are_made_once_and_types_told_apart() -> None:
    defaults = SamplingDefaults()
    assert defaults.params({"top_k": 5, "seed": 1}) is defaults.params({"top_k": 5, "seed": 1})
    assert defaults.params({"stop": ["a"]}) == SamplingParams(stop=("a",))
    defaults.params({"n": 1})
    with pytest.raises(RequestError):
        defaults.params({"n": True})
    with pytest.raises(RequestError):
        defaults.params({"n": 1.0})


def test_wrong_job_settings_are_a_fault_of_the_command() -> None:
    with pytest.raises(UsageError, match="temperature = 3"):
        SamplingDefaults({"temperature": 3})


def test_texts_are_encoded_in_one_call() -> None:
    tokenizer = ByteTokenizer()
    rows = [parse({"prompt": text}) for text in ("a", "b", "")] + [parse({"prompt_token_ids": [3]}), parse(b"{")]
    requests = Tokeniser(TextCodec(tokenizer), 256, SamplingDefaults()).requests(rows)
    assert tokenizer.calls == 1
    assert [request and request.prompt for request in requests] == [(97,), (98,), None, (3,), None]


def test_without_a_tokenizer_only_ids_run() -> None:
    rows = [parse({"prompt": "a"}), parse(CHAT), parse({"prompt_token_ids": [3]})]
    requests = Tokeniser(None, 256, SamplingDefaults()).requests(rows)
    assert [request and request.prompt for request in requests] == [None, None, (3,)]
    assert [row.error and row.error[0] for row in rows] == ["no_tokenizer", "no_tokenizer", None]


def test_form_is_kept_for_the_answer() -> None:
    assert parse({"prompt": "a"}).form is Form.NATIVE
    batch = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    assert parse(batch).form is Form.COMPLETION


def test_no_two_ids_share_a_stream() -> None:
    """A number, the text of that number, and that text in quotes are three ids, so they draw apart."""
    row = Row(0, 0)
    keys = []
    for row.id in (5, "5", '"5"', "-5", -5, "a", '"a"', "05", ""):
        keys.append(row.key)
    assert len(set(keys)) == len(keys)
    assert keys[0] == "5" and keys[5] == "a"
