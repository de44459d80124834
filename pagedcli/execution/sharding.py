"""Splitting a loaded model among ranks, Megatron fashion (Shoeybi et al. 2019): columns first, rows after.

Which products are split how comes from the tensor-parallel plan that transformers ships for a model type; OPT and GPT-2
have none, so theirs are here. A rank's part of an attention layer is whole heads, and its KV cache holds only those.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pagedcli.attention.interface import LayerSpec
from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.core.wording import counted, form

OWN_PLANS: Mapping[str, Mapping[str, str]] = {
    "opt": {
        "decoder.layers.*.self_attn.q_proj": "colwise", "decoder.layers.*.self_attn.k_proj": "colwise",
        "decoder.layers.*.self_attn.v_proj": "colwise", "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise", "decoder.layers.*.fc2": "rowwise",
    },
    "gpt2": {
        "h.*.attn.c_attn": "colwise_qkv", "h.*.attn.c_proj": "rowwise", "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
}
"""Model type -> how each product of its base model is split. `colwise_qkv`: three column splits side by side."""

REPLICATED = frozenset({"replicated_with_grad_allreduce"})
LOCAL_COUNTS = ("num_heads", "split_size")
"""Attributes of attention modules that reshape by them and must count this rank's part (OPT's and GPT-2's)."""


class Exchange(Protocol):
    """How ranks put their parts together; `rank` is from 0 to `size` - 1."""

    rank: int
    size: int

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, on every rank, of the same shape and dtype."""

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts [..., width] side by side on rank 0; elsewhere the rank's own part."""


class RowSplit(nn.Module):
    """A product whose inner dimension is split: each rank multiplies its part, and the parts are added up.

    `weight` is [out, in of this rank]; the bias is added once, after the sum.
    """

    bias_in_part = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange) -> None:
        super().__init__()
        self.weight = _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)
        self._exchange = exchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(nn.functional.linear(x, self.weight))

    def combine(self, part: torch.Tensor) -> torch.Tensor:
        """The whole product from this rank's part, on every rank."""
        whole = self._exchange.total(part)
        return whole if self.bias is None else whole + self.bias


