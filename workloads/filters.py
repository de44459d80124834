"""Which rows of a source are kept, and why the others are not."""

from __future__ import annotations

from pagedcli.workloads.spec import PAPER_MAX_TOTAL, Filter

VLLM_LEAST = 4
VLLM_MAX_PROMPT = 1024
VLLM_MAX_TOTAL = 2048


def reason_to_drop(prompt_len: int, output_len: int, rule: Filter, max_total: int | None) -> str | None:
    """Why a request of these lengths (tokens) is left out under a filter, or None when it is kept.

    `paper`: input + output < 2048 (authors' artefact). `vllm`: the later rule of vLLM's benchmark. `max_total` is
    the longest request that the model can hold.
    """
    total = prompt_len + output_len
    if prompt_len < 1:
        return "empty prompt"
    if output_len < 1:
        return "no output tokens"
    if rule == "paper" and total > PAPER_MAX_TOTAL:
        return f"paper filter: prompt + output >= {PAPER_MAX_TOTAL + 1}"
    if rule == "vllm":
        if prompt_len < VLLM_LEAST or output_len < VLLM_LEAST:
            return f"vLLM filter: prompt or output < {VLLM_LEAST}"
        if prompt_len > VLLM_MAX_PROMPT:
            return f"vLLM filter: prompt > {VLLM_MAX_PROMPT}"
        if total > VLLM_MAX_TOTAL:
            return f"vLLM filter: prompt + output > {VLLM_MAX_TOTAL}"
    if max_total is not None and total > max_total:
        return f"longer than the model's {max_total} positions"
    return None
