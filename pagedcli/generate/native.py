"""The project's own row format: what a row may say, and what comes out for it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pagedcli.core.errors import RequestError
from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.generate.encoding import Lazy
from pagedcli.generate.row import Row, unknown_field, wrong_type
from pagedcli.generate.row_ids import is_row_id
from pagedcli.generate.sampling import SAMPLING_FIELDS
from pagedcli.generate.tokens import TextCodec

PROMPTS = ("prompt", "prompt_token_ids", "messages")
FIELDS = frozenset(PROMPTS) | SAMPLING_FIELDS | {"id", "metadata"}
_MESSAGE = ("role", "content", "name", "tool_call_id", "tool_calls")
_PARTS = "use text; images, sound and video cannot be read by a text model"


def parse(row: Row, fields: Mapping[str, Any]) -> None:
    """Fill `row` from a native row. Raises RequestError at the first fault; what was read before it stays."""
    found = fields.get("id")
    if found is not None and not is_row_id(found):
        raise wrong_type("id", found, "a string or an integer")
    for name, value in fields.items():
        if name in SAMPLING_FIELDS:
            if value is not None:
                row.settings[name] = value
        elif name not in FIELDS:
            raise unknown_field(name, FIELDS)
    row.metadata = metadata_of(fields)
    given = [name for name in PROMPTS if fields.get(name) is not None]
    if not given:
        raise RequestError("missing_prompt", "the row has no prompt: give one of prompt, prompt_token_ids or messages")
    if len(given) > 1:
        raise RequestError("several_prompts", f"the row has {len(given)} prompts ({', '.join(given)}): give exactly 1")
    name = given[0]
    if name == "prompt":
        row.text = text_of(fields[name])
    elif name == "messages":
        row.messages = messages_of(fields[name])
    else:
        row.ids = token_ids_of(name, fields[name])


def metadata_of(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    value = fields.get("metadata")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type("metadata", value, "an object")
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as fault:
        raise RequestError("invalid_value", "metadata holds a number too large for a float (limit about 1.8e308), "
                           "which cannot be passed on as JSON; write it as a string") from fault
    return value


def text_of(value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type("prompt", value, "a string (token ids go into prompt_token_ids)")
    return value


def token_ids_of(name: str, value: object) -> list[int]:
    if not isinstance(value, list):
        raise wrong_type(name, value, "a list of token ids")
    for place, item in enumerate(value):
        if type(item) is not int:
            raise wrong_type(f"{name}[{place}]", item, "an integer")
    return value


def messages_of(value: object) -> list[dict[str, Any]]:
    """Chat messages with their content as one string each."""
    if not isinstance(value, list):
        raise wrong_type("messages", value, "a list of {role, content} objects")
    if not value:
        raise RequestError("empty_prompt", "messages has 0 entries; at least 1 is needed")
    return [_message(f"messages[{place}]", item) for place, item in enumerate(value)]


def _message(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(where, value, "an object with role and content")
    for name in value:
        if name not in _MESSAGE:
            raise unknown_field(name, _MESSAGE, f" in {where}")
    role = value.get("role")
    if not isinstance(role, str) or not role:
        raise wrong_type(f"{where}.role", role, "a string such as system, user or assistant")
    for name in ("name", "tool_call_id"):
        if not isinstance(value.get(name, ""), str):
            raise wrong_type(f"{where}.{name}", value[name], "a string")
    calls = value.get("tool_calls")
    if calls is None:
        return {**_without(value, "tool_calls"), "content": _content(f"{where}.content", value.get("content"))}
    if not isinstance(calls, list):
        raise wrong_type(f"{where}.tool_calls", calls, "a list of tool calls")
    content = value.get("content")
    return {**value, "content": "" if content is None else _content(f"{where}.content", content),
            "tool_calls": [_tool_call(f"{where}.tool_calls[{place}]", call) for place, call in enumerate(calls)]}


def _tool_call(where: str, value: object) -> dict[str, Any]:
    """A call that an assistant made, with its arguments as the object that chat templates want: OpenAI's format has
    them as JSON in a string."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong_type(where, value, 'an object {"id": ..., "type": "function", "function": {"name", "arguments"}}')
    found = function.get("arguments", {})
    if isinstance(found, str):
        try:
            found = json.loads(found or "{}")
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, dict):
        raise wrong_type(f"{where}.function.arguments", function["arguments"], "an object, or one as JSON in a string")
    return {**value, "function": {**function, "arguments": found}}


