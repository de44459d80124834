"""Packed weights kept on disk: what a start from them computes, when they are made anew, and what they do without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcli.core.config import ModelConfig
from pagedcli.execution import packed_copy
from pagedcli.execution.linear_kernels import lacks
from pagedcli.execution.model_hub import resolve_model
from pagedcli.execution.torch_executor import TorchExecutor
from tests.execution.tiny_models import eager_logits, load, run_steps, save_model, shuffled_tables

pytestmark = pytest.mark.skipif(lacks("fp32") is not None,
                                reason=f"no native products on this processor: {lacks('fp32')}")
PROMPTS = [[3 + (7 * place + row) % 90 for place in range(length)] for row, length in enumerate((21, 9))]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied head": ("llama", {"tie_word_embeddings": True}),
    "own head": ("llama", {"tie_word_embeddings": False}),
    "biases": ("llama", {"attention_bias": True}),
    "head norms": ("qwen3", {}),
    "scaled rotary": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, which keeps models of any size."""
    monkeypatch.setenv("PAGEDCLI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_copy, "LEAST_BYTES", 0)
    return tmp_path / "cache" / "packed"


def logits(executor: TorchExecutor) -> list[torch.Tensor]:
    tables = shuffled_tables([len(prompt) for prompt in PROMPTS], 64, 4)
    return run_steps(executor, PROMPTS, tables, [(10, 9), (11, 0)])


def from_copy(executor: TorchExecutor) -> bool:
    return any("read from their packed copy" in note for note in executor.info.notes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_second_start_reads_the_copy_and_computes_the_same_bits(kind: str, dtype: str, tmp_path: Path) -> None:
    if lacks(dtype) is not None:
        pytest.skip(f"no native products in {dtype} on this processor")
    family, changes = KINDS[kind]
    folder = save_model(family, tmp_path / "model", **changes)
    first, second = (load(folder, attention_backend="cpu", dtype=dtype) for _ in range(2))
    assert not from_copy(first) and from_copy(second), second.info.notes
    assert any("packed weights kept in" in note for note in first.info.notes)
    assert first.limits == second.limits
    for one, other in zip(logits(first), logits(second), strict=True):
        assert torch.equal(one, other)
    if dtype == "fp32":
        for mine, own in zip(logits(second), eager_logits(folder, PROMPTS), strict=True):
            assert torch.allclose(mine, own, rtol=1e-4, atol=1e-4)


def test_changed_weights_make_a_new_copy_in_place_of_the_old(cache: Path, tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    load(folder, attention_backend="cpu")
    before = {path.name for path in cache.iterdir()}
    other = save_model("llama", tmp_path / "other", initializer_range=0.5)
    (other / "model.safetensors").replace(folder / "model.safetensors")
    again = load(folder, attention_backend="cpu")
    after = {path.name for path in cache.iterdir()}
    assert not from_copy(again)
    assert len(before) == len(after) == 1 and before != after
    for mine, own in zip(logits(again), eager_logits(folder, PROMPTS), strict=True):
        assert torch.allclose(mine, own, rtol=1e-4, atol=1e-4)


def test_a_changed_config_is_not_served_from_the_old_copy(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    load(folder, attention_backend="cpu")
    config = json.loads((folder / "config.json").read_text())
    config["rms_norm_eps"] = 0.1
    (folder / "config.json").write_text(json.dumps(config))
    again = load(folder, attention_backend="cpu")
    assert not from_copy(again)
    for mine, own in zip(logits(again), eager_logits(folder, PROMPTS), strict=True):
        assert torch.allclose(mine, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("harm", ["cut short", "other bits", "no facts", "facts are not JSON", "a tensor missing"])
def test_a_damaged_copy_is_made_anew(harm: str, cache: Path, tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    expected = logits(load(folder, attention_backend="cpu"))
    (copy,) = cache.iterdir()
    data, facts = copy / "weights.bin", copy / "facts.json"
    if harm == "cut short":
        data.write_bytes(data.read_bytes()[:-5000])
    elif harm == "other bits":
        raw = bytearray(data.read_bytes())
        raw[:4096] = bytes(reversed(raw[:4096]))
        data.write_bytes(raw)
    elif harm == "no facts":
        facts.unlink()
    elif harm == "facts are not JSON":
        facts.write_text("{")
    else:
        held = json.loads(facts.read_text())
        held["tensors"] = held["tensors"][1:]
        facts.write_text(json.dumps(held))
    mended = load(folder, attention_backend="cpu")
    assert not from_copy(mended)
    assert all(torch.equal(one, other) for one, other in zip(logits(mended), expected, strict=True))
    assert from_copy(load(folder, attention_backend="cpu"))


def test_small_and_large_models_are_not_kept(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model("llama", tmp_path / "model")
    for name, value in (("LEAST_BYTES", 1 << 30), ("MOST_BYTES", 100)):
        with monkeypatch.context() as patch:
            patch.setattr(packed_copy, name, value)
            load(folder, attention_backend="cpu")
        assert not cache.exists() or not any(cache.iterdir())


def test_a_cache_that_cannot_be_written_is_said_and_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PAGEDCLI_CACHE", str(tmp_path / "file"))
    executor = load(save_model("llama", tmp_path / "model"), attention_backend="cpu")
    assert any("no packed copy of the weights kept" in note for note in executor.info.notes), executor.info.notes
    assert len(logits(executor)) == len(PROMPTS)


def test_two_first_starts_at_once_leave_one_whole_copy(cache: Path, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model("llama", tmp_path / "model")
    write, inside = packed_copy._write, []

    def meanwhile(*given: Any) -> Any:
        monkeypatch.setattr(packed_copy, "_write", write)
        inside.append(load(folder, attention_backend="cpu"))  # the other start, from beginning to end
        return write(*given)

    monkeypatch.setattr(packed_copy, "_write", meanwhile)
    outer = load(folder, attention_backend="cpu")
    assert [path.name.startswith("model-") for path in cache.iterdir()] == [True]
    for executor in (outer, *inside):
        assert not any("no packed copy" in note for note in executor.info.notes), executor.info.notes
    assert from_copy(load(folder, attention_backend="cpu"))


def test_a_full_disk_is_left_alone(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_copy, "FREE_SHARE", 1 << 60)
    executor = load(save_model("llama", tmp_path / "model"), attention_backend="cpu")
    assert any("bytes free" in note for note in executor.info.notes)
    assert not any(cache.iterdir())


def test_other_backends_and_dummies_have_no_copy(cache: Path, tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    load(folder, attention_backend="reference")
    assert not cache.exists()
    source = resolve_model(ModelConfig(model=str(folder), load_format="dummy"))
    assert packed_copy.copy_folder(source, "fp32") is None


@pytest.mark.parametrize("threads", [1, 3])
def test_a_start_from_a_copy_imports_neither_torch_nor_transformers(threads: int, tmp_path: Path) -> None:
    """And computes the same bits on Python's threads as the first start did on torch's."""
    folder = save_model("llama", tmp_path / "model")
    (expected,) = run_steps(load(folder, attention_backend="cpu"), PROMPTS[:1], [list(range(6))], [(21,)])
    code = ("import sys\n"
            "import numpy as np\n"
            "from pagedcli.core.config import CacheConfig, ModelConfig\n"
            "from pagedcli.core.plan import Slice, StepPlan\n"
            "from pagedcli.execution.loading import load_executor\n"
            "from pagedcli.execution.model_hub import resolve_model\n"
            f"config = ModelConfig(model={str(folder)!r}, device='cpu', dtype='fp32', threads={threads})\n"
            "made = load_executor(resolve_model(config), config, CacheConfig(block_size=4, num_blocks=8))\n"
            "assert any('packed copy' in note for note in made.info.notes), made.info.notes\n"
            f"plan = StepPlan([Slice(0, {PROMPTS[0]}, 0, list(range(6)), 21)])\n"
            f"np.save({str(tmp_path / 'logits.npy')!r}, made.execute(plan).logits)\n"
            "print(sorted(name for name in ('transformers', 'torch') if name in sys.modules), made.info.threads)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"[] {threads}", done.stdout + done.stderr
    assert (np.load(tmp_path / "logits.npy") == expected.numpy()).all()
