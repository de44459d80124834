"""Mixture-of-experts layers on a CPU, with each expert's rows padded so that routing does not change a row's bits.

Which tokens meet in one expert depends on the whole batch, so padding the batch (flat_batch.py) does not reach the
matrix products inside. transformers looks the experts' function up by name, as it does attention's, so ours is
registered there.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from pagedcli.execution.flat_batch import ROW_TILE

EXPERTS_NAME = "pagedcli"


def tiled_experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """hidden [T, width], chosen [T, k] expert ids, weights [T, k] -> [T, width], the weighted sum over k in its order.

    `module` is any experts layer of transformers: its attributes say how its weights lie.
    """
    tokens, per_token = chosen.shape
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=module.num_experts).tolist()
    out = hidden.new_zeros(tokens * per_token, hidden.shape[1])
    end = 0
    for expert, count in enumerate(counts[:module.num_experts]):
        begin, end = end, end + count
        if count == 0:
            continue
        places = order[begin:end]
        rows = hidden.new_zeros(-(-count // ROW_TILE) * ROW_TILE, hidden.shape[1])
        rows[:count] = hidden[places // per_token]
        up = "gate_up_proj" if module.has_gate else "up_proj"
        inner = _project(module, up, expert, rows)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        result = _project(module, "down_proj", expert, inner)
        if module.has_post_expert_norm:
            result = module.post_expert_norm(result)
        out[places] = (result[:count] * weights.reshape(-1)[places, None]).to(out.dtype)
    return out.view(tokens, per_token, -1).sum(dim=1)


def _project(module: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return torch.nn.functional.linear(rows, weight.t() if module.is_transposed else weight, bias)


ExpertsInterface.register(EXPERTS_NAME, tiled_experts)


def tile_experts(model: PreTrainedModel) -> bool:
    """Make a model on a CPU use `tiled_experts`; False when it has no experts that can be told to."""
    if model.device.type != "cpu" or not any(hasattr(part, "has_post_expert_norm") for part in model.modules()):
        return False
    model.config._experts_implementation = EXPERTS_NAME
    return True
