"""Chooses the next token of every row of a step: greedy, random, n samples at once, beams; and log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

import numba
import numpy as np

from pagedcli.attention.host_arrays import as_array, as_tensor, host_floats
from pagedcli.core.errors import CannotRunError
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.request import Request
from pagedcli.core.sequence import Sequence, SequenceGroup, TokenChoice
from pagedcli.core.wording import counted
from pagedcli.engine import draw_kernels
from pagedcli.engine import row_kernels as kernels
from pagedcli.engine.beam import BeamState
from pagedcli.engine.interface import Choices, Sampler
from pagedcli.engine.logits import (
    BadWords,
    TokenCounts,
    check_request,
    encode_bad_words,
    needs_processing,
    process,
)
from pagedcli.engine.logprobs import SPILL_BYTES, PromptLogprobs, TopLogprobs, token_logprob, top_logprobs
from pagedcli.engine.pieces import StopSpelling
from pagedcli.engine.row_stats import RowStats
from pagedcli.engine.step_work import Work, samples_of, sort_out
from pagedcli.engine.streams import StreamKey, stream_key, uniforms


class _Buffer:
    """Memory for rows, kept from step to step: touching fresh pages costs as much as all the arithmetic."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)

    def rows(self, count: int, width: int) -> np.ndarray:
        """[count, width] float32, holding anything."""
        if self._memory.size < count * width:
            self._memory = np.empty(count * width, np.float32)
        return self._memory[:count * width].reshape(count, width)


