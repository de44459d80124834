"""Greedy ids equal to `transformers` generate, in mixed batches over small shuffled blocks with forced preemption."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedcli.core.config import CacheConfig, ModelConfig, RunConfig, SchedulerConfig
from pagedcli.core.request import Request, SamplingParams
from pagedcli.engine.build import build_engine
from tests.execution.tiny_models import CONFIGS, VOCAB, save_model

OUT = 12


def prompts(seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 3, 9, 17, 30]))] for _ in range(14)]


def expected(folder: Path, rows: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.max_length = None
    results = []
    for row in rows:
        ids = torch.tensor([row])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=OUT)
        results.append(out[0, len(row):].tolist())
    return results


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_greedy_ids_equal(family: str, backend: str, tmp_path: Path) -> None:
    folder, rows = save_model(family, tmp_path / family), prompts()
    config = RunConfig(
        model=ModelConfig(model=str(folder), dtype="fp32", device="cpu", attention_backend=backend, threads=1),
        cache=CacheConfig(block_size=4, num_blocks=24, swap_space=0),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, preemption="recompute"))
    engine = build_engine(config)
    params = SamplingParams(temperature=0, max_tokens=OUT, ignore_eos=True)
    groups = [engine.add(Request(index, str(index), tuple(row), params)) for index, row in enumerate(rows)]
    while engine.has_work():
        engine.step()
        engine.memory.check()
    assert [group.done[0].output_ids for group in groups] == expected(folder, rows)
    assert engine.counters.preempt_recompute > 0, "the pool was meant to be too small for all"
