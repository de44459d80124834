"""Incremental text against decoding all at once, for the decoders in use; characters cut in two; stop strings."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.engine.text import IncrementalText

CORPUS = ["The quick brown fox jumps over the lazy dog. " * 3, "def f(x):\n    return x + 1\n" * 3,
          "héllo wörld, naïve café", "stop STOP stopping nonstop"]
TEXTS = ["The fox said: 你好，世界！ and left.", "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 🇩🇪", "naïve café  two  spaces\n\n\ttab",
         "नमस्ते दुनिया", "plain words only", " leading space", "x", "���? no: \u2028 line"]


class Kit:
    """A backend with the two attributes that IncrementalText reads."""

    def __init__(self, backend, eos_ids=()):
        self.backend, self.eos_ids = backend, frozenset(eos_ids)


def byte_level():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>", "<|im|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool call>", special=False)])
    return backend


def sentence_pieces(strip):
    """As Llama 2 (with strip) and Gemma (without): BPE over metaspace with bytes for unknown characters."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyzTSOP.,:", "▁t", "th", "▁th", "he", "▁the", "fo", "fox", "▁▁"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("h", "e"), ("▁th", "e"), ("f", "o"), ("fo", "x"), ("▁", "▁")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * strip + [normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def unigram():
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("he", -3.0), ("▁fox", -3.0)]
                                       + [(c, -6.0) for c in "abcdefghijklmnopqrstuvwxyzT.,:你好é"], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def windowed():
    """Byte level, but with a decoder that is not taken apart: the tokens' window is decoded instead."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


BACKENDS = {"byte level": byte_level(), "window": windowed(), "metaspace, stripped": sentence_pieces(True),
            "metaspace": sentence_pieces(False), "unigram": unigram()}


def sequence(prompt, output_len=None, **fields):
    request = Request(0, "r", tuple(prompt), SamplingParams(**fields), output_len=output_len)
    return Sequence(0, SequenceGroup(request, 0), list(prompt), len(prompt), 0)


def run(backend, prompt, output, eos_ids=(), output_len=None, **fields):
    """Feed tokens until a stop; returns the sequence, texts after each token and the stop string."""
    text, seq, seen, stop = IncrementalText(Kit(backend, eos_ids)), sequence(prompt, output_len, **fields), [], None
    text.start(seq)
    for token in output:
        seq.tokens.append(token)
        stop = text.advance(seq)
        seen.append(seq.text)
        if stop is not None:
            break
    text.finish(seq)
    return seq, seen, stop


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("content", TEXTS)
@pytest.mark.parametrize("split", [1, 3])
def test_prompt_and_text_read_as_all_ids_decoded(name, content, split):
    backend = BACKENDS[name]
    ids = backend.encode("the fox " + content).ids
    prompt, output = ids[:split], ids[split:]
    seq, seen, _ = run(backend, prompt, output)
    assert backend.decode(prompt) + seq.text == backend.decode(ids)
    for text in [*seen, seq.text]:
        assert seq.text.startswith(text)
        assert "\ufffd" in content or "\ufffd" not in text


@pytest.mark.parametrize("name", ["metaspace, stripped", "metaspace", "byte level"])
def test_a_text_that_begins_after_special_tokens_begins_as_decoded(name):
    backend = BACKENDS[name]
    ids = backend.encode(" the fox").ids
    special = backend.token_to_id("<s>") or backend.token_to_id("<|end|>")
    assert run(backend, [special], [*ids, special])[0].text == backend.decode(ids)


def test_a_character_cut_by_the_end_is_dropped_and_ids_stay():
    for name in ("byte level", "metaspace", "window"):
        backend = BACKENDS[name]
        ids = backend.encode("fox 👋").ids
        whole = run(backend, [ids[0]], ids[1:])[0]
        assert whole.text.endswith("👋")
        for cut in (1, 2, 3):
            seq, seen, _ = run(backend, [ids[0]], ids[1:-cut])
            assert seq.text == whole.text[:-1]
            assert seq.output_ids == ids[1:-cut]
            assert not any("\ufffd" in text for text in seen)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 405), max_size=40))
def test_any_ids_of_a_byte_level_model_read_as_the_library_reads_them(ids):
    backend = BACKENDS["byte level"]
    seq, _, _ = run(backend, [0], ids)
    whole = backend.decode(ids)
    # All that may differ is one unfinished character at the end.
    assert whole == seq.text or whole == seq.text + "\ufffd"


@pytest.mark.parametrize(("name", "byte"), [("metaspace", "<0xE4>"), ("byte level", "ä"), ("window", "ä")])
def test_broken_bytes_do_not_hold_text_for_ever(name, byte):
    backend = BACKENDS[name]
    lone, fox = backend.token_to_id(byte), backend.encode("fox").ids[-1]
    seq, seen, _ = run(backend, [fox], [lone] * 20 + [fox])
    assert seq.text.endswith(backend.decode([fox]))
    assert len(seen[-2]) >= 20 - 8


def expected_stop(text, stops, include):
    """Characters one by one: the first moment a stop stands at the end, the longest of those that do."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return (text[:end] if include else text[:end - len(stop)]), stop
    return text, None