class HostSampler(Sampler):
    """Draws from logits that an executor computed, in this machine's memory (an array, or a tensor on any device).

    Each row is decided by itself: greedy rows take the first maximum; others invert the cumulative distribution at one
    uniform number that is a function of (seed, request key, sample, position) only. So no choice depends on the batch.

    `seed` serves requests that bring none. `eos_ids` and `tokenizer` (with `.backend`) serve min_tokens, bad words and
    beams. Prompt log-probabilities of one request beyond `spill_bytes` go to a temporary file.
    """

    def __init__(
        self, seed: int = 0, *, eos_ids: Items[int] = (), tokenizer: Any = None, spill_bytes: int = SPILL_BYTES,
    ) -> None:
        self._seed = seed
        self._eos_ids = tuple(eos_ids)
        self._tokenizer = tokenizer
        self._spill_bytes = spill_bytes
        self._keys: dict[int, StreamKey] = {}
        self._counts: dict[int, TokenCounts] = {}
        self._stop_spelling: StopSpelling | None = None
        self._bad_words: dict[tuple[str, ...], BadWords] = {(): ()}
        self._values, self._copies = _Buffer(), _Buffer()
        self._scratch = np.empty((0, 4, 0), np.float32)
        self._scratch_ids = np.empty((0, 0), np.int64)

    def check(self, request: Request, vocab_size: int) -> None:
        """Raises RequestError when a field does not fit this model's vocabulary or needs a tokenizer it lacks."""
        check_request(request, vocab_size, self._tokenizer is not None)

    def choose(self, plan: StepPlan, result: StepResult, sequences: Mapping[int, Sequence]) -> Choices:
        """See `Sampler.choose`. Raises CannotRunError when logits hold NaN, naming the request."""
        if not plan.num_logit_rows:
            return {}
        if result.logits is None:
            raise CannotRunError("this executor computes no logits, so tokens cannot be sampled; use scripted tokens")
        return self._decide(self._plain(result.logits), sort_out(plan, sequences))

    def _decide(self, values: np.ndarray, work: Work) -> dict[int, list[TokenChoice]]:
        """Choices for rows [rows, vocabulary] float32 in this machine's memory."""
        choices: dict[int, list[TokenChoice]] = {}
        if work.prompts:
            self._score_prompts(values, work.prompts)
        if work.rows:
            self._sample(values, work.rows, work.owners, choices)
        for members in work.beams.values():
            choices.update(self._search(values, members))
        return choices

    def forked(self, parent: int, child: int) -> None:
        counts = self._counts.get(parent)
        if counts is not None:
            self._counts[child] = counts.copy()

    def forget(self, seq: int) -> None:
        self._keys.pop(seq, None)
        self._counts.pop(seq, None)

    def _score_prompts(self, values: np.ndarray, prompts: list[tuple[int, Sequence, int]]) -> None:
        fresh = []
        for row, seq, position in prompts:
            group = seq.group
            if group.prompt_logprobs is None:
                assert group.params.prompt_logprobs is not None
                group.prompt_logprobs = PromptLogprobs(group.request.prompt, group.params.prompt_logprobs,
                                                       values.shape[1], self._spill_bytes)
            if not group.prompt_logprobs.has(position):
                fresh.append((row, seq, position))
        stats = RowStats.of(values, [row for row, _, _ in fresh])
        stats.refuse_bad([seq for _, seq, _ in fresh], "from the model")
        for place, (_, seq, position) in enumerate(fresh):
            seq.group.prompt_logprobs.put(position, stats.row(place), stats.peaks[place], float(stats.log_sum[place]))

    def _sample(
        self, values: np.ndarray, rows: list[int], owners: list[Sequence], choices: dict[int, list[TokenChoice]]
    ) -> None:
        raw = RowStats.of(values, rows)
        raw.refuse_bad(owners, "from the model")
        changed = [place for place, seq in enumerate(owners)
                   if needs_processing(seq.group.params, seq.output_len)]
        altered = self._altered(values, [rows[place] for place in changed], [owners[place] for place in changed])
        where = dict(zip(changed, range(len(changed)), strict=True))

        drawn: dict[int, list[int]] = {}
        for source, stats, places in ((raw, raw, [p for p in range(len(rows)) if p not in where]),
                                      (altered, altered, changed)):
            jobs: list[tuple[int, int, int]] = []  # (place among all rows, place in stats, sample)
            best = stats.best.tolist()
            for place in places:
                seq, at = owners[place], where.get(place, place)
                if seq.group.params.greedy:
                    drawn[place] = [best[at]]
                else:
                    jobs += [(place, at, sample) for sample in samples_of(seq)]
            if jobs:
                self._draw(source, jobs, owners, drawn)
        picked = [drawn[place] for place in range(len(rows))]
        scored = iter(raw.logprobs(picked))
        for place, seq in enumerate(owners):
            wanted, many = seq.group.params.logprobs, len(picked[place]) > 1
            choices[seq.id] = [
                TokenChoice(
                    seq.id, token, next(scored),
                    None if wanted is None else top_logprobs(raw.row(place), raw.peaks[place],
                                                             float(raw.log_sum[place]), wanted, token),
                    sample if many else None)
                for sample, token in enumerate(picked[place])]

    def _altered(self, values: np.ndarray, rows: list[int], owners: list[Sequence]) -> RowStats:
        """Processed copies of some rows, with their statistics."""
        copies = self._copies.rows(len(rows), values.shape[1])
        if rows:
            np.take(values, rows, 0, out=copies)
            process(copies, owners, [self._history(seq) for seq in owners],
                    [self._words(seq) for seq in owners], self._eos_ids)
        stats = RowStats.of(copies, range(len(rows)))
        stats.refuse_bad(owners, "after logit_bias, bad_words, min_tokens and penalties")
        return stats

    def _draw(
        self, rows: RowStats, jobs: list[tuple[int, int, int]], owners: list[Sequence], drawn: dict[int, list[int]]
    ) -> None:
        seqs = [owners[place] for place, _, _ in jobs]
        params = [seq.group.params for seq in seqs]
        at = np.array([at for _, at, _ in jobs], np.int64)
        tokens = np.empty(len(jobs), np.int64)
        uniform = uniforms([self._key(seq) for seq in seqs], [sample for _, _, sample in jobs],
                           [seq.output_len for seq in seqs])
        knobs = np.array([(item.temperature, item.top_k, item.top_p, item.min_p, 0.0) for item in params])
        knobs[:, 4] = uniform
        width = rows.values.shape[1]
        scratch, ids = self._room(width)
        run = draw_kernels.draw_rows_threads if len(jobs) * width >= kernels.THREAD_ENTRIES else draw_kernels.draw_rows
        run(rows.values, rows.index[at], at, rows.best, rows.peaks, rows.sums, knobs, scratch, ids, tokens)
        for (place, _, _), token in zip(jobs, tokens.tolist(), strict=True):
            drawn.setdefault(place, []).append(token)

    def _search(self, values: np.ndarray, members: list[tuple[int, Sequence]]) -> dict[int, list[TokenChoice]]:
        """One step of a group's beams; all of its live sequences are here at once."""
        rows, live = [row for row, _ in members], [seq for _, seq in members]
        group = live[0].group
        if len(live) != len(group.live):
            raise CannotRunError(f"request {group.request.key!r}: a step computed {len(live)} of its "
                                 f"{counted(len(group.live), 'beam')}; they can only be "
                                 "compared together", "internal")
        if group.beam is None:
            group.beam = BeamState(group, self._eos_ids, group.max_output, self._spelling(group))
        raw = RowStats.of(values, rows)
        raw.refuse_bad(live, "from the model")
        log_probs = (values[rows] - raw.log_sum[:, None]).astype(np.float32)
        if needs_processing(group.params, live[0].output_len):
            process(log_probs, live, [self._history(seq) for seq in live], [self._words(seq) for seq in live],
                    self._eos_ids, words_reach_prompt=True)
        wanted = group.params.logprobs

        def details(place: int, token: int) -> tuple[float, TopLogprobs | None]:
            row, log_sum = raw.row(place), float(raw.log_sum[place])
            top = None if wanted is None else top_logprobs(row, raw.peaks[place], log_sum, wanted, token)
            return token_logprob(row[token], log_sum), top

        state: BeamState = group.beam
        return state.step(live, log_probs, details)

    def _spelling(self, group: SequenceGroup) -> StopSpelling | None:
        if group.params.stop and self._stop_spelling is None:
            self._stop_spelling = StopSpelling(self._tokenizer.backend)
        return self._stop_spelling

    def _plain(self, logits: Any) -> np.ndarray:
        """Rows as float32 in this machine's memory: the same code and the same bits then choose for every device."""
        if isinstance(logits, np.ndarray):
            return host_floats(logits)
        if str(logits.dtype) == "torch.float32" and logits.device.type == "cpu" and logits.is_contiguous():
            return as_array(logits)
        values = self._values.rows(*logits.shape)
        as_tensor(values).copy_(logits)
        return values

    def _room(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        threads = numba.get_num_threads()
        if self._scratch.shape != (threads, 4, width):
            self._scratch = np.empty((threads, 4, width), np.float32)
            self._scratch_ids = np.empty((threads, width), np.int64)
        return self._scratch, self._scratch_ids

    def _key(self, seq: Sequence) -> StreamKey:
        key = self._keys.get(seq.id)
        if key is None:
            seed = seq.group.params.seed
            key = stream_key(self._seed if seed is None else seed, seq.group.request.key)
            self._keys[seq.id] = key
        return key

    def _history(self, seq: Sequence) -> TokenCounts | None:
        """Counts up to date for a penalised sequence; rebuilt when missing."""
        if not seq.group.params.penalised:
            return None
        counts = self._counts.get(seq.id)
        if counts is None or counts.taken > seq.output_len:
            counts = TokenCounts(np.unique(np.array(seq.group.request.prompt, np.int64)))
            self._counts[seq.id] = counts
        counts.take(seq.tokens[seq.prompt_len + counts.taken:])
        return counts

    def _words(self, seq: Sequence) -> BadWords:
        words = seq.group.params.bad_words
        if words not in self._bad_words:
            self._bad_words[words] = encode_bad_words(self._tokenizer.backend, words)
        return self._bad_words[words]
