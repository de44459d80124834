"""Two ranks compute the tokens of one: with preemption by both means, beams, and shared prefixes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pagedcli.attention.interface import KVLayout, LayerSpec
from pagedcli.core.config import CacheConfig, ModelConfig, RunConfig, SchedulerConfig
from pagedcli.core.errors import UsageError
from pagedcli.core.request import Request, SamplingParams
from pagedcli.engine.build import build_engine
from pagedcli.execution import host_memory, kv_store
from pagedcli.execution.interface import Executor
from pagedcli.execution.loading import load_executor
from pagedcli.execution.model_hub import resolve_model
from pagedcli.execution.ranks import Place
from pagedcli.execution.tensor_parallel import Split, TensorParallelExecutor, _lead, load_tensor_parallel
from tests.execution.tiny_models import VOCAB, save_model

ROOT = Path(__file__).resolve().parents[2]
CACHE = CacheConfig(block_size=4, num_blocks=28, swap_space=1 << 20)
Lead = Callable[[ModelConfig], TensorParallelExecutor]


def settings(folder: Path, size: int) -> ModelConfig:
    return ModelConfig(model=str(folder), dtype="fp32", device="cpu", threads=1, tensor_parallel_size=size)


@pytest.fixture(scope="module")
def lead() -> Iterator[Lead]:
    """Makes executors over two ranks; the second rank is one process that serves them all in turn."""
    peer = subprocess.Popen([sys.executable, "-m", "tests.execution.rank_server"], stdin=subprocess.PIPE, cwd=ROOT)
    assert peer.stdin is not None

    def make(model: ModelConfig) -> TensorParallelExecutor:
        store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=120), wait_for_workers=False)
        place = Place(0, 2, "127.0.0.1", store.port)
        orders = {"model": asdict(model), "cache": asdict(CACHE), "place": asdict(replace(place, rank=1, local=1))}
        peer.stdin.write(json.dumps(orders).encode() + b"\n")
        peer.stdin.flush()
        return _lead(place, store, None, resolve_model(model), model, CACHE)

    try:
        yield make
    finally:
        peer.stdin.close()
        peer.kill()
        peer.wait()


def serve(executor: Executor, preemption: str) -> tuple[list[list[int]], dict[str, int]]:
    """Twelve prompts with a common beginning, every third with beams, in a pool too small for them."""
    config = RunConfig(cache=CACHE, scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32,
                                                              preemption=preemption))
    engine = build_engine(config, executor=executor)
    rng = random.Random(3)
    groups = []
    for index in range(12):
        beams = {"use_beam_search": True, "beam_width": 3} if index % 3 == 0 else {}
        prompt = (5, 6, 7, 8, 9, 10, *(rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 9, 17]))))
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **beams)
        groups.append(engine.add(Request(index, str(index), prompt, params)))
    while engine.has_work():
        engine.step()
        engine.memory.check()
    counters = engine.counters
    return [seq.output_ids for group in groups for seq in group.done], {
        "recompute": counters.preempt_recompute, "swap": counters.preempt_swap, "cached": counters.cached_tokens}


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "mistral",
                                    *(pytest.param(name, marks=pytest.mark.slow)
                                      for name in ("qwen2", "qwen3", "gemma2", "phi"))])
def test_two_ranks_compute_the_tokens_of_one(family: str, lead: Lead, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path / family, **({} if family != "qwen2" else _QWEN2))
    alone = load_executor(resolve_model(settings(folder, 1)), settings(folder, 1), CACHE)
    expected = {how: serve(alone, how) for how in ("recompute", "swap")}
    both = lead(settings(folder, 2))
    try:
        for how, (tokens, counters) in expected.items():
            assert counters[how] > 0 and counters["cached"] > 0, "the pool was meant to be small and prefixes shared"
            assert serve(both, how) == (tokens, counters)
        assert both.inner.store.pool.nbytes * 2 == alone.store.pool.nbytes
        assert both.limits == alone.limits
        assert 0 < both.plan_bytes_per_step < 1000
    finally:
        both.close()


_QWEN2 = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128}


def test_a_row_has_the_same_bits_wherever_it_stands(lead: Lead, tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "llama")
    both = lead(settings(folder, 2))
    try:
        engine = build_engine(RunConfig(cache=CACHE), executor=both)
        prompts = [(3, 4, 5), (6, 7), (8, 9, 10, 11, 12), (13,)]
        scores = []
        for order in (prompts, prompts[::-1]):
            groups = {prompt: engine.add(Request(0, "0", prompt, SamplingParams(temperature=0, max_tokens=6, logprobs=1,
                                                                                ignore_eos=True))) for prompt in order}
            while engine.has_work():
                engine.step()
            scores.append({prompt: group.done[0].cumulative_logprob for prompt, group in groups.items()})
        assert scores[0] == scores[1]
    finally:
        both.close()


def test_sizes_that_do_not_divide_are_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "llama")
    config = settings(folder, 4)
    with pytest.raises(UsageError, match=r"2 key/value heads .* do not divide among 4 ranks.*sizes work: 1, 2"):
        load_tensor_parallel(resolve_model(config), config, CACHE)


def test_the_swap_space_of_ranks_is_what_the_pool_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in one memory of 20 blocks: 12 for the pool of both, so that 8 are left."""
    whole = LayerSpec(4, 2, 8, 8, 1.0)
    block_bytes = KVLayout((whole,), 4).block_elements * 4
    for place in (kv_store, host_memory):
        monkeypatch.setattr(place, "free_memory", lambda device: 20 * block_bytes)
    split = Split(Place(0, 2, "127.0.0.1", 1), dist.HashStore(), ModelConfig())
    split.whole_specs = (whole,)
    monkeypatch.setattr(split, "_ranks", SimpleNamespace(least=lambda *numbers: numbers))
    part = KVLayout((replace(whole, heads=2, kv_heads=1),), 4)
    size = split.size_pool(part, torch.float32, CacheConfig(block_size=4, num_blocks=12), torch.device("cpu"), 64)
    assert (size.num_blocks, size.host_blocks, size.block_bytes) == (12, 8, block_bytes // 2)
    assert f"swap space cut to the {8 * block_bytes:,} bytes that host memory has free" in size.note