@pytest.mark.parametrize("name", BACKENDS)
def test_stops_are_found_wherever_tokens_are_cut(name):
    backend, rng = BACKENDS[name], random.Random(name)
    for trial in range(300):
        words = rng.choices(["the ", "fox", "stop", "aab", "ab", ". ", "nonstop ", "he"], k=8)
        ids = backend.encode("x" + "".join(words)).ids
        whole = run(backend, ids[:1], ids[1:])[0].text
        at = rng.randrange(len(whole))
        other = rng.choice(["aab", "stop", "ab", "not there", "he f"])
        stops = [whole[at:at + rng.randint(1, 9)], other][:1 + trial % 2]
        for include in (False, True):
            seq, seen, stop = run(backend, ids[:1], ids[1:], stop=stops, include_stop_str_in_output=include)
            assert (seq.text, stop) == expected_stop(whole, stops, include)
            assert all(seq.text.startswith(text) for text in seen)


def test_a_stop_inside_a_token_and_one_over_three():
    vocab = {"DEF": 0, "ab": 1, "c": 2, "de": 3, "x": 4}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="x"))
    backend.decoder = decoders.Fuse()
    seq, seen, stop = run(backend, [4], [4, 0], stop="DE")
    assert (seq.text, stop, seen) == ("x", "DE", ["", "x"])
    assert run(backend, [4], [4, 0], stop="DE", include_stop_str_in_output=True)[0].text == "xDE"
    seq, seen, stop = run(backend, [4], [1, 2, 3, 4], stop=["bcd"])
    assert (seq.text, stop) == ("a", "bcd")
    assert not any("b" in text for text in seen)
    assert run(backend, [4], [1, 2, 3, 4], stop=["bcd"], include_stop_str_in_output=True)[0].text == "abcd"
    # Held text comes out at the end when the stop never completes.
    assert run(backend, [4], [1, 2], stop=["bcd"])[0].text == "abc"


def test_stops_wait_for_min_tokens_and_forced_lengths_ignore_them():
    backend = BACKENDS["byte level"]
    ids = backend.encode("xstop stop").ids
    whole = backend.decode(ids[1:])
    assert run(backend, ids[:1], ids[1:], output_len=len(ids) - 1, stop="stop")[0].text == whole
    first = run(backend, ids[:1], ids[1:], stop="stop")[0]
    late = run(backend, ids[:1], ids[1:], stop="stop", min_tokens=first.output_len + 1)[0]
    assert first.text == ""
    assert late.text == "stop "


def test_text_of_tokens_that_end_a_sequence():
    backend = BACKENDS["byte level"]
    fox, dot = backend.encode(" fox").ids, backend.encode(".").ids
    assert run(backend, fox, [*fox, *dot], stop_token_ids=dot, stop="zzzzzz")[0].text == " fox"
    assert run(backend, fox, [*fox, *dot], stop_token_ids=dot, include_stop_str_in_output=True)[0].text == " fox."
    assert run(backend, fox, [*fox, *dot], eos_ids=dot)[0].text == " fox"
    assert run(backend, fox, [*fox, *dot], eos_ids=dot, ignore_eos=True)[0].text == " fox."
    uni = BACKENDS["unigram"]
    ids = uni.encode("the fox.").ids
    assert run(uni, ids[:1], ids[1:], eos_ids=ids[-1:])[0].text == " fox"


def test_forks_go_their_own_ways():
    backend = BACKENDS["byte level"]
    text, seq = IncrementalText(Kit(backend)), sequence(backend.encode("x").ids, stop="never")
    hand, heart = backend.encode("👋").ids, backend.encode("👍").ids
    assert hand[:-1] == heart[:-1]
    text.start(seq)
    for token in hand[:-1]:
        seq.tokens.append(token)
        text.advance(seq)
    child = seq.fork(1, 1)
    for branch, last in ((seq, hand[-1]), (child, heart[-1])):
        branch.tokens.append(last)
        text.advance(branch)
        text.finish(branch)
    assert (seq.text, child.text) == ("👋", "👍")


def test_the_cost_of_a_token_does_not_grow():
    """Tokens decoded a step, counted rather than timed, for the reader that decodes a window."""
    backend = BACKENDS["unigram"]
    calls = []

    class Counting:
        decoder, id_to_token = backend.decoder, backend.id_to_token
        get_added_tokens_decoder = backend.get_added_tokens_decoder

        @staticmethod
        def decode(ids):
            calls.append(len(ids))
            return backend.decode(ids)

    run(Counting(), backend.encode("the fox").ids, backend.encode("the fox " * 200).ids)
    assert max(calls) <= 24
