"""Log-probabilities of outputs and prompts: what is listed, in which order, over chunks, in bounded memory."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch

from pagedcli.core.plan import Slice, StepPlan, StepResult
from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.engine.logprobs import PromptLogprobs, TopLogprobs
from pagedcli.engine.sampler import HostSampler

VOCAB = 500


def sequence(seq_id=0, prompt=(1, 2, 3), **fields):
    group = SequenceGroup(Request(seq_id, f"row-{seq_id}", tuple(prompt), SamplingParams(**fields)), seq_id)
    seq = Sequence(seq_id, group, list(prompt), len(prompt), 0)
    group.live.append(seq)
    return seq


def run(sampler, slices, logits, seqs):
    return sampler.choose(StepPlan(slices), StepResult(logits, 0.0), {s.id: s for s in seqs})


def normal(rows, vocab=VOCAB, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32))


def one_step(logits, seqs):
    return run(HostSampler(), [Slice(s.id, s.tokens[-1:], s.length - 1, []) for s in seqs], logits, seqs)


def plain_top(row, k, chosen):
    """Straight from the definition, in float64: k best by (probability, lowest id), then the chosen one."""
    logprobs = torch.log_softmax(row.double(), -1).tolist()
    order = sorted(range(len(logprobs)), key=lambda token: (-float(row[token]), token))
    best = order if k < 0 else order[:k]
    best = [token for token in best if logprobs[token] > -np.inf]
    return [(token, logprobs[token]) for token in ([*best, chosen] if chosen not in best else best)]


def assert_top(top, expected):
    assert [token for token, _ in top] == [token for token, _ in expected]
    assert [value for _, value in top] == pytest.approx([value for _, value in expected], abs=3e-6)


@pytest.mark.parametrize("k", [0, 1, 5, 20, 499, 500, 900, -1])
def test_the_top_k_and_the_chosen_token(k):
    logits = normal(6, seed=k + 7)
    logits[4] = torch.round(logits[4])  # many ties
    logits[5, 10:] = -torch.inf
    seqs = [sequence(i, temperature=2.0 if i % 2 else 0.0, logprobs=k) for i in range(6)]
    for i, (choice,) in one_step(logits, seqs).items():
        assert_top(choice.top, plain_top(logits[i], k, choice.token))
        assert dict(choice.top)[choice.token] == choice.logprob


def test_logprobs_are_of_the_raw_distribution():
    logits = normal(2)
    plain, bent = sequence(0, temperature=0, logprobs=3), sequence(
        1, temperature=0, logprobs=3, logit_bias={7: 90.0}, repetition_penalty=1.9)
    logits[1] = logits[0]
    choices = one_step(logits, [plain, bent])
    assert choices[1][0].token == 7
    assert choices[1][0].logprob == pytest.approx(torch.log_softmax(logits[0].double(), -1)[7].item(), abs=3e-6)
    assert choices[1][0].top[:3] == choices[0][0].top[:3]
    assert len(choices[1][0].top) == 4
    assert len(choices[0][0].top) == 3


def test_impossible_tokens_are_left_out():
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 30] = 2.0
    (choice,) = one_step(logits, [sequence(top_k=1, logprobs=5)])[0]
    assert tuple(choice.top) == ((30, 0.0),)
    assert choice.logprob == 0.0


def test_top_logprobs_behave_like_a_tuple_of_pairs():
    top = TopLogprobs(np.array([4, 2]), np.array([-0.5, -1.5], np.float32))
    assert top == ((4, -0.5), (2, -1.5))
    assert (top[0], top[-1], top[:1], len(top), list(top)) == ((4, -0.5), (2, -1.5), ((4, -0.5),), 2, [*top])
    assert hash(top) == hash(((4, -0.5), (2, -1.5)))


def prompt_slices(seq, cuts):
    """Slices that compute a whole prompt in chunks, each with a logit row for every token."""
    edges = [0, *cuts, seq.prompt_len]
    return [Slice(seq.id, seq.tokens[a:b], a, [], b - a) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("k", [0, 3, -1])
@pytest.mark.parametrize("cuts", [(), (16, 32), (1, 2, 39), (39,)])
def test_prompt_logprobs_over_chunks(k, cuts):
    prompt = np.random.default_rng(1).integers(0, VOCAB, 40).tolist()
    logits = normal(40, seed=9)
    logits[12, prompt[13]] = -torch.inf
    seq, other, sampler = sequence(prompt=prompt, prompt_logprobs=k), sequence(1, temperature=0), HostSampler()
    for part in prompt_slices(seq, cuts):
        # A neighbour decodes in the same step, before the chunk.
        rows = torch.cat((normal(1), logits[part.start:part.start + len(part.tokens)]))
        choices = run(sampler, [Slice(1, [3], 2, []), part], rows, [seq, other])
        assert set(choices) == ({0, 1} if part.start + len(part.tokens) == 40 else {1})
    found = list(seq.group.prompt_logprobs)
    assert seq.group.prompt_logprobs.complete
    assert found[0] is None
    for position in range(1, 40):
        row = logits[position - 1]
        expected = [pair for pair in plain_top(row, k, prompt[position]) if pair[1] > -np.inf]
        assert_top(found[position], expected)
        assert seq.group.prompt_logprobs.logprob(position) == dict(found[position]).get(prompt[position])
    assert seq.group.prompt_logprobs.logprob(13) is None


def test_prompt_logprobs_survive_preemption_in_mid_prompt():
    prompt = list(range(40))
    logits, sampler = normal(40, seed=3), HostSampler()
    seq, calm = sequence(prompt=prompt, prompt_logprobs=2), sequence(prompt=prompt, prompt_logprobs=2)
    first, *others = prompt_slices(seq, (16, 32))
    run(sampler, [first], logits[:16], [seq])
    sampler.forget(0)
    assert not seq.group.prompt_logprobs.complete
    with pytest.raises(KeyError, match="position 30"):
        seq.group.prompt_logprobs[30]
    for part in [first, *others]:
        run(sampler, [part], logits[part.start:part.start + len(part.tokens)], [seq])
    # Rows asked for again after some output was generated belong to no prompt position.
    seq.tokens += [5, 6]
    run(sampler, [Slice(0, seq.tokens[38:], 38, [], 4)], normal(4), [seq])
    run(HostSampler(), prompt_slices(calm, ()), logits, [calm])
    assert list(seq.group.prompt_logprobs) == list(calm.group.prompt_logprobs)


def test_one_token_prompts_and_the_last_row():
    seq = sequence(prompt=(4,), prompt_logprobs=1, temperature=0)
    logits = normal(1)
    assert run(HostSampler(), [Slice(0, [4], 0, [], 1)], logits, [seq])[0][0].token == int(logits.argmax())
    assert seq.group.prompt_logprobs is None  # nothing predicts the only token


def test_whole_vocabulary_over_a_long_prompt_stays_in_bounds():
    length, vocab = 8192, 1024
    prompt = (np.arange(length) * 7 % vocab).tolist()
    seq, sampler = sequence(prompt=prompt, prompt_logprobs=-1), HostSampler(spill_bytes=1 << 20)
    logits = normal(256, vocab)
    run(sampler, [Slice(0, prompt[:1], 0, [], 1)], logits[:1], [seq])  # compiled before memory is looked at
    tracemalloc.start()
    try:
        for start in range(0, length, 256):
            run(sampler, [Slice(0, prompt[start:start + 256], start, [], 256)], logits, [seq])
        total = sum(len(entry) for entry in seq.group.prompt_logprobs if entry is not None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seq.group.prompt_logprobs.spilled
    assert total == (length - 1) * vocab
    assert peak < 8 << 20  # the whole is 32 MiB
    assert_top(seq.group.prompt_logprobs[5000], plain_top(logits[4999 % 256], -1, prompt[5000]))


def test_files_and_memory_give_the_same():
    rows = normal(6)
    for k in (2, -1):
        kept = []
        for limit in (0, 1 << 30):
            seq = sequence(prompt=range(7), prompt_logprobs=k)
            run(HostSampler(spill_bytes=limit), [Slice(0, range(6), 0, [], 6)], rows, [seq])
            assert seq.group.prompt_logprobs.spilled == (limit == 0)
            kept.append(list(seq.group.prompt_logprobs))
        assert kept[0] == kept[1]
    assert not PromptLogprobs((1, 2), -1, VOCAB).spilled
