"""From a name or a file to a workload: finds the source, counts tokens, filters, and says what it used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pagedcli.core.errors import UsageError
from pagedcli.workloads import chat, hub, synthetic
from pagedcli.workloads.filters import reason_to_drop
from pagedcli.workloads.readers import Row, Table, read_table
from pagedcli.workloads.spec import (
    Kind,
    TraceRequest,
    Workload,
    WorkloadOptions,
    WorkloadSpec,
    find_spec,
)
from pagedcli.workloads.streams import Purpose, generator
from pagedcli.workloads.tokens import estimate_tokens
from pagedcli.workloads.traces import conversations_from_lengths

CountTokens = Callable[[str], int]
ESTIMATE = "estimate (no tokenizer given)"


@dataclass
class _Tally:
    """Rows looked at so far."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    counted_text: bool = False


def load_workload(name: str | None = None, *, trace: Path | None = None, prompts: Path | None = None,
                  num_requests: int | None = None, seed: int = 0, count_tokens: CountTokens | None = None,
                  tokenizer: str = "", options: WorkloadOptions | None = None) -> Workload:
    """Makes the requests of a named set or of a user's file.

    A named set comes from the first of: `trace`, the Hugging Face cache, the Hub (one short look; skipped off line),
    the shipped synthetic set. `prompts` is a file in the user's own order. `num_requests` None takes all rows (1,000
    of a synthetic set); more than there are repeats the rows. `count_tokens` counts the tokens of a text, `tokenizer`
    names it; without it tokens are estimated and `Workload.tokenizer` says so.

    Raises UsageError for an unknown name, a bad file (naming file, line and field), or when no row is left.
    """
    options = options or WorkloadOptions()
    if num_requests is not None and num_requests < 1:
        raise UsageError(f"--num-requests = {num_requests}: must be at least 1")
    if trace is not None and prompts is not None:
        raise UsageError("--trace and --prompts both name the rows: give one of them")
    job = _Job(num_requests, seed, count_tokens, tokenizer or "given tokenizer", options)
    if prompts is not None or trace is not None:
        path = prompts or trace
        assert path is not None
        table = read_table(path)
        spec = find_spec(name) if name is not None else _spec_of(table)
        return job.from_table(spec, table, f"{spec.name}: local file {path.name} ({table.format.title})",
                              ordered=prompts is not None)
    if name is None:
        raise UsageError("no workload given: name one with --workload, or give a file with --trace or --prompts")
    spec = find_spec(name)
    found, notes = (None, ()) if options.synthetic else _real(spec, options)
    if found is not None:
        table, where = found
        return replace(job.from_table(spec, table, f"{spec.name}: {where}", ordered=False), notes=notes)
    return job.synthetic(spec, notes)


def _spec_of(table: Table) -> WorkloadSpec:
    """A stand-in for a user's file that names no set: no filter, file order for traces and prompts."""
    kind: Kind = "pairs" if table.format.content in ("conversations", "text") else "trace"
    return WorkloadSpec(name=Path(table.name).stem, title=table.format.title, kind=kind, about="", sample="")


def _real(spec: WorkloadSpec, options: WorkloadOptions) -> tuple[tuple[Table, str] | None, tuple[str, ...]]:
    """The real rows of a named set from cache or Hub, or notes that say in one line each why not."""
    if spec.hub is None:
        return None, (f"{spec.name} has no public copy on the Hub: give its file with --trace for the real one",)
    if options.hub_root is not None:
        return (hub.from_hub(spec.hub, options.hub_root, options.hub_root / ".cache"),
                f"{spec.hub.repo} in {options.hub_root.name}"), ()
    found = hub.cached(spec.hub)
    if found is not None:
        return found, ()
    variable = hub.offline_by_environment()
    if options.offline or variable:
        why = f"{variable} is set" if variable else "off line as asked"
        return None, (f"{spec.hub.repo} is not in the Hugging Face cache and {why}",)
    fault = hub.reachable()
    if fault is not None:
        return None, (f"Hugging Face Hub not reachable ({fault}), {spec.hub.repo} is not in the cache",)
    try:
        return (hub.from_hub(spec.hub), f"Hugging Face Hub: {spec.hub.repo}"), ()
    except Exception as error:  # whatever goes wrong in a download, the shipped set stands in and the note says so
        return None, (f"{spec.hub.repo} could not be loaded from the Hub ({type(error).__name__}: "
                      f"{str(error).splitlines()[0] if str(error) else 'no message'})",)


