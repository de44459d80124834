"""The sampler: choices, their log-probabilities, random streams, and that a row never depends on its batch."""

import math

import numpy as np
import pytest
import torch

from pagedcli.core.errors import CannotRunError, RequestError
from pagedcli.core.plan import Slice, StepPlan, StepResult
from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.engine import row_kernels
from pagedcli.engine.sampler import HostSampler
from pagedcli.engine.streams import stream_key, uniforms

VOCAB = 1000


def sequence(seq_id=0, prompt=(1, 2, 3), output=(), key=None, sample=0, **fields):
    request = Request(seq_id, key or f"row-{seq_id}", tuple(prompt), SamplingParams(**fields))
    group = SequenceGroup(request, seq_id)
    seq = Sequence(seq_id, group, [*prompt, *output], len(prompt), sample)
    group.live.append(seq)
    return seq


def step(sampler, logits, seqs):
    """One decode step: each sequence's last token, one row each."""
    plan = StepPlan([Slice(s.id, s.tokens[-1:], s.length - 1, []) for s in seqs])
    return sampler.choose(plan, StepResult(logits, 0.0), {s.id: s for s in seqs})


def normal(rows, vocab=VOCAB, seed=0, scale=3.0):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32))


def log_softmax64(row):
    row = np.asarray(row, np.float64)
    return row - row.max() - math.log(np.exp(row - row.max()).sum())


def test_greedy_takes_the_first_maximum_and_its_logprob():
    logits = normal(5)
    logits[2, [700, 31, 999]] = 50.0
    logits[3] = 0.0
    logits[4, 0] = -0.0
    logits[4, 1:] = -1.0
    logits[4, 300] = 0.0
    seqs = [sequence(i, temperature=0) for i in range(5)]
    choices = step(HostSampler(), logits, seqs)
    for i, seq in enumerate(seqs):
        (choice,) = choices[seq.id]
        assert choice.token == int(np.argmax(logits[i].numpy()))
        assert choice.logprob == pytest.approx(log_softmax64(logits[i])[choice.token], abs=2e-6)
        assert choice.sample is None
    assert choices[2][0].token == 31


