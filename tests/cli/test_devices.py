"""What is said for each --device and --attention-backend on a machine without a GPU, and why rows failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from pagedcli.cli.app import app
from pagedcli.cli.environment import Environment
from tests.cli.console import Console
from tests.execution.tiny_models import save_model
from tests.generate.fake_engine import lines

IDS = lines({"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": [9, 10]})
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("model"))


def run(model: Path, rows: bytes, folder: Path, *words: str) -> Result:
    """`generate` on the real engine, greedily."""
    (folder / "in.jsonl").write_bytes(rows)
    return CliRunner().invoke(app, [
        "generate", str(folder / "in.jsonl"), "-o", str(folder / "out"), "--overwrite", "--model", str(model),
        "--dtype", "fp32", "--num-kv-blocks", "16", "--block-size", "4", "--max-tokens", "5", "--temperature", "0",
        "--ignore-eos", "--threads", "1", *words], obj=Environment())


def tokens(folder: Path) -> list[list[int]]:
    rows = [json.loads(line) for line in (folder / "out").read_text().split("\n")[:-1]]
    return [row["outputs"][0]["token_ids"] for row in rows]


@no_gpu
@pytest.mark.parametrize(("device", "backend", "attention"), [
    ("auto", "auto", "cpu"), ("auto", "cpu", "cpu"), ("auto", "reference", "reference"), ("cpu", "auto", "cpu"),
    ("cpu", "cpu", "cpu"), ("cpu", "reference", "reference")])
def test_choices_that_run_say_what_runs(model: Path, tmp_path: Path, device: str, backend: str,
                                        attention: str) -> None:
    done = run(model, IDS, tmp_path, "--device", device, "--attention-backend", backend)
    assert done.exit_code == 0, done.stderr
    assert f" device=cpu dtype=fp32 kv_dtype=fp32 attention={attention} " in done.stderr
    assert "2 good, 0 failed" in done.stderr


@no_gpu
@pytest.mark.parametrize(("device", "backend", "status", "said"), [
    ("cuda", "auto", 3, "--device cuda: this machine has no CUDA device that torch can use; choose --device cpu "
                        "(and --attention-backend cpu, reference or auto)"),
    ("cuda", "cuda", 3, "--device cuda: this machine has no CUDA device"),
    ("auto", "cuda", 3, "--attention-backend cuda: this machine has no CUDA device"),
    ("cuda", "cpu", 2, "--attention-backend cpu runs on the CPU, but --device is cuda: choose --attention-backend "
                       "cuda, or --device cpu"),
    ("cuda", "reference", 2, "--attention-backend reference runs on the CPU, but --device is cuda"),
    ("cpu", "cuda", 2, "--attention-backend cuda runs on a GPU, but --device is cpu: choose --attention-backend cpu "
                       "or reference, or --device cuda"),
])
def test_choices_that_cannot_run_give_one_line(model: Path, tmp_path: Path, device: str, backend: str, status: int,
                                               said: str) -> None:
    done = run(model, IDS, tmp_path, "--device", device, "--attention-backend", backend, "--quiet")
    assert done.exit_code == status
    assert done.stderr.startswith(f"pagedcli: {said}") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_unknown_choices_list_the_known_ones(model: Path, tmp_path: Path) -> None:
    for option, known in (("--device", "'auto', 'cpu', 'cuda'"), ("--attention-backend", "'cpu', 'reference', 'cuda'")):
        done = run(model, IDS, tmp_path, option, "tpu")
        assert done.exit_code == 2 and known in done.stderr.replace("\n", " ")


@pytest.mark.parametrize("quiet", [False, True])
def test_failed_rows_are_explained(console: Console, quiet: bool) -> None:
    rows = lines({"prompt": "good"}, {"prompt": "x" * 600}, {"prompt": ""})
    result, _ = console.generate(rows, "--max-tokens", "4", *["--quiet"] * quiet)
    assert result.exit_code == 1
    said = [line for line in result.stderr.split("\n") if "2 of 3 rows failed; the first, row 1, because of too_long" in
            line]
    assert len(said) == 1 and "the prompt alone has 600 tokens" in said[0]
    assert result.stderr.startswith("pagedcli: " if quiet else "rows ")


def test_text_for_a_model_without_tokenizer_is_explained(tmp_path: Path) -> None:
    """A dummy model has no tokenizer: its text rows fail, and a quiet run used to exit with 1 and no word."""
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps({"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 97,
                                 "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}))
    for quiet in ([], ["--quiet"]):
        done = run(shape, lines({"prompt": "text"}), tmp_path, "--load-format", "dummy", "--device", "cpu", *quiet)
        assert done.exit_code == 1
        assert "1 of 1 row failed; the first, row 0, because of no_tokenizer: the model has no tokenizer: give " \
               "prompt_token_ids instead of text" in done.stderr


def test_openai_rows_that_failed_are_explained(console: Console) -> None:
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "n": 0}}
    result, rows = console.generate(lines(row), "--quiet")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert f"the first, row 0, because of {rows[0]['error']['code']}: {rows[0]['error']['message']}" in result.stderr


@pytest.mark.parametrize("cache", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_eight_bit_cache_end_to_end(model: Path, tmp_path: Path, cache: str) -> None:
    """Equal on both CPU backends, in half the bytes of bf16, and not simply the full cache under another name."""
    stored = "fp8_e4m3" if cache == "fp8" else cache
    outputs = []
    for backend in ("cpu", "reference"):
        done = run(model, IDS, tmp_path, "--device", "cpu", "--attention-backend", backend, "--kv-cache-dtype", cache,
                   "--json-summary", str(tmp_path / "s.json"))
        assert done.exit_code == 0, done.stderr
        assert f" kv_dtype={stored} attention={backend} " in done.stderr
        outputs.append(tokens(tmp_path))
    assert outputs[0] == outputs[1] and [len(ids) for ids in outputs[0]] == [5, 5]
    eight = json.loads((tmp_path / "s.json").read_text())["kv_bytes"]
    run(model, IDS, tmp_path, "--device", "cpu", "--json-summary", str(tmp_path / "s.json"))
    assert eight * 4 == json.loads((tmp_path / "s.json").read_text())["kv_bytes"]
