"""A row's logits are the same bits whatever is computed beside it, however its prompt was cut, wherever blocks lie."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from pagedcli.attention.host_arrays import as_tensor
from pagedcli.core.config import CacheConfig, ModelConfig
from pagedcli.core.plan import Slice, StepPlan
from pagedcli.execution.flat_batch import ROW_TILE
from pagedcli.execution.loading import load_executor
from pagedcli.execution.model_hub import resolve_model
from pagedcli.execution.torch_executor import TorchExecutor

SHAPE = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 2, "num_attention_heads": 9,
         "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 1003, "max_position_embeddings": 256}
OPT = {"model_type": "opt", "hidden_size": 768, "word_embed_proj_dim": 768, "num_hidden_layers": 2,
       "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 1003, "max_position_embeddings": 256}
LENGTH = 45


def executor(tmp_path: Path, shape: dict[str, object], dtype: str, block_size: int, threads: int) -> TorchExecutor:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape))
    config = ModelConfig(model=str(file), load_format="dummy", dtype=dtype, attention_backend="cpu", device="cpu",
                         threads=threads)
    return load_executor(resolve_model(config), config, CacheConfig(block_size=block_size, num_blocks=512))


def logits_of(run: TorchExecutor, tokens: list[int], dice: random.Random | None) -> torch.Tensor:
    """[LENGTH, vocabulary] of `tokens`: whole and alone without dice, else in random chunks among random neighbours."""
    size = run.limits.block_size
    free = list(range(run.limits.num_blocks))
    if dice is not None:
        dice.shuffle(free)
    own = [free.pop() for _ in range(-(-LENGTH // size))]
    rows, done = [], 0
    while done < LENGTH:
        count = LENGTH if dice is None else min(dice.choice((1, 1, 2, 3, 7, 8, 20)), LENGTH - done)
        slices = [Slice(0, tokens[done:done + count], done, own, count)]
        for other in range(0 if dice is None else dice.choice((0, 1, 2, 5, 11, 30))):
            length = dice.randint(1, 40) if other < 4 else 1
            blocks = free[:-(-length // size)]
            free = free[len(blocks):] + blocks
            slices.append(Slice(1 + other, [dice.randrange(1003) for _ in range(length)], 0, blocks,
                                dice.randint(0, length)))
        if dice is not None:
            dice.shuffle(slices)
        logits = as_tensor(run.execute(StepPlan(slices)).logits)
        at = sum(item.logit_rows for item in slices[:[item.seq for item in slices].index(0)])
        rows.append(logits[at:at + count].clone())
        done += count
    return torch.cat(rows)


def check(tmp_path: Path, shape: dict[str, object], dtype: str, threads: int, trials: int) -> None:
    tokens = [random.Random(7).randrange(1003) for _ in range(LENGTH)]
    run = executor(tmp_path, shape, dtype, 16, threads)
    alone = logits_of(run, tokens, None)
    assert alone.float().std() > 0.01
    for seed in range(trials):
        assert torch.equal(logits_of(run, tokens, random.Random(seed)), alone), f"composition {seed}"
    other = executor(tmp_path, shape, dtype, 4, threads)
    assert torch.equal(logits_of(other, tokens, random.Random(3)), alone), "blocks of 4 tokens"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [SHAPE, OPT], ids=["llama", "opt"])
def test_logits_do_not_depend_on_the_batch(shape: dict[str, object], dtype: str, tmp_path: Path) -> None:
    check(tmp_path, shape, dtype, threads=1, trials=3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [SHAPE, OPT], ids=["llama", "opt"])
def test_nor_with_two_threads_in_many_batches(shape: dict[str, object], dtype: str, tmp_path: Path) -> None:
    check(tmp_path, shape, dtype, threads=2, trials=12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "out"), [(576, 192), (576, 1536), (1536, 576), (768, 3072), (200, 37), (32, 97)])
def test_full_row_tiles_make_linear_layers_independent_of_the_row_count(width: int, out: int,
                                                                        dtype: torch.dtype) -> None:
    """The rule that ROW_TILE stands for, by itself; without padding fp32 breaks it on some processors."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(out, width, generator=generator) * 0.05).to(dtype)
    rows = torch.randn(40 * ROW_TILE, width, generator=generator).to(dtype)
    first = torch.nn.functional.linear(rows[:ROW_TILE], weight)
    for tiles in (2, 3, 5, 6, 8, 13, 16, 27, 40):
        some = rows[:tiles * ROW_TILE]
        assert torch.equal(torch.nn.functional.linear(some, weight)[:ROW_TILE], first), tiles
        turned = torch.nn.functional.linear(some.roll(3, 0), weight)
        assert torch.equal(turned[3:3 + ROW_TILE], first), tiles


MIXTRAL = {"model_type": "mixtral", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 192, "vocab_size": 1003, "num_local_experts": 8,
           "num_experts_per_tok": 2, "max_position_embeddings": 256}
GPT_OSS = {**MIXTRAL, "model_type": "gpt_oss", "head_dim": 32, "sliding_window": 16,
           "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [MIXTRAL, GPT_OSS], ids=["mixtral", "gpt_oss"])
def test_nor_on_who_else_went_to_an_expert(shape: dict[str, object], dtype: str, tmp_path: Path) -> None:
    check(tmp_path, shape, dtype, threads=1, trials=3)
