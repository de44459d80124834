"""What does not fit in memory is one error that names the value, the limit and the way out, before it is made."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from pagedcli.core.config import CacheConfig, ModelConfig
from pagedcli.core.errors import CannotRunError
from pagedcli.core.plan import Slice, StepPlan
from pagedcli.execution import decoder_choice, hf_model, host_memory, loading, placement
from pagedcli.execution.hf_model import weight_bytes
from pagedcli.execution.host_memory import check_room, free_memory, holding, is_out_of_memory
from pagedcli.execution.loading import load_executor
from pagedcli.execution.model_hub import resolve_model
from tests.execution.tiny_models import load, save_model

CPU = torch.device("cpu")
SHAPE = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 64,
         "tie_word_embeddings": True}


def dummy(tmp_path: Path, block_size: int = 16, **changes: object) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**SHAPE, **changes}))
    config = ModelConfig(model=str(file), load_format="dummy", dtype="fp32", device="cpu", attention_backend="cpu",
                         threads=1)
    load_executor(resolve_model(config), config, CacheConfig(block_size=block_size, num_blocks=4))


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(host_memory, "free_memory", lambda device: size)


def test_what_fits_exactly_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1000)
    check_room("a thing", 1000, CPU, "Lower it")
    with pytest.raises(CannotRunError) as fault:
        check_room("a thing", 1001, CPU, "Lower it")
    assert fault.value.message == "a thing: 1,001 bytes, and cpu memory has 1,000 free. Lower it"
    assert (fault.value.code, fault.value.exit_status) == ("out_of_memory", 3)


def test_failed_allocations_are_told_from_other_faults() -> None:
    for size in (1 << 55, 1 << 62):
        with pytest.raises(RuntimeError) as fault:
            torch.empty(size)
        assert is_out_of_memory(fault.value)
        with pytest.raises(CannotRunError, match=r"^a thing: does not fit in cpu memory, which has [\d,]+ bytes free") \
                as ours, holding("a thing", CPU, "Lower it"):
            torch.empty(size)
        assert "alloc" not in ours.value.message
    with pytest.raises(RuntimeError, match=r"size mismatch|shapes"), holding("a thing", CPU, "Lower it"):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


def test_random_weights_are_counted_before_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64
    rotary = 2 * 8 * 4  # frequencies of the head, kept twice
    size = 4 * (100 * 64 + 2 * layer + 64) + rotary
    free(monkeypatch, size - 1)
    with pytest.raises(CannotRunError, match=f"^config: llama with random weights: {size:,} bytes, and cpu memory has "
                       rf"{size - 1:,} free\. Choose a smaller --model"):
        dummy(tmp_path)


def test_weights_on_disk_are_counted_by_their_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = json.dumps({"a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}, "__metadata__": {"x": "y"},
                       "b": {"dtype": "BF16", "shape": [], "data_offsets": [60, 62]}}).encode()
    (tmp_path / "one.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(62))
    assert weight_bytes(tmp_path, torch.bfloat16) == 2 * 16
    (tmp_path / "two.safetensors").write_bytes(b"cut")
    assert weight_bytes(tmp_path, torch.bfloat16) == 0, "its loader will say what is wrong"
    folder = save_model("llama", tmp_path / "model")
    free(monkeypatch, 10)
    with pytest.raises(CannotRunError, match=r"its weights: [\d,]+ bytes, and cpu memory has 10 free"):
        load(folder, attention_backend="cpu")


def tensors(file: Path, *shape: int) -> None:
    head = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head)


def test_only_the_weights_that_will_be_loaded_are_counted(tmp_path: Path) -> None:
    """A folder as Mistral's are: shards of an index, the same weights in one file more, and an adapter."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        tensors(tmp_path / name, 2, 3)
    tensors(tmp_path / "consolidated.safetensors", 12)
    tensors(tmp_path / "adapter_model.safetensors", 5)
    assert weight_bytes(tmp_path, torch.bfloat16) == 2 * (6 + 6 + 12 + 5), "nothing says which"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1], "c": names[0]}}))
    assert weight_bytes(tmp_path, torch.bfloat16) == 2 * (6 + 6)
    index.write_text("[]")
    assert weight_bytes(tmp_path, torch.bfloat16) == 0, "its loader will say what is wrong"
    tensors(tmp_path / "model.safetensors", 7)
    assert weight_bytes(tmp_path, torch.bfloat16) == 2 * 7


