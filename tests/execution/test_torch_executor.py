"""The executor itself: moves before the forward, rows that want no logits, dummy weights, what it reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcli.core.config import CacheConfig, ModelConfig
from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.core.plan import Slice, StepPlan
from pagedcli.execution.hf_model import fill_repeating
from pagedcli.execution.loading import load_executor
from pagedcli.execution.model_hub import resolve_model
from tests.execution.tiny_models import eager_logits, load, save_model

PROMPT = [3 + (7 * i) % 90 for i in range(14)]


def test_a_sequence_survives_copies_and_swaps(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path)
    run = load(folder)
    wanted = eager_logits(folder, [PROMPT])[0]
    run.execute(StepPlan([Slice(0, PROMPT[:11], 0, [9, 2, 5], 0)]))
    run.execute(StepPlan(swap_out=[(9, 1), (2, 0), (5, 3)]))
    run.execute(StepPlan([Slice(1, PROMPT[::-1], 0, [9, 2, 5, 8], 0)]))  # others overwrite the old places
    result = run.execute(StepPlan([Slice(0, PROMPT[11:12], 11, [20, 21, 22], 1)], swap_in=[(1, 20), (0, 21), (3, 22)]))
    assert torch.allclose(result.logits, wanted[11:12], atol=1e-4)
    # A fork writes into its own copy of the last, half-full block, and the parent's stays as it was.
    forked = run.execute(StepPlan([Slice(2, PROMPT[11:], 11, [20, 21, 30, 31], 3)], copies=[(22, 30)]))
    assert torch.allclose(forked.logits, wanted[11:], atol=1e-4)
    parent = run.execute(StepPlan([Slice(0, PROMPT[12:], 12, [20, 21, 22, 32], 2)]))
    assert torch.allclose(parent.logits, wanted[12:], atol=1e-4)


def test_only_wanted_rows_have_logits(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path)
    run = load(folder)
    wanted = eager_logits(folder, [PROMPT])[0]
    plan = StepPlan([Slice(0, PROMPT, 0, [0, 1, 2, 3], 0), Slice(1, PROMPT, 0, [4, 5, 6, 7], 3),
                     Slice(2, PROMPT[:5], 0, [8, 9], 1), Slice(3, PROMPT[:2], 0, [10], 0)])
    result = run.execute(plan)
    assert result.logits.shape == (4, 97)
    assert torch.allclose(result.logits, torch.cat([wanted[-3:], wanted[4:5]]), atol=1e-4)
    assert run.execute(StepPlan([Slice(0, PROMPT, 0, [0, 1, 2, 3], 0)])).logits is None
    assert run.execute(StepPlan(copies=[(0, 1)])).logits is None


def test_padding_rows_write_nothing(tmp_path: Path) -> None:
    run = load(save_model("llama", tmp_path))
    run.execute(StepPlan([Slice(0, PROMPT[:3], 0, [5], 1)]))
    touched = run.store.pool.abs().sum(1).nonzero().flatten().tolist()
    assert touched == [5]


def test_steps_are_timed_by_part(tmp_path: Path) -> None:
    run = load(save_model("llama", tmp_path))
    result = run.execute(StepPlan([Slice(0, PROMPT, 0, [0, 1, 2, 3], 1)], copies=[(9, 10)]))
    assert set(result.parts) == {"memory", "layout", "attention", "linear"}
    assert min(result.parts.values()) > 0
    assert sum(result.parts.values()) == pytest.approx(result.seconds, rel=0.01)
    assert set(run.info.load_seconds) == {"load", "compile", "probe", "pool"}


def test_limits_and_notes(tmp_path: Path) -> None:
    run = load(save_model("mistral", tmp_path), max_model_len=100, num_blocks=10, swap_space=5000)
    assert (run.limits.num_blocks, run.limits.max_positions, run.limits.vocab_size) == (10, 100, 97)
    assert run.limits.bytes_per_block == 3 * 2 * 2 * 8 * 4 * 4  # layers, k and v, heads, dim, slots, fp32
    assert run.limits.host_blocks == 5000 // run.limits.bytes_per_block
    assert (run.info.dtype, run.info.kv_dtype, run.info.attention, run.info.threads) == ("fp32", "fp32", "reference", 1)
    assert any("10 blocks, as given" in note for note in run.info.notes)
    with pytest.raises(UsageError, match="--max-model-len = 129"):
        load(tmp_path, max_model_len=129)
    run.close()
    run.close()


@pytest.mark.parametrize("name", ["opt-125m", "gpt2"])
def test_named_shapes_run_with_dummy_weights(name: str) -> None:
    config = ModelConfig(model=name, load_format="dummy", dtype="bf16", attention_backend="reference", device="cpu",
                         threads=1)
    run = load_executor(resolve_model(config), config, CacheConfig(num_blocks=4))
    result = run.execute(StepPlan([Slice(0, [5, 6, 7], 0, [0], 1)]))
    assert result.logits.shape == (1, run.limits.vocab_size) and bool(result.logits.isfinite().all())
    assert any("random" in note for note in run.info.notes)


def test_dummy_weights_follow_the_seed_and_the_scale(tmp_path: Path) -> None:
    file = tmp_path / "shape.json"
    file.write_text(json.dumps({"model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16,
                                "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
                                "vocab_size": 500, "initializer_range": 0.07, "query_pre_attn_scalar": 16}))

    def weights(seed: int) -> dict[str, torch.Tensor]:
        return load(file, load_format="dummy", seed=seed).decoder.module.state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrix = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[matrix], other[matrix])
    assert not torch.equal(first[matrix], first["model.layers.1.mlp.up_proj.weight"])
    assert float(first[matrix].std()) == pytest.approx(0.07, rel=0.05)
    assert first["model.embed_tokens.weight"].unique(dim=0).shape[0] == 500
    assert float(first["model.norm.weight"].abs().max()) == 0  # Gemma's norms multiply by 1 + weight
    rotary = load(file, load_format="dummy").decoder.module.model.rotary_emb.inv_freq
    assert torch.allclose(rotary, 10000.0 ** -(torch.arange(0, 16, 2) / 16))


def test_repeated_filling_wraps_around() -> None:
    target, source = torch.zeros(23), torch.arange(7.0)
    fill_repeating(target, source, 5)
    assert target.tolist() == [float((5 + i) % 7) for i in range(23)]
    fill_repeating(target[:1], source, 3)
    assert float(target[0]) == 3


def test_a_wrong_attention_is_caught_by_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that forgets the scale stands for a model whose attention is misunderstood."""
    from pagedcli.attention.reference import ReferenceBackend

    right = ReferenceBackend.attend

    def wrong(self: ReferenceBackend, layer: int, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right(self, layer, q * 3, *rest)

    monkeypatch.setattr(ReferenceBackend, "attend", wrong)
    with pytest.raises(CannotRunError, match="differ from the model's own"):
        load(save_model("llama", tmp_path))


def test_cuda_is_refused_where_there_is_none(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(CannotRunError, match="no CUDA device"):
        load(save_model("llama", tmp_path), device="cuda", attention_backend="cuda")
