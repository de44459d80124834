"""What a job has to say at its end, as one record for the screen and for --json-summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pagedcli.core.wording import counted, form
from pagedcli.engine.interface import Counters
from pagedcli.execution.interface import ExecutorLimits
from pagedcli.generate.journal import Journal
from pagedcli.generate.source import Scan


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of one process's work on a job (rows: of the whole job). Times in seconds, shares from 0 to 1.

    `waste`: mean over steps of the pool's shares token, reserved, internal, external, free, adding to 1.
    `sharing_saving`: 1 - 1 / mean over steps of logical / physical blocks (the paper's Figure 15). `prefix_hit_rate`:
    prompt tokens found in the cache over all prompt tokens; `warmed_tokens` were computed on top of these, ahead of the
    rows that share them. `seconds` says where the time went; `total` is all of it.
    """

    rows: int
    good: int
    failed: int
    resumed: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    warmed_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    rows_per_s: float = 0.0
    peak_kv_use: float = 0.0
    peak_kv_blocks: int = 0
    kv_blocks: int = 0
    kv_bytes: int = 0
    waste: Mapping[str, float] = field(default_factory=dict)
    preemptions: Mapping[str, int] = field(default_factory=dict)
    prefix_hit_rate: float = 0.0
    sharing_saving: float = 0.0
    logical_block_steps: int = 0
    physical_block_steps: int = 0
    block_copies: int = 0
    blocks_swapped: int = 0
    peak_memory_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    signature: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)


def summarise(*, rows: int, failed: int, resumed: int, counters: Counters, limits: ExecutorLimits,
              seconds: Mapping[str, float], signature: Mapping[str, Any], notes: tuple[str, ...] = (),
              peak_memory_bytes: int = 0) -> Summary:
    """Totals of a job that an engine has run. `seconds["generate"]` is what rates are taken over."""
    generating = max(seconds.get("generate", 0.0), 1e-9)
    steps = max(counters.steps, 1)
    ratio = counters.sharing_ratio_sum
    return Summary(
        rows=rows, good=rows - failed, failed=failed, resumed=resumed,
        prompt_tokens=counters.prompt_tokens, cached_tokens=counters.cached_tokens,
        warmed_tokens=counters.warmed_tokens,
        output_tokens=counters.output_tokens, steps=counters.steps,
        prompt_tokens_per_s=counters.prompt_tokens / generating,
        output_tokens_per_s=counters.output_tokens / generating, rows_per_s=(rows - resumed) / generating,
        peak_kv_use=counters.peak_used_blocks / max(limits.num_blocks, 1), peak_kv_blocks=counters.peak_used_blocks,
        kv_blocks=limits.num_blocks, kv_bytes=limits.num_blocks * limits.bytes_per_block,
        waste={name: total / steps for name, total in counters.waste_sum.items()},
        preemptions={"recompute": counters.preempt_recompute, "swap": counters.preempt_swap,
                     "swap_fallbacks": counters.swap_fallbacks},
        prefix_hit_rate=counters.cached_tokens / max(counters.prompt_tokens, 1),
        sharing_saving=1 - counters.sharing_ratio_steps / ratio if ratio else 0.0,
        logical_block_steps=counters.logical_block_steps, physical_block_steps=counters.physical_block_steps,
        block_copies=counters.block_copies, blocks_swapped=counters.blocks_swapped,
        peak_memory_bytes=peak_memory_bytes, seconds=dict(seconds), signature=dict(signature), notes=notes)


def fault_note(journal: Journal) -> str | None:
    """How many rows failed and why the first of them did, in one line; None when all are good."""
    if journal.first_failed is None:
        return None
    error = json.loads(journal.row(journal.first_failed))["error"]
    return (f"{journal.failed:,} of {counted(journal.rows, 'row')} failed; the first, row {journal.first_failed}, "
            f"because of {error['code']}: {error['message']}")


def models_note(scan: Scan, model: str) -> str | None:
    """How many rows name another model than the one that answers them, with the first as an example; None when none
    does. A name counts as the model's by its last part, in any case: what follows an owner or lies in a folder."""
    others = {name: found for name, found in scan.models.items() if _last_part(name) != _last_part(model)}
    if not others:
        return None
    count = sum(rows for rows, _ in others.values())
    name, (_, first) = min(others.items(), key=lambda item: item[1][1])
    return (f"{counted(count, 'row')} {form(count, 'names', 'name')} another model (row {first}: "
            f"{json.dumps(name[:80], ensure_ascii=False)}); {model} answers all rows, and their bodies say so")


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()