def test_quantised_weights_are_not_counted_by_their_elements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    reached: list[Path] = []

    def loader(folder: Path, **options: object) -> None:
        reached.append(folder)
        raise ValueError("far enough")

    monkeypatch.setattr(hf_model.AutoModelForCausalLM, "from_pretrained", loader)
    free(monkeypatch, 10)
    with pytest.raises(CannotRunError, match="far enough"):
        load(folder, attention_backend="cpu")
    assert reached == [folder]


def test_blocks_too_large_for_the_trial_name_their_option(tmp_path: Path) -> None:
    with pytest.raises(CannotRunError, match=r"^--block-size = 1,099,511,627,776: the 2 blocks of the trial at load: "
                       r"[\d,]+ bytes, and cpu memory has [\d,]+ free\. Lower it"):
        dummy(tmp_path, block_size=1 << 40)


def test_a_vocabulary_too_large_for_the_trial_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LOGIT_COPIES", 1 << 50)
    with pytest.raises(CannotRunError, match=r"^the trial of config at load, 22 rows of 100 logits: [\d,]+ bytes, and "
                       r"cpu memory has [\d,]+ free\. Choose a smaller --model"):
        dummy(tmp_path)


@pytest.mark.parametrize("fault", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_weights_that_cannot_be_packed_are_not_blamed_on_logits(fault: Exception, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    def refine(own: object, most: int) -> None:
        raise fault

    monkeypatch.setattr(decoder_choice, "choose_decoder", lambda decoder, backend: (refine, "none"))
    with pytest.raises(CannotRunError, match=r"^config: packing its weights: does not fit in cpu memory, which has "
                       r"[\d,]+ bytes free\. Choose a smaller --model") as told:
        dummy(tmp_path)
    assert told.value.code == "out_of_memory"


def test_positions_beyond_memory_name_their_option(tmp_path: Path) -> None:
    with pytest.raises(CannotRunError, match=r"^the rotary table of 1,099,511,627,776 positions: [\d,]+ bytes, and cpu "
                       r"memory has [\d,]+ free\. Lower --max-model-len"):
        dummy(tmp_path, max_position_embeddings=1 << 40)


def test_a_step_that_does_not_fit_says_what_to_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = load(save_model("llama", tmp_path / "model"), attention_backend="cpu")
    monkeypatch.setattr(executor.steps, "run", lambda batch: torch.empty(1 << 55))
    with pytest.raises(CannotRunError, match=r"^a step of \d+ tokens and \d+ rows? of logits .* does not fit in cpu "
                       r"memory, which has [\d,]+ bytes free\. Lower --max-num-batched-tokens"):
        executor.execute(StepPlan([Slice(0, [5, 6, 7], 0, [1], 1)]))


def test_threads_beyond_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.os, "cpu_count", lambda: 2)
    with pytest.raises(CannotRunError, match=r"^--threads = 100,000: this machine has 2 cores, for which at most 64 "):
        placement.set_threads(100_000)
    monkeypatch.setattr(placement.os, "cpu_count", lambda: 1)
    with pytest.raises(CannotRunError, match="has 1 core, "):
        placement.set_threads(65)


@pytest.mark.parametrize("version", [2, 1])
def test_pages_of_files_read_are_free_in_a_control_group(version: int, tmp_path: Path) -> None:
    """1,000 bytes are the limit, 900 in use, 600 of them of files."""
    folder = tmp_path if version == 2 else tmp_path / "memory"
    folder.mkdir(exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (1000, 900), strict=True):
        (folder / name).write_text(f"{value}\n")
    start = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"anon 300\n{start}active_file 250\n{start}inactive_file 350\n")
    assert host_memory._free_in_group(tmp_path) == [700]


def test_a_control_group_without_a_limit_limits_nothing(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert host_memory._free_in_group(tmp_path) == []


def test_free_memory_is_the_least_of_machine_and_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_available_memory", lambda: 5000)
    monkeypatch.setattr(host_memory, "GROUP", tmp_path / "absent")
    assert free_memory(CPU) == 5000
    monkeypatch.setattr(host_memory, "GROUP", tmp_path)
    for name, text in (("memory.max", "1000"), ("memory.current", "900"), ("memory.stat", "inactive_file 600")):
        (tmp_path / name).write_text(text)
    assert free_memory(CPU) == 700
