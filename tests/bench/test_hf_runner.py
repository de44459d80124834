"""The `hf` baseline on a tiny random model: padding changes nothing, batches and memory are counted as they are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedcli.bench.hf_runner import HFRunner, _Run, fitting, generate_batch
from pagedcli.bench.metrics import summarize
from tests.bench.scripted_engine import requests

PAD = 0


CONFIG = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=128, eos_token_id=2, initializer_range=0.2)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def test_left_padding_changes_no_logits_and_no_tokens(model: LlamaForCausalLM):
    prompts = [list(range(5, 17)), [30, 31, 32]]
    together = generate_batch(model, prompts, 10, PAD, lambda: False)
    for row, prompt in enumerate(prompts):
        alone = generate_batch(model, [prompt], 10, PAD, lambda: False)
        assert together[row].tolist() == alone[0].tolist()
        # An independent judge: the model's plain forward over prompt and output, without cache or padding.
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + alone[0].tolist()])).logits[0]
        assert logits[len(prompt) - 1:-1].argmax(-1).tolist() == alone[0].tolist()


def test_end_of_text_does_not_end_a_forced_length(model: LlamaForCausalLM):
    calls = []
    prompts = [[i, i + 1, i + 2] for i in range(10, 40)]
    out = generate_batch(model, prompts, 40, PAD, lambda: bool(calls.append(1)))
    assert out.shape == (30, 40) and len(calls) == 40
    passed = (out[:, :-1] == CONFIG.eos_token_id).any(dim=1)
    assert passed.any(), "some answer must pass the end-of-text id for this test to mean anything"
    for row in out[passed]:
        after = row[row.tolist().index(CONFIG.eos_token_id) + 1:]
        assert (after != PAD).any()
    assert model.generation_config.eos_token_id == CONFIG.eos_token_id, "the module is left as it was"


def test_a_batch_holds_what_fits_at_its_longest():
    """4 requests of 10 + 10 take 80 slots; one of 10 + 90 makes every row 100 long."""
    assert fitting([(10, 10)] * 6, 80, 256) == 4
    assert fitting([(10, 10), (10, 90), (10, 10)], 200, 256) == 2
    assert fitting([(10, 10)] * 6, 80, 256, samples=2) == 2
    assert fitting([(10, 10)] * 6, 1000, 3) == 3
    assert fitting([(60, 30)], 80, 256) == 0


def test_static_batches_finish_together_and_padding_is_waste(model: LlamaForCausalLM):
    runner = HFRunner(model, PAD, pool_slots=64, block_size=16)
    run = runner(requests([(8, 3), (4, 6), (20, 8), (60, 9)]), [0.0] * 4, policy="hf", rate=math.inf)
    first, second, third, refused = run.requests
    assert first.finish == second.finish < third.finish
    assert (len(first.token_times), len(second.token_times), len(third.token_times)) == (3, 6, 8)
    assert refused.error == "exceeds_kv_pool" and "64" in refused.error_message
    steps = list(run.steps)
    assert len(steps) == 6 + 8
    # Last step of the first batch: 2 rows of 8 + 5 slots; the first request stopped at 3 tokens, the second has 4 + 5.
    assert (steps[5].token, steps[5].internal, steps[5].free) == (8 + 3 + 4 + 5, 26 - 20, 64 - 26)
    assert (run.steps.pool == 64).all()
    figures = summarize(run)
    assert (figures["completed"], figures["failed"]) == (3, 1)


def test_a_time_limit_ends_a_run_midway_and_says_what_was_left(model: LlamaForCausalLM):
    class Ticking:
        """A clock on which each look takes a second."""

        def __init__(self) -> None:
            self.time = 0.0

        def now(self) -> float:
            self.time += 1.0
            return self.time

        def sleep_until(self, when: float) -> None:
            self.time = max(self.time, when)

    work, deadlines = requests([(8, 3), (8, 40), (8, 40), (8, 3)]), [0.0, 0.0, 60.0, 9999.0]
    run = _Run(HFRunner(model, PAD, pool_slots=48, block_size=16), work, deadlines, 1.0, None, 100.0, clock=Ticking())
    run.serve()
    done = [run.records[number].ok for number in range(4)]
    assert done == [True, False, False, False]
    assert run.stopped == ("after 100 s (--time-limit) 1 of 4 requests were done, 2 that had come were not, and 1 had "
                           "yet to come")
    assert {run.records[number].error for number in (1, 2, 3)} == {"stopped"}
    assert len(run.steps) < 3 + 40, "the second batch ended midway"


def test_samples_multiply_rows_and_memory(model: LlamaForCausalLM):
    from dataclasses import replace

    from pagedcli.core.request import SamplingParams

    work = [replace(request, params=SamplingParams(n=2, max_tokens=4)) for request in requests([(8, 4)])]
    run = HFRunner(model, PAD, pool_slots=64, block_size=16)(work, [0.0], policy="hf", rate=math.inf)
    assert run.requests[0].output_tokens == 8
    assert run.steps[0].token == 16 and run.steps[0].sequences == 2


def test_the_engine_and_hf_run_one_set_of_weights(tmp_path: Path):
    """A dummy shape, loaded twice: greedy ids of the engine's paged run equal those of transformers' generate."""
    from pagedcli.bench.hf_runner import load_module
    from pagedcli.core.config import CacheConfig, ModelConfig, RunConfig
    from pagedcli.core.request import Request, SamplingParams
    from pagedcli.engine.build import build_engine

    CONFIG.save_pretrained(tmp_path)
    model = ModelConfig(model=str(tmp_path), load_format="dummy", dtype="fp32", device="cpu", max_model_len=64)
    engine = build_engine(RunConfig(model=model, cache=CacheConfig(num_blocks=32)))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [tuple(range(5, 17)), (30, 31, 32)]
    groups = [engine.add(Request(i, str(i), prompt, params, 0.0, 8)) for i, prompt in enumerate(prompts)]
    while engine.has_work():
        engine.step()
    expected = generate_batch(load_module(model), prompts, 8, PAD, lambda: False)
    assert [group.done[0].output_ids for group in groups] == expected.tolist()