class VocabularySplit(nn.Module):
    """The output head with its rows (words) split: logits are whole on rank 0 and this rank's part elsewhere.

    Every rank holds ceil(vocabulary / ranks) rows, the last ones filled up with zeros, so that parts are of one size.
    """

    bias_in_part = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange) -> None:
        super().__init__()
        self.words = len(weight)
        self.width = -(-self.words // exchange.size)
        self._exchange = exchange
        self.weight = _parameter(self._mine(weight))
        self.bias = None if bias is None else _parameter(self._mine(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(nn.functional.linear(x, self.weight, self.bias))

    def combine(self, part: torch.Tensor) -> torch.Tensor:
        return self._cut(self._exchange.gather(part))

    def seen(self, logits: torch.Tensor) -> torch.Tensor:
        """What this rank's forward returns of whole logits [..., vocabulary]."""
        if self._exchange.rank == 0:
            return logits
        first = self._exchange.rank * self.width
        return logits[..., first:first + self.width]

    def _cut(self, logits: torch.Tensor) -> torch.Tensor:
        """Without the columns of words that do not exist."""
        held = self.words
        if self._exchange.rank > 0:
            held = min(self.width, max(self.words - self._exchange.rank * self.width, 0))
        return logits[..., :held]

    def _mine(self, values: torch.Tensor) -> torch.Tensor:
        first = self._exchange.rank * self.width
        part = values[first:first + self.width]
        filled = values.new_zeros((self.width, *values.shape[1:]))
        filled[:len(part)] = part
        return filled


def check_heads(heads: int, kv_heads: int, size: int, name: str) -> None:
    """UsageError, with the sizes that work, unless both counts divide among `size` ranks."""
    if heads % size == 0 and kv_heads % size == 0:
        return
    good = [str(n) for n in range(1, min(heads, kv_heads) + 1) if heads % n == 0 and kv_heads % n == 0]
    count, kind = (heads, "query head") if heads % size else (kv_heads, "key/value head")
    raise UsageError(f"--tensor-parallel-size = {size}: the {counted(count, kind)} of {name} "
                     f"{form(count, 'does', 'do')} not divide among {size} ranks; with {heads} query and "
                     f"{kv_heads} key/value heads these sizes work: {', '.join(good)}",
                     "heads_indivisible")


def check_layers(specs: Sequence[LayerSpec], size: int, name: str) -> None:
    """UsageError unless the heads of every layer divide among `size` ranks."""
    for spec in specs:
        check_heads(spec.heads, spec.kv_heads, size, name)


def split_plan(module: PreTrainedModel) -> Mapping[str, str]:
    """How each product of the base model is split: pattern of module names -> kind.

    CannotRunError, by type and reason, for models that have no plan or one with kinds of splits that are not done here.
    """
    config = module.config
    found = OWN_PLANS.get(config.model_type) or getattr(config, "base_model_tp_plan", None)
    if not found:
        raise CannotRunError(f"models of type {config.model_type!r} have no tensor-parallel plan, so they run on one "
                             "rank only: leave --tensor-parallel-size out", "no_split")
    odd = sorted(set(found.values()) - REPLICATED - {"colwise", "rowwise", "colwise_qkv"})
    if odd:
        raise CannotRunError(f"the tensor-parallel plan of type {config.model_type!r} asks for {', '.join(odd)}, and "
                             "only plain column and row splits are done here: leave --tensor-parallel-size out",
                             "no_split")
    return found


def split_model(module: PreTrainedModel, exchange: Exchange) -> VocabularySplit:
    """Keep only this rank's part of the products that the plan names, in place; returns the split output head.

    Embeddings and norms stay whole. Raises CannotRunError when a pattern of the plan fits no module.
    """
    plan = split_plan(module)
    base = module.base_model
    names = [name for name, part in base.named_modules() if isinstance(part, (nn.Linear, Conv1D))]
    for pattern, kind in plan.items():
        if kind in REPLICATED:
            continue
        fitting = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not fitting:
            raise CannotRunError(f"type {module.config.model_type!r}: nothing in the model is called {pattern}, which "
                                 "its tensor-parallel plan splits", "no_split")
        for name in fitting:
            parent = base.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], _split(base.get_submodule(name), kind, exchange))
    for part in base.modules():
        if getattr(part, "layer_idx", None) is not None:
            for attribute in LOCAL_COUNTS:
                if isinstance(getattr(part, attribute, None), int):
                    setattr(part, attribute, getattr(part, attribute) // exchange.size)
    head: Any = module.get_output_embeddings()
    split = VocabularySplit(head.weight.detach(), None if head.bias is None else head.bias.detach(), exchange)
    module.set_output_embeddings(split)
    return split


def _split(module: nn.Module, kind: str, exchange: Exchange) -> nn.Module:
    weight, bias = _weight(module)
    rank, size = exchange.rank, exchange.size
    if kind == "rowwise":
        return RowSplit(_part(weight, 1, rank, size), bias, exchange)
    pieces = 3 if kind == "colwise_qkv" else 1
    mine = torch.cat([_part(piece, 0, rank, size) for piece in weight.chunk(pieces)])
    linear = nn.Linear(1, 1, bias=bias is not None, device="meta")
    linear.in_features, linear.out_features = mine.shape[1], mine.shape[0]
    linear.weight = _parameter(mine)
    if bias is not None:
        linear.bias = _parameter(torch.cat([_part(piece, 0, rank, size) for piece in bias.chunk(pieces)]))
    return linear


def _weight(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight as [out, in] and the bias, of a Linear or of GPT-2's transposed kind."""
    held: Any = module
    weight = held.weight.detach()
    return weight.t() if isinstance(module, Conv1D) else weight, None if held.bias is None else held.bias.detach()


def _part(values: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """This rank's part along `dim`. Where it does not divide evenly the first ranks get one more."""
    return values.tensor_split(size, dim)[rank]


def _parameter(values: torch.Tensor) -> nn.Parameter:
    """A copy of its own, so that the whole weight can be let go."""
    return nn.Parameter(values.clone(memory_format=torch.contiguous_format), requires_grad=False)