def mixed_sequences():
    kinds = [{"temperature": 0}, {}, {"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.8},
             {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.4}, {"logprobs": 5}, {"seed": 9, "min_p": 0.1},
             {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "temperature": 0},
             {"logit_bias": {5: 4.0, 6: -100}, "logprobs": -1},
             {"min_tokens": 9, "stop_token_ids": [3], "temperature": 0.9}]
    rng = np.random.default_rng(3)
    return [sequence(i, rng.integers(0, VOCAB, 5).tolist(), rng.integers(0, VOCAB, i % 7).tolist(),
                     **kinds[i % len(kinds)]) for i in range(64)]


@pytest.mark.parametrize("vocab", [VOCAB, 49_153])
def test_a_row_has_the_same_bits_in_any_batch(vocab):
    seqs, logits = mixed_sequences(), normal(64, vocab, scale=2.0)
    together = step(HostSampler(seed=4, eos_ids=(0,)), logits, seqs)
    order = np.random.default_rng(1).permutation(64).tolist()
    shuffled = step(HostSampler(seed=4, eos_ids=(0,)), logits[order], [seqs[i] for i in order])
    for size in (1, 3, 8):
        for start in range(0, 64 if vocab == VOCAB else 16, size):
            part = seqs[start:start + size]
            for seq_id, choice in step(HostSampler(seed=4, eos_ids=(0,)), logits[start:start + size], part).items():
                assert choice == together[seq_id] == shuffled[seq_id]


def test_threads_change_no_bit(monkeypatch):
    seqs, logits = mixed_sequences(), normal(64, 20_000, scale=2.0)
    alone = step(HostSampler(eos_ids=(0,)), logits, seqs)
    monkeypatch.setattr(row_kernels, "THREAD_ENTRIES", 1)
    assert step(HostSampler(eos_ids=(0,)), logits, seqs) == alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened_exactly(dtype):
    logits = normal(3).to(dtype)
    seqs = [sequence(0, temperature=0), sequence(1), sequence(2, top_p=0.5)]
    assert step(HostSampler(), logits, seqs) == step(HostSampler(), logits.float(), seqs)


def test_a_draw_inverts_the_cumulative_distribution():
    logits = normal(40, seed=5)
    seqs = [sequence(i, temperature=0.5 + 0.05 * (i % 20), output=[1] * (i % 3)) for i in range(40)]
    choices = step(HostSampler(seed=11), logits, seqs)
    for i, seq in enumerate(seqs):
        u = uniforms([stream_key(11, seq.group.request.key)], [0], [seq.output_len])[0]
        cumulative = np.cumsum(np.exp(log_softmax64(logits[i].double() / seq.group.params.temperature)))
        token = choices[i][0].token
        assert cumulative[token] > u - 1e-5
        assert token == 0 or cumulative[token - 1] < u + 1e-5


def test_draws_follow_the_distribution():
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    logits = torch.from_numpy(np.log(probabilities).astype(np.float32)).repeat(20_000, 1)
    seqs = [sequence(i) for i in range(20_000)]
    tokens = [c[0].token for c in step(HostSampler(), logits, seqs).values()]
    expected = probabilities * 20_000
    chi_square = ((np.bincount(tokens, minlength=5) - expected) ** 2 / expected).sum()
    assert chi_square < 18.5  # 4 degrees of freedom, p = 0.001


def kept_set(row, temperature, top_k, top_p, min_p):
    """Plain float64 filters over one row: the set of tokens that may be drawn."""
    scaled = np.asarray(row, np.float64) / temperature
    good = scaled - scaled.max() >= math.log(min_p) if min_p else np.ones(len(row), bool)
    if 0 < top_k < len(row):
        good &= scaled >= np.sort(np.where(good, scaled, -np.inf))[-top_k]
    if top_p < 1:
        weights = np.where(good, np.exp(scaled - scaled.max()), 0)
        order = np.argsort(-weights, kind="stable")
        inside = np.cumsum(weights[order]) - weights[order] < top_p * weights.sum()
        good &= np.isin(np.arange(len(row)), order[inside])
    return set(np.flatnonzero(good).tolist())


@pytest.mark.parametrize(("top_k", "top_p", "min_p", "temperature"), [
    (1, 1.0, 0.0, 1.0), (7, 1.0, 0.0, 0.8), (0, 0.3, 0.0, 1.0), (0, 0.95, 0.0, 1.7), (-1, 1.0, 0.03, 1.0),
    (25, 0.7, 0.01, 1.3), (600, 0.999, 0.0, 2.0), (5000, 1.0, 0.0, 1.0)])
def test_filters_keep_the_right_tokens(top_k, top_p, min_p, temperature):
    rows = 300
    base = normal(1, vocab=700, seed=top_k + 50, scale=1.0)
    seqs = [sequence(i, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p) for i in range(rows)]
    drawn = [c[0].token for c in step(HostSampler(), base.repeat(rows, 1), seqs).values()]
    allowed = kept_set(base[0], temperature, top_k, top_p, min_p)
    assert set(drawn) <= allowed
    # The draw is by rising id within the allowed set, so each token is also the exact inverse.
    ids = np.array(sorted(allowed))
    scaled = base[0].double().numpy()[ids] / temperature
    cumulative = np.cumsum(np.exp(scaled - scaled.max()))
    cumulative /= cumulative[-1]
    for seq, token in zip(seqs, drawn, strict=True):
        u = uniforms([stream_key(0, seq.group.request.key)], [0], [0])[0]
        place = int(np.searchsorted(ids, token))
        assert cumulative[place] > u - 1e-5
        assert place == 0 or cumulative[place - 1] < u + 1e-5


def test_masked_and_far_apart_logits_are_never_drawn():
    logits = torch.full((200, VOCAB), -torch.inf)
    logits[:, 400], logits[:, 401], logits[:, 402] = 1.0, 1.0, -3e38
    for fields in ({}, {"top_p": 0.9}, {"top_k": 3}, {"top_k": 900, "top_p": 0.99}, {"min_p": 0.5}):
        choices = step(HostSampler(), logits, [sequence(i, **fields) for i in range(200)])
        tokens = [c[0].token for c in choices.values()]
        assert set(tokens) == {400, 401}


def plain_processing(row, seq, eos, bad=()):
    """One row, one entry at a time, in float64: bias, bad words, min_tokens, penalties."""
    params, row = seq.group.params, np.asarray(row, np.float64).copy()
    for token, amount in params.logit_bias:
        row[token] += amount
    for word in bad:
        if list(word[:-1]) == seq.output_ids[seq.output_len - len(word) + 1:]:
            row[word[-1]] = -np.inf
    if seq.output_len < params.min_tokens:
        row[[*eos, *params.stop_token_ids]] = -np.inf
    penalty = params.repetition_penalty
    for token in set(seq.tokens):
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in set(seq.output_ids):
        row[token] -= params.frequency_penalty * seq.output_ids.count(token) + params.presence_penalty
    return row


class WordBackend:
    """Stands for a tokenizer whose words are numbers."""

    class Encoding:
        def __init__(self, ids):
            self.ids = ids

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return self.Encoding([int(word) for word in text.split()])


class WordTokenizer:
    backend = WordBackend()


def test_processors_equal_the_plain_ones():
    rng = np.random.default_rng(8)
    vocab = 40
    seqs = []
    for i in range(60):
        fields = {"temperature": 0, "logit_bias": {int(t): float(rng.normal(0, 5)) for t in rng.integers(0, vocab, 3)},
                      "repetition_penalty": float(rng.uniform(0.6, 1.8)), "presence_penalty": float(rng.uniform(-2, 2)),
                      "frequency_penalty": float(rng.uniform(-2, 2)), "min_tokens": int(rng.integers(0, 6)),
                      "stop_token_ids": rng.integers(0, vocab, 2).tolist(), "bad_words": ["7", "8 9", "1 2 3"]}
        for name in rng.choice(list(fields), 3, replace=False):
            if name != "temperature":
                del fields[name]
        seqs.append(sequence(i, rng.integers(0, vocab, 4).tolist(), rng.choice([1, 2, 3, 8, 9], i % 9).tolist(),
                             **fields))
    logits = normal(60, vocab, seed=2)
    sampler = HostSampler(eos_ids=(0, 4), tokenizer=WordTokenizer())
    choices = step(sampler, logits, seqs)
    for i, seq in enumerate(seqs):
        bad = ((7,), (8, 9), (1, 2, 3)) if seq.group.params.bad_words else ()
        expected = plain_processing(logits[i], seq, (0, 4), bad)
        assert choices[i][0].token == int(expected.argmax())
        assert choices[i][0].logprob == pytest.approx(log_softmax64(logits[i])[choices[i][0].token], abs=2e-6)


def test_penalty_counts_follow_the_sequence_and_survive_forgetting():
    logits, fields = normal(1, 30, seed=4), {"temperature": 0, "frequency_penalty": 0.9, "repetition_penalty": 1.2}
    kept, seq = HostSampler(), sequence(0, **fields)
    for _ in range(60):
        token = step(kept, logits, [seq])[0][0].token
        assert token == step(HostSampler(), logits, [seq])[0][0].token  # counts rebuilt from the tokens
        assert token == int(plain_processing(logits[0], seq, ()).argmax())
        seq.tokens.append(token)
    child = seq.fork(1, 1)
    kept.forked(0, 1)
    child.tokens.append(3)
    assert step(kept, logits, [child])[1][0].token == int(plain_processing(logits[0], child, ()).argmax())
    assert step(kept, logits, [seq])[0][0].token == int(plain_processing(logits[0], seq, ()).argmax())


def test_samples_are_what_each_gives_alone():
    logits = normal(8, seed=6)
    group_seq = sequence(0, key="x", n=3, best_of=4, seed=5)
    first = step(HostSampler(), logits[:1], [group_seq])[0]
    assert [c.sample for c in first] == [0, 1, 2, 3]
    seqs = [group_seq] + [group_seq.fork(10 + j, j) for j in (1, 2, 3)]
    group_seq.group.live = seqs
    for seq, choice in zip(seqs, first, strict=True):
        seq.tokens.append(choice.token)
    second = step(HostSampler(), logits[1:5], seqs)
    for j, seq in enumerate(seqs):
        lone = sequence(77, key="x", sample=j, seed=5)
        assert step(HostSampler(seed=99), logits[:1], [lone])[77][0].token == first[j].token
        lone.tokens.append(first[j].token)
        assert step(HostSampler(seed=99), logits[1 + j:2 + j], [lone])[77][0].token == second[seq.id][0].token
    # Separate reservations of one group (no shared prompt) draw one token each, the same ones.
    apart = [sequence(20, key="x", n=4, seed=5)]
    apart += [apart[0].fork(20 + j, j) for j in (1, 2, 3)]
    apart[0].group.live = apart
    alone = step(HostSampler(), logits[[0, 0, 0, 0]], apart)
    assert [alone[20 + j][0].token for j in range(4)] == [c.token for c in first]


def test_seed_of_the_request_wins_over_the_run():
    logits = normal(1).repeat(30, 1)
    own, runs = ([sequence(i, **f) for i in range(30)] for f in ({"seed": 3}, {}))
    assert step(HostSampler(seed=1), logits, own) == step(HostSampler(seed=2), logits, own)
    assert step(HostSampler(seed=3), logits, runs) == step(HostSampler(seed=8), logits, own)
    assert step(HostSampler(seed=1), logits, runs) != step(HostSampler(seed=2), logits, runs)


def test_nan_names_the_request():
    logits = normal(3)
    logits[1, 17] = torch.nan
    with pytest.raises(CannotRunError, match=r"'bad'.*NaN"):
        step(HostSampler(), logits, [sequence(0), sequence(1, key="bad", temperature=0), sequence(2)])
    logits[1, 17] = torch.inf
    with pytest.raises(CannotRunError, match="'bad'"):
        step(HostSampler(), logits, [sequence(0), sequence(1, key="bad"), sequence(2)])
    with pytest.raises(CannotRunError, match="min_tokens"):
        step(HostSampler(eos_ids=(0, 1)), normal(1, 2), [sequence(0, prompt=(1,), min_tokens=2)])


def test_rows_are_matched_to_slices():
    seqs = [sequence(0, prompt=range(10), temperature=0), sequence(1, temperature=0), sequence(2, temperature=0)]
    logits = torch.full((4, 20), -5.0)
    for row, token in enumerate((11, 12, 13, 14)):
        logits[row, token] = 5.0
    plan = StepPlan([Slice(0, range(4), 0, [], 0), Slice(1, [1, 2, 3], 0, [], 2), Slice(0, [4, 5], 4, [], 1),
                     Slice(2, [3], 2, [], 1)])
    choices = HostSampler().choose(plan, StepResult(logits, 0.0), {s.id: s for s in seqs})
    assert {k: v[0].token for k, v in choices.items()} == {1: 12, 2: 14}
    assert HostSampler().choose(StepPlan([Slice(0, [0], 0, [], 0)]), StepResult(None, 0.0), {0: seqs[0]}) == {}


def test_fields_are_checked_against_the_vocabulary():
    sampler = HostSampler()
    sampler.check(sequence(logit_bias={19: 1}, stop_token_ids=[0]).group.request, 20)
    for fields, words in (({"logit_bias": {20: 1}}, "token 20"), ({"stop_token_ids": [-1]}, "at least 0"),
                          ({"bad_words": ["x"]}, "tokenizer"), ({"stop": "x"}, "tokenizer")):
        with pytest.raises(RequestError, match=words):
            sampler.check(sequence(**fields).group.request, 20)


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_the_strongest_penalties_leave_a_row_that_can_be_drawn_from(penalty: float) -> None:
    """Logits of +-1e5, more than any model gives, stay within float32."""
    params = SamplingParams(repetition_penalty=penalty)
    logits = np.array([-1e5, 1e5, 3.0], np.float32)
    changed = logits * np.float32(params.repetition_penalty)
    assert np.isfinite(changed).all() and np.isfinite(logits / np.float32(params.repetition_penalty)).all()