def _without(value: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key != name}


def _content(where: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(where, value, "a string or a list of text parts")
    texts = []
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            if isinstance(kind, str):
                raise RequestError("unsupported_modality", f"{where}[{place}] has type {kind[:40]!r}: {_PARTS}")
            raise wrong_type(f"{where}[{place}]", part, 'an object {"type": "text", "text": ...}')
        text = part.get("text")
        if not isinstance(text, str):
            raise wrong_type(f"{where}[{place}].text", text, "a string")
        texts.append(text)
    return "".join(texts)


def result(row: Row, group: SequenceGroup, codec: TextCodec | None) -> dict[str, Any]:
    """The output object of a finished row."""
    outputs = [_output(place, seq, codec) for place, seq in enumerate(group.done)]
    record: dict[str, Any] = {
        "id": row.id, "index": row.index, "outputs": outputs,
        "usage": {"prompt_tokens": group.prompt_len, "completion_tokens": sum(len(o["token_ids"]) for o in outputs),
                  "cached_tokens": group.cached_tokens or 0},
        "error": None,
    }
    if group.params.prompt_logprobs is not None:
        record["prompt_logprobs"] = prompt_logprobs(group, codec)
    if row.metadata is not None:
        record["metadata"] = row.metadata
    return record


def failure(row: Row, prompt_tokens: int) -> dict[str, Any]:
    """The output object of a row with a fault."""
    assert row.error is not None
    record: dict[str, Any] = {
        "id": row.id, "index": row.index, "outputs": [],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 0, "cached_tokens": 0},
        "error": {"code": row.error[0], "message": row.error[1]},
    }
    if row.metadata is not None:
        record["metadata"] = row.metadata
    return record


def _output(place: int, seq: Sequence, codec: TextCodec | None) -> dict[str, Any]:
    logprobs = seq.logprobs
    return {
        "index": place, "text": seq.text, "token_ids": seq.output_ids, "finish_reason": seq.finish_reason,
        "stop_reason": seq.stop_reason, "cumulative_logprob": finite(seq.cumulative_logprob),
        "logprobs": None if logprobs is None else Lazy(
            entries(choice.token, choice.logprob, choice.top, codec) for choice in logprobs),
    }


def entries(token: int, logprob: float, top: Iterable[tuple[int, float]] | None,
            codec: TextCodec | None) -> list[dict[str, Any]]:
    """Log probabilities at one position: the chosen token first, then the most likely others (so up to k + 1)."""
    pairs = [(token, logprob), *((other, value) for other, value in top or () if other != token)]
    return [{"token_id": each, "token": codec.token_text(each) if codec else None, "logprob": finite(value)}
            for place, (each, value) in enumerate(pairs) if place == 0 or math.isfinite(value)]


def prompt_logprobs(group: SequenceGroup, codec: TextCodec | None) -> Lazy:
    """One entry a prompt token; null for the first, which nothing predicts."""
    return Lazy(_prompt_entries(group, codec))


def _prompt_entries(group: SequenceGroup, codec: TextCodec | None) -> Iterator[list[dict[str, Any]] | None]:
    for token, top in zip(group.request.prompt, group.prompt_logprobs or [None] * group.prompt_len, strict=True):
        yield None if top is None else entries(token, dict(top).get(token, -math.inf), top, codec)


def finite(value: float) -> float | None:
    """JSON has no infinity and no NaN: null stands for both."""
    return value if math.isfinite(value) else None
