"""Searches over remembered rows choose what plain `generate` chooses, and each row of ids is computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.acceptance.remembered import RowMemory, remembering
from tests.execution.tiny_models import save_model

PROMPTS = torch.tensor([[5, 9, 77, 30], [20, 3, 4, 4], [42, 42, 7, 8]])


def tiny(family: str, folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(save_model(family, folder / family), dtype=torch.float32).eval()


def search(model: Any, **how: Any) -> list[list[int]]:
    ids = model.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), do_sample=False,
                         max_new_tokens=10, pad_token_id=0, **how)
    return ids.tolist()


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_searches_choose_as_without_the_memory(family: str, tmp_path: Path) -> None:
    model = tiny(family, tmp_path)
    settings = [{"num_beams": width, "length_penalty": penalty, "early_stopping": early}
                for width in (2, 4) for penalty in (0.0, 2.0) for early in (True, "never")]
    plain = [search(model, **setting) for setting in settings]
    with remembering(model) as memory:
        assert [search(model, **setting, use_cache=False) for setting in settings] == plain
        assert 0 < memory.computed < memory.asked / 3
        before = memory.computed
        search(model, **settings[0], use_cache=False)
        assert memory.computed == before
    assert search(model, **settings[0]) == plain[0]


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_logits_are_those_of_the_whole_row_at_once(family: str, tmp_path: Path) -> None:
    model = tiny(family, tmp_path)
    rows = torch.randint(3, 90, (4, 12), generator=torch.Generator().manual_seed(1))
    rows[2] = rows[0]
    with torch.inference_mode():
        memory = RowMemory(model.forward)
        for length in (5, 6, 7, 12):  # the last one's rows begin anew: their parents were never asked for
            answers = memory(rows[:, :length], torch.ones(4, length))
            wanted = model(rows[:, :length]).logits[:, -1]
            assert torch.allclose(answers[:, 0], wanted, atol=1e-4)
            assert torch.equal(answers[0], answers[2])
    assert (memory.asked, memory.computed) == (16, 12)


def test_padding_is_refused(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path)
    with remembering(model) as memory, pytest.raises(ValueError, match="padding"):
        memory(PROMPTS, torch.tensor([[0, 1, 1, 1]] * 3))
