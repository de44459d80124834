"""Changes to logits before a token is chosen: bias, bad words, min_tokens, penalties. Names and order are vLLM's.

Only the entries that a request names are touched. They are gathered for all rows of the batch at once, so each step is
one elementwise operation on one vector: the bits of a row cannot depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from pagedcli.attention.host_arrays import as_tensor
from pagedcli.core.errors import CannotRunError, RequestError
from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import Sequence

BadWords = tuple[tuple[int, ...], ...]


class TokenCounts:
    """How often each token stands in a sequence's output, and which ones stand in its prompt.

    Kept as vectors with a place for each distinct token, so that a step costs one update a sequence.
    """

    __slots__ = ("_counts", "_ids", "_places", "prompt", "taken")

    def __init__(self, prompt: np.ndarray) -> None:
        self.prompt = prompt
        self.taken = 0
        self._places: dict[int, int] = {}
        self._ids = np.zeros(32, np.int64)
        self._counts = np.zeros(32, np.float32)

    @property
    def ids(self) -> np.ndarray:
        """Distinct output tokens, int64."""
        return self._ids[:len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """Occurrences of each of `ids`, float32."""
        return self._counts[:len(self._places)]

    def take(self, tokens: Items[int]) -> None:
        """Count further output tokens."""
        for token in tokens:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
            self._counts[place] += 1
        self.taken += len(tokens)

    def copy(self) -> TokenCounts:
        other = TokenCounts(self.prompt)
        other.taken = self.taken
        other._places = dict(self._places)
        other._ids = self._ids.copy()
        other._counts = self._counts.copy()
        return other


def check_request(request: Request, vocab_size: int, has_tokenizer: bool) -> None:
    """Raises RequestError for fields that only the model's vocabulary can judge."""
    params = request.params
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", [t for t, _ in params.logit_bias])):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError("invalid_value", f"{name} holds token {token}: must be from 0 to {vocab_size - 1}, "
                                   "the model's vocabulary")
    for name in ("stop", "bad_words"):
        if getattr(params, name) and not has_tokenizer:
            raise RequestError("invalid_value", f"{name} = {list(getattr(params, name))!r}: needs a tokenizer, and "
                               "this model has none; use stop_token_ids or logit_bias")


def encode_bad_words(backend: Any, words: Items[str]) -> BadWords:
    """Token sequences that spell each word at the start of a text and after a space, by a tokenizers.Tokenizer."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, " " + bare):
            ids = tuple(backend.encode(text, add_special_tokens=False).ids)
            if ids:
                found[ids] = None
    return tuple(found)


def forbidden_now(words: BadWords, tokens: Items[int], start: int) -> list[int]:
    """Tokens that would complete a bad word, whose earlier tokens must stand at the end of `tokens[start:]`."""
    banned = []
    for word in words:
        before = len(word) - 1
        if not before or (len(tokens) - start >= before and tuple(tokens[-before:]) == word[:-1]):
            banned.append(word[-1])
    return banned


class _Sparse:
    """Entries of a [rows, vocabulary] matrix, array or tensor, collected row by row and applied at once."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._places: list[np.ndarray] = []
        self._amounts: list[np.ndarray] = []

    def add(self, row: int, ids: np.ndarray, amounts: np.ndarray | float) -> None:
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._width):
            raise CannotRunError(f"a token id outside the model's vocabulary of {self._width} stands in a "
                                 f"request's sampling fields: {int(ids.min())} to {int(ids.max())}")
        self._places.append(row * self._width + ids)
        self._amounts.append(np.broadcast_to(np.asarray(amounts, np.float32), ids.shape))

    def __bool__(self) -> bool:
        return any(len(item) for item in self._places)

    def beside(self, rows: Any) -> tuple[Any, Any]:
        """Flat places (int64) and one float32 amount each, of the kind that `rows` are and where they are."""
        places, amounts = np.concatenate(self._places), np.concatenate(self._amounts)
        if isinstance(rows, np.ndarray):
            return places, amounts
        return as_tensor(places).to(rows.device), as_tensor(amounts).to(rows.device)


def needs_processing(params: SamplingParams, output_len: int) -> bool:
    """Whether this row's logits must be changed before choosing."""
    return bool(params.penalised or params.logit_bias or params.bad_words or output_len < params.min_tokens)


def process(
    rows: Any, sequences: Items[Sequence], counts: Items[TokenCounts | None], bad_words: Items[BadWords],
    eos_ids: Items[int], *, words_reach_prompt: bool = False,
) -> None:
    """Change `rows` [len(sequences), vocabulary] float32, array or tensor, in place, one sequence a row.

    `counts` is needed for penalised rows. Order: bias, bad words, min_tokens, repetition penalty (prompt and output),
    then frequency and presence penalties (output). `words_reach_prompt`: a bad word may begin in the prompt, as in
    Hugging Face's beam search; otherwise only output is looked at, as in vLLM.
    """
    width = rows.shape[1]
    bias, mask, repeat, frequency, presence = (_Sparse(width) for _ in range(5))
    for row, seq in enumerate(sequences):
        params = seq.group.params
        if params.logit_bias:
            pairs = np.array(params.logit_bias, np.float64)
            bias.add(row, pairs[:, 0].astype(np.int64), pairs[:, 1])
        banned = forbidden_now(bad_words[row], seq.tokens, 0 if words_reach_prompt else seq.prompt_len)
        if seq.output_len < params.min_tokens:
            banned += [*eos_ids, *params.stop_token_ids]
        if banned:
            mask.add(row, np.unique(np.array(banned, np.int64)), -np.inf)
        seen = counts[row]
        if seen is not None:
            if params.repetition_penalty != 1:
                # A prompt may hold ids beyond the head's rows (placeholders); they cannot be generated.
                known = np.union1d(seen.prompt, seen.ids)
                repeat.add(row, known[known < width], params.repetition_penalty)
            if params.frequency_penalty != 0:
                frequency.add(row, seen.ids, np.float32(params.frequency_penalty) * seen.counts)
            if params.presence_penalty != 0:
                presence.add(row, seen.ids, params.presence_penalty)
    flat = rows.reshape(-1)
    if bias:
        places, amounts = bias.beside(rows)
        flat[places] += amounts
    if mask:
        flat[mask.beside(rows)[0]] = -math.inf
    if repeat:
        places, amounts = repeat.beside(rows)
        now = flat[places]
        lower, raised = now / amounts, now * amounts
        # A tensor's own `where`: picking by a mask would make the host wait for a GPU.
        flat[places] = np.where(now > 0, lower, raised) if isinstance(now, np.ndarray) else lower.where(now > 0, raised)
    for kind in (frequency, presence):
        if kind:
            places, amounts = kind.beside(rows)
            flat[places] -= amounts
