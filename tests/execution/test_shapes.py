"""Model shapes against published sizes, and against the modules that transformers builds from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.execution.shapes import SHAPES, find_shape, resolve_shape, shape_from_config


@pytest.mark.parametrize("name", SHAPES)
def test_parameter_counts_equal_the_real_modules(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = SHAPES[name]
    fields = shape.to_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    assert shape.parameters == sum(value.numel() for value in model.parameters())


def test_published_figures() -> None:
    opt = SHAPES["opt-13b"]
    assert opt.kv_bytes_per_token("fp16") == 800 * 1024  # paper, section 3
    assert round(opt.weight_bytes("fp16") / 1e9) == 26  # paper, figure 1: 26 GB
    assert SHAPES["opt-175b"].weight_bytes("fp16") == pytest.approx(346e9, rel=0.02)  # paper, table 1
    assert SHAPES["opt-66b"].weight_bytes("fp16") == pytest.approx(132e9, rel=0.02)  # paper, table 1
    assert SHAPES["smollm2-135m"].parameters == 134_515_008
    assert SHAPES["smollm2-135m"].kv_bytes_per_token("bf16") == 30 * 2 * 3 * 64 * 2
    assert SHAPES["llama-7b"].parameters == pytest.approx(6.74e9, rel=0.01)


def test_a_shape_survives_its_own_config() -> None:
    for shape in SHAPES.values():
        again = shape_from_config(shape.to_config(), shape.name)
        assert again.parameters == shape.parameters
        assert again.kv_bytes_per_token() == shape.kv_bytes_per_token()
        assert again.max_positions == shape.max_positions and again.window == shape.window


def test_configs_from_disk_and_their_faults(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SHAPES["qwen2.5-0.5b"].to_config()))
    assert resolve_shape(str(file)).parameters == resolve_shape(str(tmp_path)).parameters == \
        SHAPES["qwen2.5-0.5b"].parameters
    file.write_text('{"model_type": "llama", "hidden_size": 0}')
    with pytest.raises(UsageError, match="hidden_size = 0"):
        resolve_shape(str(file))
    file.write_text('{"model_type": "llama", "hidden_size": 8}')
    with pytest.raises(UsageError, match="num_attention_heads or n_head"):
        resolve_shape(str(file))
    file.write_text("[1]")
    with pytest.raises(CannotRunError, match="list"):
        resolve_shape(str(file))
    with pytest.raises(UsageError, match="opt-13b"):
        resolve_shape("opt-14b")


def test_mixture_of_experts_counts_what_a_token_meets() -> None:
    config = {"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "num_local_experts": 8,
              "num_experts_per_tok": 2, "max_position_embeddings": 64}
    shape = shape_from_config(config, "moe")
    expert = 3 * 64 * 128
    assert shape.parameters - (shape.active_parameters + 2 * 100 * 64 + 64) == 2 * 6 * expert


def test_names_are_found_in_any_case_and_as_hub_ids() -> None:
    assert find_shape("facebook/OPT-13B") is SHAPES["opt-13b"]
    assert find_shape("nobody") is None


def test_shapes_need_no_torch() -> None:
    code = "import sys, pagedcli.execution.shapes, pagedcli.execution.model_hub as m; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
