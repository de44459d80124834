"""The sampler that decides where the logits lie, on this machine's torch: the rules of the other one, its own bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedcli.engine.device_sampler import DeviceSampler
from pagedcli.engine.sampler import HostSampler
from tests.engine import test_beam, test_sampler, test_sampler_logprobs
from tests.engine.test_sampler import VOCAB, mixed_sequences, normal, sequence, step

FILTERS = [(1, 1.0, 0.0, 1.0), (7, 1.0, 0.0, 0.8), (0, 0.3, 0.0, 1.0), (0, 0.95, 0.0, 1.7), (-1, 1.0, 0.03, 1.0),
           (25, 0.7, 0.01, 1.3), (600, 0.999, 0.0, 2.0), (5000, 1.0, 0.0, 1.0)]


SHARED = (test_sampler, test_beam, test_sampler_logprobs)
"""Modules whose checks hold for both samplers."""


@pytest.fixture
def in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in SHARED:
        monkeypatch.setattr(module, "HostSampler", DeviceSampler)


@pytest.mark.parametrize("check", [
    test_sampler.test_greedy_takes_the_first_maximum_and_its_logprob,
    test_sampler.test_a_draw_inverts_the_cumulative_distribution, test_sampler.test_draws_follow_the_distribution,
    test_sampler.test_masked_and_far_apart_logits_are_never_drawn, test_sampler.test_processors_equal_the_plain_ones,
    test_sampler.test_penalty_counts_follow_the_sequence_and_survive_forgetting,
    test_sampler.test_samples_are_what_each_gives_alone, test_sampler.test_seed_of_the_request_wins_over_the_run,
    test_sampler.test_nan_names_the_request, test_sampler.test_rows_are_matched_to_slices,
    test_sampler_logprobs.test_logprobs_are_of_the_raw_distribution,
    test_sampler_logprobs.test_prompt_logprobs_survive_preemption_in_mid_prompt], ids=lambda check: check.__name__[5:])
def test_it_follows_the_rules_of_the_other(in_its_place: None, check: Callable[[], None]) -> None:
    assert all(module.HostSampler is DeviceSampler for module in SHARED)  # else the other one would be checked
    check()


@pytest.mark.parametrize("knobs", FILTERS)
def test_filters_keep_the_right_tokens(in_its_place: None, knobs: tuple[int, float, float, float]) -> None:
    assert all(module.HostSampler is DeviceSampler for module in SHARED)
    test_sampler.test_filters_keep_the_right_tokens(*knobs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened_exactly(in_its_place: None, dtype: torch.dtype) -> None:
    assert all(module.HostSampler is DeviceSampler for module in SHARED)
    test_sampler.test_half_precision_logits_are_widened_exactly(dtype)


def test_a_row_has_the_same_bits_in_any_batch(in_its_place: None) -> None:
    assert all(module.HostSampler is DeviceSampler for module in SHARED)
    test_sampler.test_a_row_has_the_same_bits_in_any_batch(VOCAB)


def test_it_chooses_as_the_other_does() -> None:
    """One uniform number, the same rules: the same tokens but where rounding decides, and log-probabilities alike."""
    seqs, logits = mixed_sequences(), normal(64, 20_000, scale=2.0)
    ours = step(DeviceSampler(seed=4, eos_ids=(0,)), logits, seqs)
    theirs = step(HostSampler(seed=4, eos_ids=(0,)), logits, seqs)
    assert sum(ours[i][0].token == theirs[i][0].token for i in range(64)) >= 63
    for i in range(64):
        if ours[i][0].token == theirs[i][0].token:
            assert ours[i][0].logprob == pytest.approx(theirs[i][0].logprob, abs=2e-6)
            assert ours[i][0].top == theirs[i][0].top


def test_a_draw_at_the_very_end_finds_the_last_token_with_any_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedcli.engine import device_sampler

    monkeypatch.setattr(device_sampler, "uniforms", lambda keys, samples, steps: np.ones(len(keys)))
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, [3, 300, 613]] = 0.0
    assert step(DeviceSampler(), logits, [sequence(0)])[0][0].token == 613


def test_only_what_was_chosen_comes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 plain rows: one table of 5 numbers a row. One of them wants a list: its row comes too, and no other."""
    moved: list[tuple[int, ...]] = []
    cpu, plain = torch.Tensor.cpu, HostSampler._plain

    def noting(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        moved.append(tuple(tensor.shape))
        return cpu(tensor, *args)

    def noting_rows(self: HostSampler, logits: torch.Tensor) -> np.ndarray:
        moved.append(tuple(logits.shape))
        return plain(self, logits)

    monkeypatch.setattr(torch.Tensor, "cpu", noting)
    monkeypatch.setattr(HostSampler, "_plain", noting_rows)
    seqs = [sequence(i, temperature=i % 2, top_p=0.9) for i in range(100)]
    step(DeviceSampler(), normal(100), seqs)
    assert moved == [(128, 5)]
    moved.clear()
    seqs[17] = sequence(17, logprobs=3)
    choices = step(DeviceSampler(), normal(100), seqs)
    assert moved == [(128, 5), (1, VOCAB)]
    assert choices[17][0].top is not None and len(choices) == 100
