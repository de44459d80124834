"""Which parts of a model a rank keeps, checked without any other rank."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.execution.sharding import VocabularySplit, check_heads, split_model, split_plan
from tests.execution.tiny_models import CONFIGS

FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "phi", "opt", "gpt2")


class Alone:
    """One rank of `size` with no others: sums are its own part."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def total(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part


def tiny(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **CONFIGS[family]), dtype=torch.float32)


def products(module: torch.nn.Module) -> int:
    """Elements of the layers' matrices (embeddings, output head and vectors left out)."""
    return sum(value.numel() for name, value in module.base_model.named_parameters()
               if value.dim() == 2 and not any(word in name for word in ("embed", "wte", "wpe")))


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_share_every_product_of_the_layers(family: str) -> None:
    whole = products(tiny(family))
    parts = []
    for rank in range(2):
        module = tiny(family)
        split_model(module, Alone(rank, 2))
        parts.append(products(module))
    assert parts == [whole // 2, whole // 2]


def test_fused_projections_are_split_in_each_of_their_parts() -> None:
    module = tiny("gpt2")
    before = module.transformer.h[0].attn.c_attn.weight.detach().clone()  # [in, 3 * out]
    split_model(module, Alone(1, 2))
    after = module.transformer.h[0].attn.c_attn.weight  # [out of this rank, in]
    assert torch.equal(after, torch.cat([before[:, 16:32], before[:, 48:64], before[:, 80:96]], 1).t())


@pytest.mark.parametrize(("words", "ranks"), [(97, 2), (97, 4), (96, 3), (5, 4)])
def test_parts_of_the_vocabulary_make_the_whole(words: int, ranks: int) -> None:
    weight, x = torch.randn(words, 8), torch.randn(3, 8)
    parts = [VocabularySplit(weight, None, Alone(rank, ranks)) for rank in range(ranks)]
    raw = torch.cat([torch.nn.functional.linear(x, part.weight) for part in parts], -1)
    assert torch.allclose(raw[:, :words], x @ weight.t(), atol=1e-5)
    for part in parts[1:]:
        assert part(x).shape == part.seen(torch.empty(3, words)).shape


@pytest.mark.parametrize(("heads", "kv_heads", "size", "said"), [
    (9, 3, 2, "9 query heads of m do not divide among 2 ranks; with 9 query and 3 key/value heads these sizes work: "
              "1, 3"),
    (32, 8, 16, "8 key/value heads of m do not divide among 16 ranks; with 32 query and 8 key/value heads these sizes "
                "work: 1, 2, 4, 8"),
])
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int, size: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_heads(heads, kv_heads, size, "m")


def test_types_without_a_plan_are_refused_by_name() -> None:
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "gpt_neo", hidden_size=16, num_layers=1, num_heads=2, vocab_size=9, attention_types=[[["global"], 1]]))
    with pytest.raises(CannotRunError, match="'gpt_neo' have no tensor-parallel plan"):
        split_plan(module)
