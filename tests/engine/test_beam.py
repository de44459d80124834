"""Beam search against transformers' generate on tiny random models, driven by a plain loop without an engine."""

import itertools
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from pagedcli.core.plan import Slice, StepPlan, StepResult
from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.engine.sampler import HostSampler

VOCAB = 300
PROMPTS = [(5, 9, 77, 130), (200, 3), (42, 42, 7, 8, 9, 250, 11), (17,)]
GRID = list(itertools.product((2, 4, 6), (0.0, 1.0, 2.0), (False, True, "never")))


def tiny(kind):
    torch.manual_seed(11)
    common = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
              "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
              "attn_implementation": "eager"}
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, intermediate_size=64, num_key_value_heads=2,
                                             initializer_range=0.15))
    else:
        model = OPTForCausalLM(OPTConfig(**common, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, init_std=0.15))
    return model.float().eval()


def byte_backend():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = ["aa ab abc abcd the then there ee e e a a b b c c " * 4, "na nan nano on one nine"]
    backend.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return backend


MODELS = {kind: tiny(kind) for kind in ("llama", "opt")}
BACKEND = byte_backend()
FAST = PreTrainedTokenizerFast(tokenizer_object=BACKEND, pad_token="<pad>", eos_token="</s>")


class Kit:
    backend, eos_ids = BACKEND, frozenset()


def search(model, prompt, eos_ids, max_tokens=24, disturb=False, n=None, **fields):
    """All hypotheses of one request. `disturb` shuffles the live sequences and forgets what the sampler knows of them,
    as preemption does."""
    params = SamplingParams(use_beam_search=True, n=n or fields["beam_width"], max_tokens=max_tokens, **fields)
    group = SequenceGroup(Request(0, "r", tuple(prompt), params), 0)
    group.max_output = max_tokens
    ids, rng = itertools.count(1), np.random.default_rng(0)
    seq = Sequence(0, group, list(prompt), len(prompt), 0)
    if params.logprobs is not None:
        seq.logprobs = []
    group.live, sampler = [seq], HostSampler(eos_ids=eos_ids, tokenizer=Kit())
    for _ in range(max_tokens + 1):
        if disturb:
            group.live = [group.live[i] for i in rng.permutation(len(group.live))]
            for seq in group.live:
                sampler.forget(seq.id)
        with torch.no_grad():
            logits = model(torch.tensor([s.tokens for s in group.live])).logits[:, -1]
        plan = StepPlan([Slice(s.id, s.tokens[-1:], s.length - 1, []) for s in group.live])
        choices = sampler.choose(plan, StepResult(logits, 0.0), {s.id: s for s in group.live})
        assert set(choices) == {s.id for s in group.live}
        going = []
        for seq in group.live:
            options = choices[seq.id]
            branches = [seq, *(seq.fork(next(ids), option.sample) for option in options[1:])][:len(options)]
            for branch, option in zip(branches, options, strict=True):
                branch.sample = option.sample
                branch.tokens.append(option.token)
                branch.cumulative_logprob += option.logprob
                if branch.logprobs is not None:
                    branch.logprobs.append(option)
            going += branches
        group.live = going
        assert bool(going) != group.beam.done
        if group.beam.done:
            return group.beam.results(params.n)
    raise AssertionError("the search did not end")


def reference(model, prompt, eos_ids, max_tokens=24, n=None, **fields):
    """(ids, score) of transformers' hypotheses, ids without what pads them to one length."""
    width = fields.pop("beam_width")
    found = model.generate(
        torch.tensor([list(prompt)]), num_beams=width, num_return_sequences=n or width, do_sample=False,
        max_new_tokens=max_tokens, eos_token_id=list(eos_ids) or None, pad_token_id=0, return_dict_in_generate=True,
        output_scores=True, attention_mask=torch.ones(1, len(prompt), dtype=torch.long), **fields)
    lengths = (found.beam_indices >= 0).sum(1).tolist()
    return [(ids[len(prompt):len(prompt) + length].tolist(), score) for ids, length, score in
            zip(found.sequences, lengths, found.sequences_scores.tolist(), strict=True)]


def assert_same(ours, theirs):
    assert [list(item.tokens) for item in ours] == [ids for ids, _ in theirs]
    assert [item.score for item in ours] == pytest.approx([score for _, score in theirs], rel=1e-4, abs=1e-5)


