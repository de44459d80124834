"""Every family's logits over scattered blocks, in mixed chunked batches, against its own eager attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.core.plan import Slice, StepPlan
from pagedcli.execution.families import LEAST_POSITIONS, REFUSED, check_family, position_limit
from pagedcli.execution.probe import LENGTHS as LENGTHS_OF_TRIAL
from tests.execution.tiny_models import CONFIGS, VOCAB, eager_logits, load, run_steps, save_model, shuffled_tables

LENGTHS = (21, 9, 26)
STEPS = ((7, 9, 0), (14, 0, 5), (0, 0, 20), (0, 0, 1))


def prompts(seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("family", CONFIGS)
def test_mixed_chunks_over_scattered_blocks_equal_eager(family: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path)
    executor = load(folder)
    ours = run_steps(executor, prompts(), shuffled_tables(LENGTHS, 64, 4), STEPS)
    for mine, wanted in zip(ours, eager_logits(folder, prompts()), strict=True):
        assert (mine - wanted).abs().max() / wanted.abs().max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_single_tokens_equal_whole_prompts(family: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path)
    executor = load(folder)
    tables = shuffled_tables(LENGTHS, 64, 4, seed=2)
    one_by_one = [[int(place < length) for length in LENGTHS] for place in range(max(LENGTHS))]
    ours = run_steps(executor, prompts(), tables, one_by_one)
    for mine, wanted in zip(ours, eager_logits(folder, prompts()), strict=True):
        assert (mine - wanted).abs().max() / wanted.abs().max() < 1e-5


@pytest.mark.parametrize("family", ["opt", "mistral", "gemma2", "gpt_oss"])
def test_the_compiled_backend_agrees(family: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path)
    executor = load(folder, attention_backend="cpu")
    ours = run_steps(executor, prompts(), shuffled_tables(LENGTHS, 64, 4), STEPS)
    for mine, wanted in zip(ours, eager_logits(folder, prompts()), strict=True):
        assert (mine - wanted).abs().max() / wanted.abs().max() < 1e-5


def test_specs_say_what_each_layer_does(tmp_path: Path) -> None:
    specs = load(save_model("gemma2", tmp_path)).decoder.specs
    assert [spec.window for spec in specs] == [8, None, 8]
    assert all(spec.softcap == 5.0 and spec.scale == pytest.approx(24 ** -0.5) for spec in specs)
    assert all((spec.heads, spec.kv_heads, spec.key_dim, spec.value_dim) == (4, 2, 16, 16) for spec in specs)


def test_opt_serves_all_its_positions(tmp_path: Path) -> None:
    folder = save_model("opt", tmp_path)
    executor = load(folder)
    assert executor.limits.max_positions == 64
    prompt = [3 + i % 90 for i in range(64)]
    logits = executor.execute(StepPlan([Slice(0, prompt, 0, list(range(16)), 64)])).logits
    wanted = eager_logits(folder, [prompt])[0]
    assert (logits - wanted).abs().max() / wanted.abs().max() < 1e-5


def test_a_longest_sequence_too_short_for_the_trial_is_refused() -> None:
    config = {"max_position_embeddings": 64}
    assert max(LENGTHS_OF_TRIAL) < LEAST_POSITIONS == position_limit(config, LEAST_POSITIONS)[0]
    with pytest.raises(UsageError, match=r"--max-model-len = 11: must be at least 12 tokens"):
        position_limit(config, LEAST_POSITIONS - 1)


@pytest.mark.parametrize("family", ["bloom", "mpt", "mamba", "falcon", "llama4_text", "bert", "t5"])
def test_known_unfit_types_are_refused_by_name_and_reason(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}", "vocab_size": 50}}')
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(CannotRunError) as fault:
        load(tmp_path)
    assert family in fault.value.message and REFUSED[family] in fault.value.message


@pytest.mark.parametrize(("family", "fields"), [
    ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    ("xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}),
    ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
])
def test_the_probe_itself_catches_models_that_bypass_the_hook(family: str, fields: dict[str, int], tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no list named them: the trial at load has to find out."""
    monkeypatch.setattr("pagedcli.execution.families.REFUSED", {})
    folder = save_model(family, tmp_path, vocab_size=VOCAB, **fields)
    with pytest.raises(CannotRunError, match=family):
        load(folder, max_model_len=64)


def test_odd_layer_types_are_refused() -> None:
    with pytest.raises(CannotRunError, match="linear_attention"):
        check_family({"model_type": "new", "layer_types": ["full_attention", "linear_attention"]})


def test_ropes_that_follow_the_batch_are_cut_to_their_original_length() -> None:
    dynamic = {"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    assert position_limit(dynamic, None) == (2048, None)
    longrope = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
                "rope_parameters": {"rope_type": "longrope"}}
    limit, note = position_limit(longrope, None)
    assert limit == 4096 and note is not None and "longrope" in note
    with pytest.raises(UsageError, match="4,096"):
        position_limit(longrope, 5000)
    by_layer = {"max_position_embeddings": 8192, "rope_parameters": {
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 1024},
        "sliding_attention": {"rope_type": "default"}}}
    assert position_limit(by_layer, None)[0] == 1024


def test_longest_sequence_must_fit_the_model() -> None:
    assert position_limit({"n_positions": 1024}, 100) == (100, None)
    with pytest.raises(UsageError, match="--max-model-len = 1025: the model has 1,024"):
        position_limit({"n_positions": 1024}, 1025)
    with pytest.raises(UsageError, match="--max-model-len"):
        position_limit({}, None)
