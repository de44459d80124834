"""Chooses tokens on the device that computed the logits: of a step, only what was chosen comes to the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.sequence import Sequence, TokenChoice
from pagedcli.engine.device_draws import PIECE, Knobs, draw, stats_of
from pagedcli.engine.interface import Choices
from pagedcli.engine.logits import needs_processing, process
from pagedcli.engine.logprobs import token_logprob
from pagedcli.engine.row_stats import RowStats
from pagedcli.engine.sampler import HostSampler
from pagedcli.engine.step_work import Work, samples_of, sort_out
from pagedcli.engine.streams import uniforms

Job = tuple[int, Sequence, int]
"""(logit row, its sequence, sample number)."""


class DeviceSampler(HostSampler):
    """As HostSampler, for logits that lie on a GPU.

    Rows that ask for one token and its log-probability are decided there, and the host waits once, for those. Rows
    that want lists of log-probabilities, prompts to be scored and beams are brought over and decided as ever. A row's
    bits depend on nothing but itself here too; they are not those of a CPU's.
    """

    def choose(self, plan: StepPlan, result: StepResult, sequences: Mapping[int, Sequence]) -> Choices:
        logits: Tensor | None = result.logits
        if logits is None or not plan.num_logit_rows:
            return super().choose(plan, result, sequences)
        work = sort_out(plan, sequences)
        here, rest = _part(work)
        choices: dict[int, list[TokenChoice]] = self._draw_here(logits, here) if here else {}
        needed = sorted({*rest.rows, *(row for row, _, _ in rest.prompts),
                         *(row for members in rest.beams.values() for row, _ in members)})
        if needed:
            on_host = self._plain(logits[torch.tensor(needed, device=logits.device)])
            choices.update(self._decide(on_host, _renumbered(rest, needed)))
        return choices

    def _draw_here(self, logits: Tensor, jobs: list[Job]) -> dict[int, list[TokenChoice]]:
        found = [self._piece(logits, jobs[first:first + PIECE]) for first in range(0, len(jobs), PIECE)]
        table = torch.cat(found).cpu().numpy()[:len(jobs)]   # the wait of a step
        owners = [seq for _, seq, _ in jobs]
        _refuse_bad(owners, table[:, 3], "from the model")
        _refuse_bad(owners, table[:, 4], "after logit_bias, bad_words, min_tokens and penalties")
        choices: dict[int, list[TokenChoice]] = {}
        for (_, seq, sample), (token, logit, log_sum, _, _) in zip(jobs, table.tolist(), strict=True):
            choices.setdefault(seq.id, []).append(
                TokenChoice(seq.id, int(token), token_logprob(logit, log_sum), None, sample))
        return {key: items if len(items) > 1 else [TokenChoice(key, items[0].token, items[0].logprob, None, None)]
                for key, items in choices.items()}

    def _piece(self, logits: Tensor, jobs: list[Job]) -> Tensor:
        """[PIECE, 5] float64 on the device: token, its raw logit, the raw row's log sum, and what is wrong with the
        raw and with the processed row (row_kernels' codes)."""
        padded = [jobs[min(place, len(jobs) - 1)] for place in range(PIECE)]
        raw = logits[torch.tensor([row for row, _, _ in padded], device=logits.device)].float()
        told = stats_of(raw)
        altered, stats = raw, told
        changed = [place for place, (_, seq, _) in enumerate(jobs)
                   if needs_processing(seq.group.params, seq.output_len)]
        if changed:
            altered, owners = raw.clone(), [jobs[place][1] for place in changed]
            where = torch.tensor(changed, device=raw.device)
            some = raw[where]
            process(some, owners, [self._history(seq) for seq in owners], [self._words(seq) for seq in owners],
                    self._eos_ids)
            altered[where] = some
            stats = stats_of(altered)
        tokens = draw(altered, stats, self._knobs(padded, raw))
        codes = [item.not_a_number * 1 + (item.no_mass & ~item.not_a_number) * 2 for item in (told, stats)]
        return torch.stack([tokens.double(), raw.gather(1, tokens[:, None])[:, 0].double(), told.log_sum,
                            *(code.double() for code in codes)], 1)

    def _knobs(self, jobs: list[Job], rows: Tensor) -> Knobs:
        params = [seq.group.params for _, seq, _ in jobs]
        uniform = uniforms([self._key(seq) for _, seq, _ in jobs], [sample for _, _, sample in jobs],
                           [seq.output_len for _, seq, _ in jobs])
        table = np.array([(item.temperature, item.top_k, item.top_p, item.min_p, number, item.greedy)
                          for item, number in zip(params, uniform, strict=True)], np.float64)
        width = rows.shape[1]
        filtered = any(not item.greedy and (item.top_p < 1 or item.min_p > 0 or 0 < item.top_k < width)
                       for item in params)
        columns = torch.from_numpy(table.T.copy()).to(rows.device)
        return Knobs(columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], filtered)


def _refuse_bad(owners: list[Sequence], codes: np.ndarray, when: str) -> None:
    """As RowStats.refuse_bad, by the status codes alone."""
    none = np.empty((0, 0))
    RowStats(none, none, codes.astype(np.int64), none, none, none, none).refuse_bad(owners, when)


def _part(work: Work) -> tuple[list[Job], Work]:
    """What is decided on the device, a job for each token, and the rest."""
    here: list[Job] = []
    rest = Work(beams=work.beams, prompts=work.prompts)
    for row, seq in zip(work.rows, work.owners, strict=True):
        if seq.group.params.logprobs is None:
            here += [(row, seq, sample) for sample in ([seq.sample] if seq.group.params.greedy else samples_of(seq))]
        else:
            rest.rows.append(row)
            rest.owners.append(seq)
    return here, rest


def _renumbered(work: Work, rows: list[int]) -> Work:
    """The same work over logits of which only `rows` were kept, in this order."""
    place = {row: number for number, row in enumerate(rows)}
    return Work([place[row] for row in work.rows], work.owners,
                 {key: [(place[row], seq) for row, seq in members] for key, members in work.beams.items()},
                 [(place[row], seq, position) for row, seq, position in work.prompts])