@cache
def reachable_eos(kind, prompt):
    """Two tokens that beams do meet."""
    model = MODELS[kind]
    beams = search(model, prompt, (), beam_width=4)
    return [beams[1].tokens[3], beams[0].tokens[10]]


def compare_ends(kind, prompt, width, penalty, early):
    """Both searches with one and with two end tokens; returns how many hypotheses an end token finished."""
    model, ended, eos = MODELS[kind], 0, reachable_eos(kind, prompt)
    for eos_ids in (eos[:1], eos):
        fields = {"beam_width": width, "length_penalty": penalty, "early_stopping": early}
        ours = search(model, prompt, eos_ids, disturb=True, **fields)
        assert_same(ours, reference(model, prompt, eos_ids, **fields))
        assert all((item.tokens[-1] in eos_ids) == (item.finish_reason == "stop") for item in ours)
        ended += sum(item.finish_reason == "stop" for item in ours)
    return ended


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("width", [2, 4, 6])
def test_equal_to_transformers_with_an_end_that_occurs(kind, width):
    points = [point for point in GRID if point[0] == width]
    ended = [compare_ends(kind, PROMPTS[place % len(PROMPTS)], *point) for place, point in enumerate(points)]
    assert sum(count > 0 for count in ended) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("width", [2, 4, 6])
def test_equal_to_transformers_on_every_prompt(kind, width):
    ended = [compare_ends(kind, prompt, *point) for point in GRID if point[0] == width for prompt in PROMPTS]
    assert sum(count > 0 for count in ended) >= 3 * len(PROMPTS)


@cache
def reachable_stops(kind):
    """Stop strings that beams do meet: over a token border, inside a token, and of one character."""
    spelled = [BACKEND.decode([token]) for prompt in PROMPTS for item in search(MODELS[kind], prompt, (), beam_width=6)
               for token in item.tokens]
    good = [bool(text) and "\ufffd" not in text for text in spelled]
    whole = [text for text, fine in zip(spelled, good, strict=True) if fine]
    over = [a[-1] + b[0] for (a, fine), (b, too) in itertools.pairwise(zip(spelled, good, strict=True)) if fine and too]
    return [over[len(over) // 2], max(whole, key=len)[1:], Counter("".join(whole)).most_common(1)[0][0]]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("width", [2, 4, 6])
def test_equal_to_transformers_with_stop_strings(kind, width):
    model, stopped = MODELS[kind], 0
    every = reachable_stops(kind)
    for place, (_, penalty, early) in enumerate(point for point in GRID if point[0] == width):
        prompt = PROMPTS[place % len(PROMPTS)]
        stops = every[place % 3:]
        fields = {"beam_width": width, "length_penalty": penalty, "early_stopping": early}
        ours = search(model, prompt, [2], stop=stops, **fields)
        assert_same(ours, reference(model, prompt, [2], stop_strings=stops, tokenizer=FAST, **fields))
        stopped += sum(item.stop_reason in stops for item in ours)
        assert all(item.finish_reason == ("length" if len(item.tokens) == 24 else "stop") or item.stop_reason in stops
                   for item in ours)
    assert stopped > 3


def test_a_stop_may_begin_in_the_prompt_and_be_a_special_token():
    model = MODELS["llama"]
    prompt = [*PROMPTS[0], BACKEND.encode("q").ids[-1]]
    first = search(model, prompt, (), beam_width=2)[0].tokens[0]
    for stop in ("q" + BACKEND.decode([first])[:1], "</s>"):
        fields = {"beam_width": 4, "length_penalty": 1.0}
        theirs = reference(model, prompt, (), stop_strings=[stop], tokenizer=FAST, **fields)
        assert_same(search(model, prompt, (), stop=[stop], **fields), theirs)


@pytest.mark.parametrize("ours", [
    {"repetition_penalty": 1.5}, {"repetition_penalty": 0.8}, {"min_tokens": 6}, {"logit_bias": {7: 3.0, 50: -100}},
    {"temperature": 0.0, "top_k": -1}])
def test_processors_are_applied_as_transformers_does(ours):
    model, prompt = MODELS["llama"], PROMPTS[2]
    eos = reachable_eos("llama", prompt)[:1]
    theirs = {name: value for name, value in ours.items() if name == "repetition_penalty"}
    if "min_tokens" in ours:
        theirs["min_new_tokens"] = ours["min_tokens"]
    if "logit_bias" in ours:
        theirs["sequence_bias"] = [[[token], float(value)] for token, value in ours["logit_bias"].items()]
    fields = {"beam_width": 4, "length_penalty": 1.0, "early_stopping": False}
    assert_same(search(model, prompt, eos, **ours, **fields), reference(model, prompt, eos, **theirs, **fields))


def test_bad_words_of_several_tokens_reach_back_into_the_prompt():
    model, prompt = MODELS["llama"], PROMPTS[1]
    free = search(model, prompt, (), beam_width=4)[0].tokens
    sampler_words = ((prompt[-1], free[0]), (free[1],), (free[2], free[3]))

    class Words:
        class backend:
            @staticmethod
            def encode(text, add_special_tokens):
                return type("Encoding", (), {"ids": list(sampler_words[int(text)])})

    kit, Kit.backend = Kit.backend, Words.backend
    try:
        ours = search(model, prompt, (), beam_width=4, bad_words=["0", "1", "2"])
    finally:
        Kit.backend = kit
    assert_same(ours, reference(model, prompt, (), beam_width=4, bad_words_ids=[list(word) for word in sampler_words]))


def test_one_beam_is_a_greedy_search_and_fewer_results_are_the_best_ones():
    model, prompt = MODELS["opt"], PROMPTS[0]
    greedy = model.generate(torch.tensor([list(prompt)]), do_sample=False, max_new_tokens=24, eos_token_id=None,
                            pad_token_id=0, attention_mask=torch.ones(1, len(prompt)))[0, len(prompt):].tolist()
    for eos in ((), (greedy[9],)):
        (only,) = search(model, prompt, eos, beam_width=1)
        assert list(only.tokens) == (greedy[:greedy.index(eos[0]) + 1] if eos else greedy)
    assert search(model, prompt, (), beam_width=4, n=2) == search(model, prompt, (), beam_width=4)[:2]


def test_log_probabilities_of_hypotheses_are_the_models_own():
    model, prompt = MODELS["llama"], PROMPTS[0]
    for item in search(model, prompt, reachable_eos("llama", prompt)[:1], beam_width=3, logprobs=2,
                       repetition_penalty=1.3, disturb=True):
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([[*prompt, *item.tokens]])).logits[0].double(), -1)
        rows = rows[len(prompt) - 1:-1]
        wanted = rows[range(len(item.tokens)), list(item.tokens)]
        assert item.logprob == pytest.approx(float(wanted.sum()), abs=1e-3)
        assert [choice.token for choice in item.logprobs] == list(item.tokens)
        assert [choice.logprob for choice in item.logprobs] == pytest.approx(wanted.tolist(), abs=1e-4)
        for row, choice in zip(rows, item.logprobs, strict=True):
            assert {token for token, _ in choice.top} == {*row.topk(2)[1].tolist(), choice.token}