@dataclass(frozen=True)
class _Job:
    """One call of `load_workload`."""

    count: int | None
    seed: int
    count_tokens: CountTokens | None
    tokenizer: str
    options: WorkloadOptions

    def from_table(self, spec: WorkloadSpec, table: Table, source: str, ordered: bool) -> Workload:
        tally = _Tally()
        rows = table.rows()
        notes: list[str] = []
        if spec.kind == "chat":
            requests = self._chat(self._dialogues(table, rows, tally), tally)
        else:
            timed = all(row.arrival is not None for row in rows)
            if timed:
                rows = _from_start(rows)
            elif spec.shuffled and not ordered:
                order = generator(self.seed, Purpose.DATA).permutation(len(rows))
                rows = [rows[int(i)] for i in order]
            requests = self._requests(spec, rows, tally)
        if not requests:
            reasons = ", ".join(f"{n} x {why}" for why, n in tally.dropped.items()) or "no rows"
            raise UsageError(f"{table.name}: no request is left ({reasons}); change the filter or the file")
        if self.count is not None and len(requests) < self.count:
            notes.append(f"{self.count} requests asked of {len(requests)} rows: rows are repeated")
            requests = _repeat(requests, self.count)
        return Workload(spec.name, source, False, tuple(requests), tally.kept, dict(tally.dropped),
                        self._counted_by(tally, table), tuple(notes))

    def _counted_by(self, tally: _Tally, table: Table) -> str:
        if not tally.counted_text:
            return f"lengths given by the {table.format.name} file"
        return self.tokenizer if self.count_tokens is not None else ESTIMATE

    def _count_text(self, text: str, tally: _Tally) -> int:
        tally.counted_text = True
        return self.count_tokens(text) if self.count_tokens is not None else estimate_tokens(text)

    def _requests(self, spec: WorkloadSpec, rows: Sequence[Row], tally: _Tally) -> list[TraceRequest]:
        rule = self.options.filter or spec.filter
        shots = self._shots(spec)
        requests: list[TraceRequest] = []
        for row in rows:
            if self.count is not None and len(requests) >= self.count:
                break
            request, reason = self._request(row, len(requests), tally)
            if reason is None:
                request = synthetic.with_prefix(request, shots)
                reason = reason_to_drop(request.prompt_len, request.output_len, rule, self.options.max_total)
            if reason is not None:
                tally.dropped[reason] += 1
            else:
                requests.append(request)
        tally.kept = len(requests)
        return requests

    def _shots(self, spec: WorkloadSpec) -> int:
        if spec.kind != "translation":
            return 0
        return spec.shots if self.options.shots is None else self.options.shots

    def _request(self, row: Row, index: int, tally: _Tally) -> tuple[TraceRequest, str | None]:
        prompt_len, output_len = row.prompt_len, row.output_len
        if row.drop is None:
            if prompt_len < 0 and row.prompt is not None:
                prompt_len = self._count_text(row.prompt, tally)
            if output_len < 0:
                output_len = (self.options.default_output if row.output is None
                              else self._count_text(row.output, tally))
        return TraceRequest(index=index, prompt_len=prompt_len, output_len=output_len, prompt=row.prompt,
                            arrival=row.arrival, block_hashes=row.block_hashes, token_ids=row.token_ids), row.drop

    def _dialogues(self, table: Table, rows: list[Row], tally: _Tally) -> Iterator[chat.Conversation]:
        """Conversations of a file, in random order: dialogues with text, or a table of growing histories."""
        if table.format.name == "vidur":
            split = conversations_from_lengths([(r.prompt_len, r.output_len) for r in rows])
            for i in generator(self.seed, Purpose.DATA).permutation(len(split)):
                turns = tuple(chat.Turn(q, a) for q, a in split[int(i)] if q > 0 and a > 0)
                if turns:
                    tally.kept += 1
                    yield chat.Conversation(f"{table.name}-{i}", turns)
            return
        if table.format.content != "conversations":
            raise UsageError(f"{table.name}: the chat workload needs whole conversations (ShareGPT JSON or a table of "
                             f"num_prefill_tokens, num_decode_tokens), this is {table.format.title}")
        for i in generator(self.seed, Purpose.DATA).permutation(len(rows)):
            pairs = chat.pair_turns(rows[int(i)].turns)
            if not pairs:
                tally.dropped["no answered query"] += 1
                continue
            tally.kept += 1
            yield chat.Conversation(f"{i}-{rows[int(i)].name}", tuple(
                chat.Turn(self._count_text(q, tally), self._count_text(a, tally), q, a) for q, a in pairs))

    def _chat(self, dialogues: Iterator[chat.Conversation], tally: _Tally) -> list[TraceRequest]:
        rng = generator(self.seed, Purpose.CONVERSATIONS)
        found = chat.schedule(dialogues, self.count, self.options, rng)
        requests: list[TraceRequest] = []
        for request in found:
            reason = reason_to_drop(request.prompt_len, request.output_len, self.options.filter or "none",
                                    self.options.max_total)
            if reason is not None:
                tally.dropped[reason] += 1
            else:
                requests.append(replace(request, index=len(requests)))
        return requests

    def synthetic(self, spec: WorkloadSpec, notes: tuple[str, ...]) -> Workload:
        count = self.count or synthetic.DEFAULT_REQUESTS
        scale = spec.paper_means if self.options.paper_means is None else self.options.paper_means
        tally = _Tally()
        if spec.kind == "chat":
            job = replace(self, count=count)
            requests = job._chat(synthetic.conversations(spec, self.seed, self.options), tally)
        else:
            reserve = replace(self.options, max_total=None if self.options.max_total is None
                              else self.options.max_total - synthetic.prefix_reserve(self._shots(spec)))
            rows = (synthetic.trace_rows(spec, count, self.seed, reserve) if spec.kind == "trace"
                    else synthetic.pair_rows(spec, count, self.seed, reserve, scale))
            requests = self._requests(spec, rows, tally)
        if len(requests) < count:
            raise UsageError(f"{spec.name}: only {len(requests)} of {count} synthetic requests fit "
                             f"max_total = {self.options.max_total} tokens; use a model with more positions")
        return Workload(spec.name, f"{spec.name}: {synthetic.describe(spec, scale)}", True, tuple(requests),
                        len(requests), dict(tally.dropped), "lengths of the fit", notes)


def _from_start(rows: list[Row]) -> list[Row]:
    """Timed rows in order of arrival, the earliest at 0 s."""
    ordered = sorted(rows, key=lambda row: row.arrival or 0.0)
    first = ordered[0].arrival or 0.0
    return [replace(row, arrival=(row.arrival or 0.0) - first) for row in ordered]


def _repeat(requests: list[TraceRequest], count: int) -> list[TraceRequest]:
    """The rows over and over up to `count`; a trace's times go on after one mean gap."""
    times = np.array([0.0 if r.arrival is None else r.arrival for r in requests])
    span = float(times[-1] - times[0])
    period = span + (span / (len(times) - 1) if len(times) > 1 else 0.0)
    out: list[TraceRequest] = []
    while len(out) < count:
        lap = len(out) // len(requests)
        for request in requests[:count - len(out)]:
            arrival = None if request.arrival is None else request.arrival + lap * period
            out.append(replace(request, index=len(out), arrival=arrival))
    return out
