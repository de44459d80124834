"""What a user asks for: sampling parameters and the request that carries them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pagedcli.core.errors import RequestError

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy (the same rule as vLLM's)."""

NO_ROW = -1
"""Index of a request that only brings a beginning into the KV cache. Requests with an index below 0 serve no row."""

MAX_LOGIT_BIAS = 100.0
EarlyStopping = bool | Literal["never"]


def invalid(name: str, value: object, rule: str) -> RequestError:
    """An error for one sampling field, naming the value and the limit."""
    shown = json.dumps(value, ensure_ascii=False, default=repr)
    return RequestError("invalid_value", f"{name} = {shown}: must be {rule}")


def _number(name: str, value: object) -> float:
    # Compared, not asked for finiteness: an integer too large for a float would raise OverflowError there.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise invalid(name, value, "a finite number")
    return float(value)


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, value, "an integer")
    return value


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Iterable):
        raise invalid(name, value, "a string or a list of strings")
    result = tuple(items)
    if not all(isinstance(item, str) and item for item in result):
        raise invalid(name, value, "a string or a list of strings, none of them empty")
    return result


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise invalid(name, value, "a list of token ids")
    ids = tuple(_integer(name, item) for item in value)
    if any(item < 0 for item in ids):
        raise invalid(name, min(ids), "at least 0 (a token id)")
    return ids


MOST_TOP_K = (1 << 31) - 1
"""More than any vocabulary has."""
MOST_PENALTY = 1e6
"""Of logits multiplied or divided by it none leaves the range of float32, so the row stays one that can be answered."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen for one request; names and ranges are vLLM's, beam fields Hugging Face's.

    Raises RequestError (code `invalid_value`) naming the field, the value and the allowed range.
    `max_tokens` None means as many as the model and the KV pool allow.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "stop", _strings("stop", self.stop))
        put(self, "bad_words", _strings("bad_words", self.bad_words))
        put(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        put(self, "logit_bias", _bias(self.logit_bias))
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                     "repetition_penalty", "length_penalty"):
            put(self, name, _number(name, getattr(self, name)))
        for name in ("n", "top_k", "min_tokens"):
            _integer(name, getattr(self, name))
        for name in ("best_of", "max_tokens", "logprobs", "prompt_logprobs", "seed", "beam_width"):
            value = getattr(self, name)
            if name in ("logprobs", "prompt_logprobs") and isinstance(value, bool):
                raise invalid(name, value, "a number: how many of the likeliest tokens to tell (0: the chosen one "
                              "alone)")
            if value is not None:
                _integer(name, value)
        for name in ("include_stop_str_in_output", "ignore_eos", "use_beam_search"):
            if not isinstance(getattr(self, name), bool):
                raise invalid(name, getattr(self, name), "true or false")
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        rules: tuple[tuple[str, bool, str], ...] = (
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature <= 2, "between 0 and 2"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", -1 <= self.top_k <= MOST_TOP_K, f"-1 or 0 (off), or between 1 and {MOST_TOP_K}"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("repetition_penalty", 1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY,
             f"between {1 / MOST_PENALTY:g} and {MOST_PENALTY:g}"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "at least 0"),
            ("logprobs", self.logprobs is None or self.logprobs >= -1, "-1 (all) or at least 0"),
            ("prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= -1,
             "-1 (all) or at least 0"),
            ("beam_width", self.beam_width is None or self.beam_width >= 1, "at least 1"),
            ("early_stopping", self.early_stopping in (True, False, "never"), 'true, false or "never"'),
        )
        for name, good, rule in rules:
            if not good:
                raise invalid(name, getattr(self, name), rule)
        limit = self.max_tokens
        if self.min_tokens < 0 or (limit is not None and self.min_tokens > limit):
            top = "any number" if limit is None else f"max_tokens = {limit}"
            raise invalid("min_tokens", self.min_tokens, f"between 0 and {top}")
        if self.best_of is not None and self.best_of < self.n:
            raise invalid("best_of", self.best_of, f"at least n = {self.n}")

    def _check_combinations(self) -> None:
        if self.use_beam_search:
            if self.n > self.width:
                raise invalid("n", self.n, f"at most beam_width = {self.width} in beam search")
            if self.best_of is not None:
                raise invalid("best_of", self.best_of, "left out in beam search (use beam_width)")
            self._check_nothing_is_drawn()
        elif self.beam_width is not None:
            raise invalid("beam_width", self.beam_width, "used with use_beam_search = true")
        elif self.greedy and self.samples > 1:
            raise invalid("n" if self.n > 1 else "best_of", self.samples,
                          "1 when temperature is 0 (greedy gives one output); set temperature above 0")

    def _check_nothing_is_drawn(self) -> None:
        """Fields that only drawing heeds must be off in beam search, as vLLM had it. A temperature of 1, the default,
        changes nothing; a seed is for nothing but does no harm."""
        rules: tuple[tuple[str, bool, str], ...] = (
            ("temperature", self.greedy or self.temperature == 1, "0 (or left out)"),
            ("top_p", self.top_p == 1, "1 (or left out)"),
            ("top_k", self.top_k in (-1, 0), "0 (or left out)"),
            ("min_p", self.min_p == 0, "0 (or left out)"),
        )
        for name, good, rule in rules:
            if not good:
                raise invalid(name, getattr(self, name), f"{rule} in beam search, which keeps the likeliest beams and "
                              "draws nothing")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken at each step."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def width(self) -> int:
        """Beams kept at each step (default: n, at least 2 unless given)."""
        return self.beam_width if self.beam_width is not None else max(self.n, 2)

    @property
    def samples(self) -> int:
        """Sequences sampled side by side: `best_of` where given, else n."""
        return self.best_of if self.best_of is not None else self.n

    @property
    def max_sequences(self) -> int:
        """Most sequences that this request can have running at once."""
        return self.width if self.use_beam_search else self.samples

    @property
    def penalised(self) -> bool:
        """Whether any penalty needs the counts of tokens seen so far."""
        return (self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """All field names, as they stand in a row and (with dashes) on the command line."""
        return tuple(item.name for item in fields(cls))


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    """Sorted (token id, bias) pairs, clamped to +-100, from a mapping (JSON keys are strings) or pairs."""
    if value is None:
        return ()
    items: Any = value.items() if isinstance(value, Mapping) else value
    pairs: dict[int, float] = {}
    try:
        for key, amount in items:
            token = int(key) if isinstance(key, str) else _integer("logit_bias", key)
            pairs[token] = max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, _number("logit_bias", amount)))
    except (TypeError, ValueError) as fault:
        raise invalid("logit_bias", value, "an object of token id: number") from fault
    return tuple(sorted(pairs.items()))


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to serve.

    `key` names the request in random streams (hash of seed, key, sample, position), so that its outputs do not
    depend on its place in the file when it has an id of its own. `output_len` forces the length (benchmarks): the
    request then ends after exactly that many tokens a sequence. `arrival` is in seconds on the engine's clock.
    """

    index: int
    key: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0
    output_len: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("empty_prompt", "the prompt has no tokens (length 0); at least 1 is needed")