def test_a_search_always_ends():
    model = MODELS["llama"]
    for limit in (1, 2):
        assert [len(item.tokens) for item in search(model, PROMPTS[0], (), limit, beam_width=5)] == [limit] * 5
    for penalty in (-3.0, 1000.0, -1000.0):
        for early in (False, True, "never"):
            found = search(model, PROMPTS[0], (2, 5), 12, beam_width=3, length_penalty=penalty, early_stopping=early)
            assert len(found) == 3
    assert [item.tokens for item in search(model, PROMPTS[0], (), 0, beam_width=2)] == [(), ()]


def test_a_vocabulary_smaller_than_the_candidates():
    torch.manual_seed(1)
    config = MODELS["llama"].config.to_dict() | {"vocab_size": 5, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    found = search(model, [1, 2], (3,), 6, beam_width=6)
    assert len({item.tokens for item in found}) == 6
    assert all(item.finish_reason == "stop" or len(item.tokens) == 6 for item in found)


@pytest.mark.parametrize("vocab", [VOCAB, 49_153])
def test_a_row_scores_the_same_bits_among_any_number_of_beams(vocab):
    rows = torch.from_numpy(np.random.default_rng(2).normal(0, 3, (24, vocab)).astype(np.float32))
    whole, tops = torch.log_softmax(rows, -1), torch.topk(torch.log_softmax(rows, -1), 12)
    for size in (1, 2, 3, 5, 8):
        for start in range(0, 24, size):
            part = torch.log_softmax(rows[start:start + size].clone(), -1)
            assert torch.equal(part, whole[start:start + size])
            assert torch.equal(torch.topk(part, 12)[1], tops[1][start:start + size])
