"""What a conversion of a GGUF file that fails says: too little memory, a full disk, a file that is no model, a bug."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from pagedcli.core.errors import CannotRunError
from pagedcli.execution import gguf_cache, host_memory


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGEDCLI_CACHE", str(tmp_path / "cache"))


def fault_of(file: Path) -> CannotRunError:
    with pytest.raises(CannotRunError) as fault:
        gguf_cache.converted_folder(file, lambda line: None)
    return fault.value


def write_gguf(file: Path) -> Path:
    """A file of 15 weights in fp32 and 2 * 64 in 8 bits: 143 elements."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(file, "llama")
    writer.add_tensor("a", np.zeros((3, 5), np.float32))
    kind = GGMLQuantizationType.Q8_0
    writer.add_tensor("b", quantize(np.ones((2, 64), np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def fault_of_writing(fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exception:
    """What comes of a conversion whose files raise `fault` as they are written."""
    class Tokenizer:
        def save_pretrained(self, out: Path) -> None:
            raise fault

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *given, **more: Tokenizer())
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *given, **more: None)
    file = write_gguf(tmp_path / "model.gguf")
    with pytest.raises(Exception, match=r".") as raised:
        gguf_cache.converted_folder(file, lambda line: None)
    assert [item.suffix for item in (tmp_path / "cache" / "models").iterdir()] == [".lock"], "nothing half done stays"
    return raised.value


@pytest.mark.parametrize("kind", [Exception, SafetensorError, OSError])
def test_a_disk_too_full_for_a_conversion_is_no_internal_error(kind: type[Exception], tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    fault = fault_of_writing(kind("No space left on device (os error 28)"), tmp_path, monkeypatch)
    assert isinstance(fault, CannotRunError) and fault.code == "cache_unusable"
    assert re.fullmatch(r"cannot convert .*: No space left on device \(os error 28\)\. The converted model is kept in "
                        r".*, which must be writable and have room; PAGEDCLI_CACHE names another folder", fault.message)


@pytest.mark.parametrize("fault", [MemoryError("9 bytes"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_too_little_memory_as_a_conversion_is_written_is_not_called_a_full_disk(
        fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = fault_of_writing(fault, tmp_path, monkeypatch)
    assert isinstance(said, CannotRunError) and said.code == "out_of_memory"
    assert "too little memory for its weights in fp32. Choose a smaller --model" in said.message


@pytest.mark.parametrize("fault", [KeyError("architectures"), Exception("odd"), SafetensorError("shared memory"),
                                   RuntimeError("os error 28")])
def test_a_fault_of_this_program_as_a_conversion_is_written_stays_what_it_is(
        fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault_of_writing(fault, tmp_path, monkeypatch) is fault


def test_weights_are_counted_before_they_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_memory", lambda device: 4 * 143 - 1)
    loaded: list[object] = []

    def load_tokenizer(*given: object, **more: object) -> None:
        loaded.append(given)
        raise ValueError("no tokenizer in it")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load_tokenizer)
    fault = fault_of(write_gguf(tmp_path / "model.gguf"))
    assert loaded == [] and fault.code == "out_of_memory"
    assert fault.message == (f"cannot convert {tmp_path / 'model.gguf'}: its weights in fp32, of which all are held at "
                             "once: 572 bytes, and cpu memory has 571 free. Choose a smaller --model, or the same one "
                             "as safetensors, which need no conversion")
    monkeypatch.setattr(host_memory, "free_memory", lambda device: 4 * 143)
    assert "no tokenizer in it" in fault_of(tmp_path / "model.gguf").message, "it fits, and loading begins"
    assert len(loaded) == 1


def test_a_gguf_that_cannot_be_read_is_not_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    fault = fault_of(write_gguf(tmp_path / "model.gguf"))
    assert (fault.code, "writable" in fault.message) == ("bad_model_file", False)
