"""Token ids: exact lengths, sharing where content is shared and nowhere else."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from pagedcli.core.errors import UsageError
from pagedcli.workloads import TraceRequest, WorkloadOptions, estimate_tokens, load_workload, specs, token_ids
from pagedcli.workloads.tokens import Encode

VOCAB = 1000


def encode(text: str) -> list[int]:
    """A toy tokenizer: one id a character."""
    return [ord(c) % VOCAB for c in text]


def shared_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return place
    return min(len(first), len(second))


@pytest.mark.parametrize("name", list(specs()))
@pytest.mark.parametrize("with_text", [True, False])
def test_ids_have_the_exact_length_and_range(name: str, with_text: bool) -> None:
    for request in load_workload(name, num_requests=40).requests:
        ids = token_ids(request, VOCAB, 3, encode if with_text else None)
        assert len(ids) == request.prompt_len
        assert min(ids) >= 0 and max(ids) < VOCAB
        assert ids == token_ids(request, VOCAB, 3, encode if with_text else None)


def test_seeds_and_requests_differ() -> None:
    first, second = (TraceRequest(index=n, prompt_len=64, output_len=1) for n in (0, 1))
    assert token_ids(first, VOCAB, 0) != token_ids(first, VOCAB, 1)
    assert token_ids(first, VOCAB, 0) != token_ids(second, VOCAB, 0)


def test_no_accidental_sharing_of_a_block() -> None:
    for encoder in (None, encode):
        requests = load_workload("sharegpt", num_requests=400).requests
        heads = [token_ids(r, VOCAB, 0, encoder)[:16] for r in requests if r.prompt_len >= 16]
        assert len(heads) > 250 and len(set(heads)) == len(heads)


@pytest.mark.parametrize(("name", "length"), [("wmt16-1shot", 80), ("wmt16-5shot", 341)])
@pytest.mark.parametrize("encoder", [None, encode])
def test_shots_share_exactly_their_prefix(name: str, length: int, encoder: Encode | None) -> None:
    requests = load_workload(name, num_requests=30, options=WorkloadOptions(synthetic=True)).requests
    ids = [token_ids(r, VOCAB, 0, encoder) for r in requests]
    assert len({i[:length] for i in ids}) == 1
    tails = [i[length:length + 16] for i in ids if len(i) >= length + 16]  # a block beyond the prefix
    assert len(tails) > 15 and len(set(tails)) == len(tails)


def test_mooncake_blocks_decide_what_is_shared() -> None:
    first = TraceRequest(0, 1200, 1, block_hashes=(0, 5, 6))
    second = TraceRequest(1, 1536, 1, block_hashes=(0, 5, 7))
    third = TraceRequest(2, 300, 1, block_hashes=(0,))
    a, b, c = (token_ids(r, VOCAB, 0) for r in (first, second, third))
    assert shared_prefix(a, b) == 1024
    assert shared_prefix(a, c) == 300
    assert (len(a), len(b), len(c)) == (1200, 1536, 300)


def test_the_synthetic_mooncake_shares_as_the_trace_does(shared: Path) -> None:
    """Share of blocks seen before and of requests that go on from an earlier one."""
    def reuse(requests: tuple[TraceRequest, ...]) -> tuple[float, float]:
        seen: set[int] = set()
        again, total, continued = 0, 0, 0
        for request in requests:
            hits = sum(h in seen for h in request.block_hashes)
            again, total, continued = again + hits, total + len(request.block_hashes), continued + (hits > 1)
            seen.update(request.block_hashes)
        return again / total, continued / len(requests)

    real = reuse(load_workload(trace=shared / "data/mooncake_conversation_300.jsonl").requests)
    drawn = reuse(load_workload("mooncake", num_requests=3000).requests)
    assert real == pytest.approx((0.0796, 0.07), abs=0.001)
    assert drawn[0] == pytest.approx(real[0], abs=0.03)
    assert drawn[1] == pytest.approx(real[1], abs=0.03)


def test_turns_of_a_conversation_are_windows_on_one_stream() -> None:
    early = TraceRequest(0, 100, 1, conversation="a", offset=0)
    late = TraceRequest(1, 300, 1, conversation="a", offset=0)
    cut = TraceRequest(2, 1024, 1, conversation="a", offset=40)
    other = TraceRequest(3, 100, 1, conversation="b", offset=0)
    a, b, c, d = (token_ids(r, VOCAB, 0) for r in (early, late, cut, other))
    assert b[:100] == a
    assert c[:260] == b[40:]
    assert shared_prefix(a, d) < 3


def test_a_cut_conversation_keeps_its_end() -> None:
    request = TraceRequest(0, 4, 1, prompt="abcdefgh", conversation="x", offset=4)
    assert token_ids(request, VOCAB, 0, encode) == tuple(encode("efgh"))
    start = TraceRequest(0, 4, 1, prompt="abcdefgh")
    assert token_ids(start, VOCAB, 0, encode) == tuple(encode("abcd"))


def test_short_text_is_drawn_out_to_the_length() -> None:
    request = TraceRequest(0, 10, 1, prompt="abc")
    ids = token_ids(request, VOCAB, 0, encode)
    assert ids[:3] == tuple(encode("abc")) and len(ids) == 10


def test_special_ids_are_never_drawn() -> None:
    request = TraceRequest(0, 5000, 1)
    ids = token_ids(request, 12, 0, avoid={0, 1, 2, 7, 99})
    assert set(ids) == set(range(12)) - {0, 1, 2, 7}
    counts = [ids.count(i) for i in sorted(set(ids))]
    assert min(counts) > 500 and max(counts) < 760  # 625 +- 5 sd each
    with pytest.raises(UsageError, match="at least 2 are needed"):
        token_ids(request, 3, 0, avoid={0, 1})


def test_given_ids_are_used_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [5, 900], "max_tokens": 3}))
    request = load_workload(prompts=path).requests[0]
    assert token_ids(request, VOCAB, 0) == (5, 900)
    with pytest.raises(UsageError, match=r"holds 900, but the model's vocabulary ends at 899"):
        token_ids(request, 900, 0)


def test_synthetic_prompts_are_words() -> None:
    requests = load_workload("sharegpt", num_requests=50).requests
    for request in requests:
        assert request.prompt is not None and len(request.prompt.split()) == request.prompt_len
    longest = max(requests, key=lambda r: r.prompt_len).prompt or ""
    assert longest.startswith("Note ") and longest.isascii()
    assert len({r.prompt for r in requests if r.prompt_len > 2}) == sum(r.prompt_len > 2 for r in requests)
    assert all(r.prompt is None for r in load_workload("sharegpt", num_requests=5,
                                                       options=WorkloadOptions(text=False)).requests)


def test_the_estimate_counts_words_and_signs() -> None:
    assert estimate_tokens("") == 0
    assert estimate_tokens("Hello, world!") == 4
    assert estimate_tokens("internationalization") == 4  # 20 letters


def test_streams_do_not_depend_on_how_they_are_read() -> None:
    """A long window and the same window in pieces hold the same ids, across the 512-token borders."""
    whole = token_ids(TraceRequest(0, 1400, 1, conversation="c", offset=100), VOCAB, 0)
    edges = [0, 411, 412, 413, 924, 1400]
    pieces = [token_ids(TraceRequest(0, b - a, 1, conversation="c", offset=100 + a), VOCAB, 0)
              for a, b in pairwise(edges)]
    assert whole == tuple(i for piece in pieces for i in piece)
