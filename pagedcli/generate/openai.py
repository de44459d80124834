"""OpenAI's batch format: request rows with a body for chat or completions, and their output rows.

Fields follow OpenAI's API reference for batches, chat completions and completions
(platform.openai.com/docs/api-reference); sampling fields that only vLLM has are accepted in a body too. Output rows
hold no clock time (`created` is 0) and no random id, so that a job gives the same bytes whenever it is run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from pagedcli.core.errors import RequestError
from pagedcli.core.sequence import Sequence, SequenceGroup, TokenChoice
from pagedcli.core.wording import counted
from pagedcli.generate import native
from pagedcli.generate.encoding import Lazy
from pagedcli.generate.row import Form, Row, describe, unknown_field, wrong_type
from pagedcli.generate.row_ids import is_row_id
from pagedcli.generate.sampling import SAMPLING_FIELDS
from pagedcli.generate.tokens import TextCodec

ENVELOPE = ("custom_id", "method", "url", "body")
_COMMON = SAMPLING_FIELDS | {"model", "stream", "user", "metadata"}
_FIELDS = {
    Form.CHAT: _COMMON | {"messages", "max_completion_tokens", "top_logprobs"},
    Form.COMPLETION: _COMMON | {"prompt", "echo"},
}
_NEVER = -9999.0
"""What OpenAI writes for the log probability of a token that cannot occur."""


def form_of(fields: Mapping[str, Any]) -> Form:
    """The form of a batch request, chat where its url says neither."""
    return Form.COMPLETION if fields.get("url") == Form.COMPLETION.value else Form.CHAT


def parse(row: Row, fields: Mapping[str, Any]) -> None:
    """Fill `row` from a batch request. Raises RequestError at the first fault; what was read before it stays."""
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not is_row_id(custom_id):
        raise wrong_type("custom_id", custom_id, "a string")
    for name in fields:
        if name not in ENVELOPE:
            raise unknown_field(name, ENVELOPE, " beside custom_id")
    if fields.get("method", "POST") != "POST":
        raise RequestError("invalid_value", f"method is {describe(fields['method'])}: must be POST")
    if fields.get("url") not in (Form.CHAT.value, Form.COMPLETION.value):
        raise RequestError("invalid_value", f"url is {describe(fields.get('url'))}: must be {Form.CHAT.value} or "
                           f"{Form.COMPLETION.value}")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise wrong_type("body", body, "an object")
    _parse_body(row, body)


def _parse_body(row: Row, body: Mapping[str, Any]) -> None:
    known = _FIELDS[row.form]
    for name in body:
        if name not in known:
            raise unknown_field(name, known, f" in the body of {row.form.value}")
    given = {name: value for name, value in body.items() if value is not None}
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise wrong_type("model", model, "a string")
    row.model = model
    for name in ("stream", "echo"):
        if given.get(name, False) is not False:
            raise RequestError("unsupported", f"{name} is {describe(given[name])}: a batch row can only have false")
    row.metadata = native.metadata_of(given)
    row.settings = {name: value for name, value in given.items() if name in SAMPLING_FIELDS}
    if row.form is Form.CHAT:
        _parse_chat(row, given)
    else:
        _parse_completion(row, given)


def _parse_chat(row: Row, given: Mapping[str, Any]) -> None:
    newer, older = given.get("max_completion_tokens"), given.get("max_tokens")
    if newer is not None:
        if older is not None and older != newer:
            raise RequestError("invalid_value", f"max_completion_tokens = {newer!r} and max_tokens = {older!r}: give "
                               "one, or both alike")
        row.settings["max_tokens"] = newer
    wanted, top = given.get("logprobs", False), given.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise wrong_type("logprobs", wanted, "true or false in a chat body (top_logprobs holds the number)")
    if top is not None and not wanted:
        raise RequestError("invalid_value", f"top_logprobs = {top!r}: needs logprobs = true")
    row.settings.pop("logprobs", None)
    if wanted:
        row.settings["logprobs"] = 0 if top is None else top
    if "messages" not in given:
        raise RequestError("missing_prompt", "the body has no messages")
    row.messages = native.messages_of(given["messages"])


def _parse_completion(row: Row, given: Mapping[str, Any]) -> None:
    prompt = given.get("prompt")
    if prompt is None:
        raise RequestError("missing_prompt", "the body has no prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise RequestError("several_prompts", f"prompt is a list of {counted(len(prompt), 'prompt')}: give "
                               "exactly 1 a row")
        prompt = prompt[0]
    if isinstance(prompt, list):
        row.ids = native.token_ids_of("prompt", prompt)
    elif isinstance(prompt, str):
        row.text = prompt
    else:
        raise wrong_type("prompt", prompt, "a string or a list of token ids")


def result(row: Row, group: SequenceGroup, codec: TextCodec | None, model: str) -> dict[str, Any]:
    """The output row of a finished request (status 200)."""
    chat = row.form is Form.CHAT
    choose = _chat_choice if chat else _completion_choice
    completion = sum(seq.output_len for seq in group.done)
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{_digest(row)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0, "model": model,
        "choices": [choose(place, seq, codec) for place, seq in enumerate(group.done)],
        "usage": {"prompt_tokens": group.prompt_len, "completion_tokens": completion,
                  "total_tokens": group.prompt_len + completion,
                  "prompt_tokens_details": {"cached_tokens": group.cached_tokens or 0}},
    }
    if group.params.prompt_logprobs is not None:
        body["prompt_logprobs"] = native.prompt_logprobs(group, codec)
    if row.metadata is not None:
        body["metadata"] = row.metadata
    return _envelope(row, 200, body, None)


def failure(row: Row) -> dict[str, Any]:
    """The output row of a request with a fault (status 400, the fault both in the body and beside the response)."""
    assert row.error is not None
    code, message = row.error
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return _envelope(row, 400, body, {"code": code, "message": message})


def _envelope(row: Row, status: int, body: dict[str, Any], error: dict[str, str] | None) -> dict[str, Any]:
    digest = _digest(row)
    response = {"status_code": status, "request_id": f"req_{digest}", "body": body}
    return {"id": f"batch_req_{digest}", "custom_id": row.id if isinstance(row.id, str) else None,
            "response": response, "error": error}


def _digest(row: Row) -> str:
    return hashlib.blake2b(f"{row.index}:{row.id}".encode(), digest_size=12).hexdigest()


def _chat_choice(place: int, seq: Sequence, codec: TextCodec | None) -> dict[str, Any]:
    logprobs = None
    if seq.logprobs is not None:
        logprobs = {"content": Lazy(_chat_logprob(choice, codec) for choice in seq.logprobs), "refusal": None}
    return {"index": place, "message": {"role": "assistant", "content": seq.text, "refusal": None},
            "logprobs": logprobs, "finish_reason": seq.finish_reason, "stop_reason": seq.stop_reason}


def _completion_choice(place: int, seq: Sequence, codec: TextCodec | None) -> dict[str, Any]:
    logprobs = None if seq.logprobs is None else _completion_logprobs(seq.logprobs, codec)
    return {"index": place, "text": seq.text, "logprobs": logprobs, "finish_reason": seq.finish_reason,
            "stop_reason": seq.stop_reason}


def _chat_logprob(choice: TokenChoice, codec: TextCodec | None) -> dict[str, Any]:
    top = [_token_logprob(token, logprob, codec) for token, logprob in choice.top or () if math.isfinite(logprob)]
    return {**_token_logprob(choice.token, choice.logprob, codec), "top_logprobs": top}


def _token_logprob(token: int, logprob: float, codec: TextCodec | None) -> dict[str, Any]:
    text = _text(token, codec)
    return {"token": text, "logprob": _number(logprob), "bytes": list(text.encode())}


def _completion_logprobs(choices: list[TokenChoice], codec: TextCodec | None) -> dict[str, Any]:
    texts = [_text(choice.token, codec) for choice in choices]
    offsets, place = [], 0
    for text in texts:
        offsets.append(place)
        place += len(text)
    tops = Lazy({_text(token, codec): logprob for token, logprob in choice.top or () if math.isfinite(logprob)}
                for choice in choices)
    return {"tokens": texts, "token_logprobs": [_number(choice.logprob) for choice in choices],
            "top_logprobs": tops, "text_offset": offsets}


def _text(token: int, codec: TextCodec | None) -> str:
    return codec.token_text(token) if codec else f"token_id:{token}"


def _number(value: float) -> float:
    return value if math.isfinite(value) else _NEVER
