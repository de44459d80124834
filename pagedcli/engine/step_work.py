"""What a step asks of a sampler: which logit row is whose, and for what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagedcli.core.plan import StepPlan
from pagedcli.core.sequence import Sequence


@dataclass(slots=True)
class Work:
    """What one step asks for: logit rows to draw from, with their sequences; rows of beams, by group (its order of
    arrival); rows that score a position of a prompt."""

    rows: list[int] = field(default_factory=list)
    owners: list[Sequence] = field(default_factory=list)
    beams: dict[int, list[tuple[int, Sequence]]] = field(default_factory=dict)
    prompts: list[tuple[int, Sequence, int]] = field(default_factory=list)


def samples_of(seq: Sequence) -> range:
    """Sample numbers to draw for a row: all of them when the prompt's only sequence starts a shared group."""
    group = seq.group
    count = group.params.samples
    if count > 1 and seq.output_len == 0 and len(group.live) == 1:
        return range(count)
    return range(seq.sample, seq.sample + 1)


def sort_out(plan: StepPlan, sequences: Mapping[int, Sequence]) -> Work:
    """Which logit row is whose, and for what."""
    work, row = Work(), 0
    for item in plan.slices:
        if not item.logit_rows:
            continue
        seq = sequences[item.seq]
        params = seq.group.params
        end = item.start + len(item.tokens)
        if params.prompt_logprobs is not None:
            first = end - item.logit_rows + 1  # the position that this slice's first logit row predicts
            work.prompts += [(row + position - first, seq, position)
                             for position in range(max(first, 1), min(end + 1, seq.prompt_len))]
        row += item.logit_rows
        if end == seq.length and params.use_beam_search:
            work.beams.setdefault(seq.group.order, []).append((row - 1, seq))
        elif end == seq.length:
            work.rows.append(row - 1)
            work.owners.append(seq)
    return work
