"""Tiny random models of many families, saved as folders, and their logits by their own eager attention."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagedcli.attention.host_arrays import as_tensor
from pagedcli.core.config import CacheConfig, ModelConfig
from pagedcli.core.plan import Slice, StepPlan
from pagedcli.execution.loading import load_executor
from pagedcli.execution.model_hub import resolve_model
from pagedcli.execution.torch_executor import TorchExecutor

VOCAB = 97
_SHARED: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                           "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 0,
                           "bos_token_id": 1, "eos_token_id": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "opt": {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 3,
            "num_attention_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 1},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB,
             "scale_attn_by_inverse_layer_idx": True},
    "llama": {**_SHARED, "num_key_value_heads": 2},
    "mistral": {**_SHARED, "num_key_value_heads": 2, "sliding_window": 8},
    "gemma2": {**_SHARED, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24,
               "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
    "qwen3": {**_SHARED, "num_key_value_heads": 2, "head_dim": 16},
    "gpt_oss": {**_SHARED, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "phi": {**_SHARED, "partial_rotary_factor": 0.5},
}
"""Model type -> fields of its config. Windows are shorter than the prompts, heads fewer than the queries."""


def save_model(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A folder with a random fp32 model; weights are large enough for logits to spread, norms and sinks random."""
    config = AutoConfig.for_model(family, **{**CONFIGS.get(family, {}), **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() >= 2:
                value.normal_(0.0, 0.2)
            else:
                value.add_(torch.randn_like(value) * (1.0 if "sink" in name else 0.1))
    model.save_pretrained(folder)
    return folder


def load(folder: Path | str, **model: Any) -> TorchExecutor:
    """An executor over `folder`; blocks of 4 tokens in fp32 on the reference backend unless told otherwise."""
    settings = {"dtype": "fp32", "attention_backend": "reference", "device": "cpu", "threads": 1, **model}
    cache = CacheConfig(block_size=settings.pop("block_size", 4), num_blocks=settings.pop("num_blocks", 64),
                        swap_space=settings.pop("swap_space", 1 << 20))
    config = ModelConfig(model=str(folder), **settings)
    return load_executor(resolve_model(config), config, cache)


def eager_logits(folder: Path, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits [length, vocabulary] of each prompt alone, by transformers' eager attention in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0] for prompt in prompts]


def shuffled_tables(lengths: Sequence[int], num_blocks: int, block_size: int, seed: int = 0) -> list[list[int]]:
    """Block tables whose ids are scattered over the pool, enough for each length."""
    ids = random.Random(seed).sample(range(num_blocks), num_blocks)
    return [[ids.pop() for _ in range(-(-length // block_size))] for length in lengths]


def run_steps(executor: TorchExecutor, prompts: Sequence[Sequence[int]], tables: Sequence[Sequence[int]],
              steps: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Feed steps[i][s] tokens of sequence s in step i, all rows wanting logits; logits of each sequence's tokens."""
    done = [0] * len(prompts)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in steps:
        slices = [Slice(seq, list(prompts[seq][done[seq]:done[seq] + count]), done[seq], tables[seq], count)
                  for seq, count in enumerate(step) if count]
        logits = as_tensor(executor.execute(StepPlan(slices)).logits).clone()
        for item, rows in zip(slices, logits.split([item.logit_rows for item in slices]), strict=True):
            parts[item.seq].append(rows)
            done[item.seq] += len(rows)
    return [torch.cat(rows) for rows in parts]
