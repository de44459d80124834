"""What a workload is: its requests, where they came from, and the named sets described in `specs/*.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pagedcli.core.errors import UsageError

Filter = Literal["paper", "vllm", "none"]
FILTERS: tuple[str, ...] = ("paper", "vllm", "none")
Kind = Literal["pairs", "translation", "chat", "trace"]

PAPER_MAX_TOTAL = 2047
"""The paper keeps requests with input + output < 2048 (strict; authors' artefact)."""

SHOT_TOKENS: Mapping[int, int] = {0: 0, 1: 80, 5: 341}
"""Shared prefix of the translation workload, tokens by number of examples (paper section 6.4)."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a workload. Lengths are tokens, times seconds from the start of the trace.

    `output_len` is forced in benchmarks. `prompt` is text where the source has text. Requests with one `prefix_id`
    share their first `prefix_len` tokens (and the text `prefix_text`, with which `prompt` then begins).
    `block_hashes` are Mooncake's ids of the prompt's 512-token blocks: equal ids, equal tokens. Requests of one
    `conversation` are windows on one token stream, this prompt starting at position `offset`. `token_ids` are the
    exact prompt ids where the source gives them.
    """

    index: int
    prompt_len: int
    output_len: int
    prompt: str | None = None
    arrival: float | None = None
    prefix_id: str | None = None
    prefix_len: int = 0
    prefix_text: str | None = None
    block_hashes: tuple[int, ...] = ()
    conversation: str | None = None
    offset: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Workload:
    """Requests ready to serve and an account of where they came from.

    `kept` and `dropped` (by reason) count the rows of the source that were looked at; `requests` may repeat kept rows
    when more were asked for. `source` is one line for people; `synthetic` is true when lengths were drawn from a fit.
    """

    name: str
    source: str
    synthetic: bool
    requests: tuple[TraceRequest, ...]
    kept: int
    dropped: Mapping[str, int]
    tokenizer: str
    notes: tuple[str, ...] = ()

    @property
    def has_arrivals(self) -> bool:
        """Whether every request carries the trace's own arrival time."""
        return bool(self.requests) and all(r.arrival is not None for r in self.requests)

    @property
    def label(self) -> str:
        """The name for figures and tables; says so when the set is synthetic."""
        return f"{self.name} (synthetic)" if self.synthetic else self.name


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """How a workload is cut and drawn; None means the named set's own default.

    `filter`: `paper` (input + output < 2048), `vllm` (both >= 4, prompt <= 1024, sum <= 2048) or `none`.
    `shots`: examples in the translation prefix (0, 1, 5). `new_conversation`: chance that a chat arrival starts a new
    conversation. `history`, `max_output`: chat's cuts in tokens (paper 6.5). `paper_means`: scale a synthetic set to
    the means that the paper prints. `max_total`: drop requests longer than this (the model's positions).
    `default_output`: output tokens of prompt rows that name none. `synthetic`: go straight to the shipped set.
    `offline`: never touch the network. `text`: make prompt text for synthetic sets. `hub_root`: a folder
    `<owner>/<name>/...` read in place of the Hugging Face Hub.
    """

    filter: Filter | None = None
    shots: int | None = None
    new_conversation: float = 0.5
    history: int = 1024
    max_output: int = 1016
    paper_means: bool | None = None
    max_total: int | None = None
    default_output: int = 128
    synthetic: bool = False
    offline: bool = False
    text: bool = True
    hub_root: Path | None = None

    def __post_init__(self) -> None:
        if self.filter is not None and self.filter not in FILTERS:
            raise UsageError(f"filter = {self.filter!r}: must be one of {', '.join(FILTERS)}")
        if self.shots is not None and self.shots not in SHOT_TOKENS:
            raise UsageError(f"shots = {self.shots}: must be one of {', '.join(map(str, SHOT_TOKENS))}")
        if not 0 < self.new_conversation <= 1:
            raise UsageError(f"new_conversation = {self.new_conversation}: must be above 0 and at most 1")
        for name in ("history", "max_output", "default_output", "max_total"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} = {value}: must be at least 1 token")


@dataclass(frozen=True, slots=True)
class HubSource:
    """Where a named set lives on the Hugging Face Hub: repository, files within it, split."""

    repo: str
    data_files: str
    split: str


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A named set: its defaults, its home and the figures published for it."""

    name: str
    title: str
    kind: Kind
    about: str
    sample: str
    filter: Filter = "none"
    shots: int = 0
    paper_means: bool = False
    hub: HubSource | None = None
    paper: Mapping[str, float] = field(default_factory=dict)

    @property
    def shuffled(self) -> bool:
        """Whether rows are drawn in random order; a trace keeps its own."""
        return self.kind != "trace"


def _spec(data: Mapping[str, Any]) -> list[WorkloadSpec]:
    plain = {k: v for k, v in data.items() if k not in ("hub", "variants")}
    hub = HubSource(**data["hub"]) if "hub" in data else None
    base = WorkloadSpec(hub=hub, **plain)
    variants = data.get("variants", {})
    return [base, *(replace(base, name=name, **changes) for name, changes in variants.items())]


@cache
def specs() -> Mapping[str, WorkloadSpec]:
    """All named sets by name, in the order of their files."""
    found: dict[str, WorkloadSpec] = {}
    folder = files("pagedcli.workloads") / "specs"
    for path in sorted(folder.iterdir(), key=lambda item: item.name):
        if path.name.endswith(".toml"):
            for spec in _spec(tomllib.loads(path.read_text(encoding="utf-8"))):
                found[spec.name] = spec
    return found


def find_spec(name: str) -> WorkloadSpec:
    """The named set, or a UsageError that lists the names."""
    try:
        return specs()[name]
    except KeyError:
        raise UsageError(f"--workload = {name!r}: no such workload; known are {', '.join(specs())} "
                         "(or give a file with --trace or --prompts)") from None
