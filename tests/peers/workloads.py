"""The rows that every engine gets: five workloads as JSON Lines of token ids with forced output lengths.

A row: `id`, `prompt_token_ids`, `max_tokens`, `n`, `temperature`, `ignore_eos` (always true), so that `pagedcli
generate` takes the file as it is and each driver reads the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Encode = Callable[[str], Sequence[int]]

NAMES = ("W1", "W2", "W3", "W4", "W5")
TITLES: Mapping[str, str] = {
    "W1": "mixed lengths, 128 rows",
    "W2": "shared prefix of 341 tokens, 64 rows",
    "W3": "32 rows x 4 samples",
    "W4": "long prompts of 2,000 tokens, 16 rows",
    "W5": "one row alone",
}
FIELDS = ("id", "prompt_token_ids", "max_tokens", "n", "temperature", "ignore_eos")
SHARED_W1 = Path("peers") / "W1.jsonl"
"""The measured W1 within the development data, where that is at hand."""

PREFIX_TOKENS = 341
INSTRUCTION = (
    "You sort the mail of a small repair shop. Read each message and answer with the kind of request it is, the "
    "thing it is about, how urgent it is on a scale from one to five, and one sentence that the shop can send back. "
    "Never promise a date. Never name a price that the message does not name itself. When a message asks for several "
    "things, take the most urgent one first and list the others after it in the order in which they were asked. "
)
EXAMPLES = (
    ("My kettle no longer switches off by itself and I am afraid to leave it alone.",
     "kind: repair; thing: kettle; urgency: 4; reply: Please stop using it and bring it in with its base."),
    ("Do you also sharpen garden shears, and would you take two pairs at once?",
     "kind: question; thing: garden shears; urgency: 1; reply: Yes, we sharpen shears, and two pairs are welcome."),
    ("The lamp you mended in spring flickers again, though only when it rains.",
     "kind: complaint; thing: lamp; urgency: 3; reply: We are sorry to hear it and would like to see the lamp again."),
    ("I moved house. Please send the bill for the bicycle to the new address below.",
     "kind: change; thing: bill for a bicycle; urgency: 2; reply: Thank you, the bill will go to your new address."),
)


@dataclass(frozen=True)
class Source:
    """What rows are cut from. `texts`: prompts, at least a few hundred; `origin` says what they are;
    `shared`: the folder of development data, which may be missing."""

    texts: Sequence[str]
    origin: str
    shared: Path


@dataclass(frozen=True)
class Workload:
    """One set of rows and where they come from."""

    name: str
    rows: tuple[Row, ...]
    origin: str

    @property
    def prompt_tokens(self) -> int:
        return sum(len(row["prompt_token_ids"]) for row in self.rows)

    @property
    def output_tokens(self) -> int:
        """Tokens that a run must write."""
        return sum(row["max_tokens"] * row["n"] for row in self.rows)

    @property
    def digest(self) -> str:
        """Twelve hex digits: equal for equal rows."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @property
    def text(self) -> str:
        return "".join(json.dumps(row) + "\n" for row in self.rows)

    def cut(self, rows: int | None, tokens: int | None) -> Workload:
        """The first `rows` rows with at most `tokens` output tokens each: for a quick try."""
        some = self.rows[:rows]
        if tokens is not None:
            some = tuple({**row, "max_tokens": min(row["max_tokens"], tokens)} for row in some)
        return Workload(self.name, some, f"{self.origin}, cut")


def _row(key: str, ids: Sequence[int], tokens: int, n: int = 1, temperature: float = 0.0) -> Row:
    return {"id": key, "prompt_token_ids": list(ids), "max_tokens": tokens, "n": n, "temperature": temperature,
            "ignore_eos": True}


class _Stream:
    """Token ids of many prompts one after another, without end, taken from the front."""

    def __init__(self, texts: Sequence[str], encode: Encode) -> None:
        self._ids = [token for text in texts for token in encode(text + "\n")]
        self._at = 0

    def take(self, count: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            piece = self._ids[self._at:self._at + count - len(taken)]
            taken += piece
            self._at = (self._at + len(piece)) % len(self._ids)
        return taken


def mixed_lengths(source: Source, encode: Encode) -> Workload:
    """W1: the measured rows where they are at hand, else lengths drawn from log-normals of the same means."""
    file = source.shared / SHARED_W1
    if file.is_file():
        found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        rows = [_row(row["id"], row["prompt_token_ids"], row["max_tokens"]) for row in found]
        return Workload("W1", tuple(rows), f"{len(rows)} measured rows ({file.name})")
    rng, stream = random.Random(1), _Stream(source.texts, encode)
    rows = []
    for number in range(128):
        prompt = max(38, min(575, round(rng.lognormvariate(4.98, 0.55))))
        output = max(17, min(512, round(rng.lognormvariate(4.28, 0.6))))
        rows.append(_row(f"w1-{number:03d}", stream.take(prompt), output))
    return Workload("W1", tuple(rows), f"cut from {source.origin}")


def shared_prefix(source: Source, encode: Encode) -> Workload:
    """W2: instructions and examples of 341 tokens, then about 30 tokens of each row's own, 60 out."""
    parts = [INSTRUCTION] + [f"\nMessage: {ask}\nAnswer: {answer}" for ask, answer in EXAMPLES]
    prefix: list[int] = []
    while len(prefix) < PREFIX_TOKENS:
        prefix += encode("".join(parts))
    rng, stream = random.Random(2), _Stream(source.texts, encode)
    rows = [_row(f"w2-{number:03d}", prefix[:PREFIX_TOKENS] + stream.take(rng.randint(22, 38)), 60)
            for number in range(64)]
    return Workload("W2", tuple(rows), f"own instructions, then {source.origin}")


def parallel_sampling(source: Source, encode: Encode) -> Workload:
    """W3: the prompts of W1's first 32 rows, four samples of 64 tokens each at temperature 1."""
    base = mixed_lengths(source, encode)
    rows = [_row(f"w3-{number:03d}", row["prompt_token_ids"], 64, n=4, temperature=1.0)
            for number, row in enumerate(base.rows[:32])]
    return Workload("W3", tuple(rows), f"prompts of W1: {base.origin}")


def long_prompts(source: Source, encode: Encode) -> Workload:
    """W4: 16 prompts of 2,000 tokens, prompts of `source` one after another, 32 out."""
    stream = _Stream(source.texts, encode)
    rows = [_row(f"w4-{number:03d}", stream.take(2000), 32) for number in range(16)]
    return Workload("W4", tuple(rows), f"cut from {source.origin}")


def one_row(source: Source, encode: Encode) -> Workload:
    """W5: one prompt of 100 tokens, 128 out."""
    return Workload("W5", (_row("w5-000", _Stream(source.texts, encode).take(100), 128),), f"cut from {source.origin}")


_MAKERS: Mapping[str, Callable[[Source, Encode], Workload]] = {
    "W1": mixed_lengths, "W2": shared_prefix, "W3": parallel_sampling, "W4": long_prompts, "W5": one_row}


def make(name: str, source: Source, encode: Encode) -> Workload:
    """The workload of that name. ValueError names those there are."""
    if name not in _MAKERS:
        raise ValueError(f"workload {name!r}: must be one of {', '.join(NAMES)}")
    return _MAKERS[name](source, encode)


def read(file: Path) -> list[Row]:
    """Rows of a file that `Workload.text` was written to."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
