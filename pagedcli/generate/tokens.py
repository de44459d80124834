"""From rows to requests: chat templates, tokenisation in batches, and the checks that need the token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pagedcli.core.errors import RequestError
from pagedcli.core.request import Request, invalid
from pagedcli.generate.row import Row
from pagedcli.generate.sampling import SamplingDefaults


class Tokenizer(Protocol):
    """What a job needs of a tokenizer (execution/tokenizer.py has all of it)."""

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the model wants at its start."""
        ...

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a conversation by the model's chat template, ending where the assistant speaks. Raises RequestError
        when there is no template or it refuses the messages."""
        ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...


class TextCodec:
    """A tokenizer as a job uses it: many prompts in one call, and the text of single ids remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._batch = _batch_encoder(tokenizer)
        self._texts: dict[int, str] = {}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._batch(texts)

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.tokenizer.encode_chat(messages)

    def token_text(self, token: int) -> str:
        """Text of one id alone, for log probabilities (a part of a character reads U+FFFD)."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.tokenizer.decode([token], skip_special_tokens=False)
        return text


def _batch_encoder(tokenizer: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    """The fastest way there is: the tokenizer's own batches, those of the library below it, or one by one."""
    own = getattr(tokenizer, "encode_batch", None)
    if own is not None:
        return lambda texts: own(texts)
    backend = getattr(tokenizer, "backend", None)
    if backend is not None:
        return lambda texts: [encoding.ids for encoding in backend.encode_batch_fast(texts)]
    return lambda texts: [tokenizer.encode(text) for text in texts]


class Tokeniser:
    """Turns parsed rows into requests, many at a time.

    `codec` None means a model without a tokenizer: only rows of token ids can run.
    """

    def __init__(self, codec: TextCodec | None, vocab_size: int, defaults: SamplingDefaults) -> None:
        self.codec = codec
        self.vocab_size = vocab_size
        self.defaults = defaults

    def requests(self, rows: list[Row]) -> list[Request | None]:
        """One request a row, in order; None for a row with a fault (then in `row.error`)."""
        self._encode_texts([row for row in rows if row.error is None and row.text is not None])
        return [None if row.error is not None else self._request(row) for row in rows]

    def _encode_texts(self, rows: list[Row]) -> None:
        if not rows:
            return
        if self.codec is None:
            for row in rows:
                row.fail("no_tokenizer", "the model has no tokenizer: give prompt_token_ids instead of text")
            return
        for row, ids in zip(rows, self.codec.encode_batch([row.text or "" for row in rows]), strict=True):
            row.ids = ids

    def _request(self, row: Row) -> Request | None:
        try:
            if row.messages is not None:
                row.ids = self._encode_chat(row.messages)
            elif row.text is None:
                self._check_ids(row)
            if not row.ids:
                raise RequestError("empty_prompt", "the prompt has 0 tokens; at least 1 is needed")
            params = self.defaults.params(row.settings)
            for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
                if count is not None and count > self.vocab_size:
                    raise invalid(name, count, f"-1 (all) or at most {self.vocab_size}, the model's vocabulary")
            return Request(row.index, row.key, tuple(row.ids), params)
        except RequestError as fault:
            row.fail(fault.code, fault.message)
            return None

    def _encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        if self.codec is None:
            raise RequestError("no_tokenizer", "the model has no tokenizer: give prompt_token_ids instead of messages")
        return self.codec.encode_chat(messages)

    def _check_ids(self, row: Row) -> None:
        ids = row.ids
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            place = next(place for place, token in enumerate(ids) if not 0 <= token < self.vocab_size)
            raise RequestError("token_out_of_range", f"token id {ids[place]} at position {place} is outside the "
                               f"model's vocabulary of {self.vocab_size} (0 to {self.vocab_size - 1})")
