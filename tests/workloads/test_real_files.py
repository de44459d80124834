"""Real files through every loader: rows kept, rows dropped and why (counts taken with other tools)."""

from pathlib import Path

import pytest

from pagedcli.workloads import Workload, load_workload
from pagedcli.workloads.filters import reason_to_drop


def words(text: str) -> int:
    return len(text.split())


def load(path: Path, name: str | None = None) -> Workload:
    return load_workload(name, trace=path, count_tokens=words, tokenizer="words")


def mean_lengths(workload: Workload) -> tuple[float, float]:
    count = len(workload.requests)
    return sum(r.prompt_len for r in workload.requests) / count, sum(r.output_len for r in workload.requests) / count


CASES = [
    ("data/alpaca_800.json", "alpaca", 800, {}),
    ("data/fastchat_dummy_conversation.json", "sharegpt", 500, {}),
    ("data/sharegpt_toolcall_300.json", "sharegpt", 194, {"first answer is a tool call": 106}),
    ("data/wmt16_multimodal_ende_300.jsonl", "wmt16-1shot", 300, {}),
    ("data/azure_llm_2023_conv_2000.csv", None, 2000, {}),
    ("data/azure_llm_2023_conv_2000.csv", "azure", 2000, {}),
    ("data/mooncake_conversation_300.jsonl", "mooncake", 300, {}),
    ("data/sharegpt_multiturn_lengths_llama2.csv", None, 30_731, {}),
    ("paper/alpaca_lengths.csv", "alpaca", 4_998, {"no output tokens": 2}),
    ("paper/wmt_lengths.csv", "wmt16", 3_000, {}),
    ("vllm_trace/rtx4090_llama31_8b_requests.jsonl", None, 300, {}),
]


@pytest.mark.parametrize(("file", "name", "kept", "dropped"), CASES, ids=[f"{c[1]}-{Path(c[0]).name}" for c in CASES])
def test_kept_and_dropped(shared: Path, file: str, name: str | None, kept: int, dropped: dict[str, int]) -> None:
    workload = load(shared / file, name)
    assert (workload.kept, workload.dropped) == (kept, dropped)
    assert len(workload.requests) == kept
    assert [r.index for r in workload.requests] == list(range(kept))
    assert not workload.synthetic and "local file" in workload.source


def test_the_papers_filter_gives_the_printed_means(real_sharegpt: Workload) -> None:
    assert (real_sharegpt.kept, real_sharegpt.dropped) == (79_725, {"paper filter: prompt + output >= 2048": 4_501})
    assert mean_lengths(real_sharegpt) == pytest.approx((161.18, 338.00), abs=0.006)


def test_vllms_filter_gives_other_means(real_sharegpt: Workload) -> None:
    """Applied on top of the paper's; only sums of exactly 2,048 are lost by that."""
    kept = [r for r in real_sharegpt.requests if reason_to_drop(r.prompt_len, r.output_len, "vllm", None) is None]
    assert 74_704 - len(kept) < 60
    assert sum(r.prompt_len for r in kept) / len(kept) == pytest.approx(119.58, abs=0.3)
    assert sum(r.output_len for r in kept) / len(kept) == pytest.approx(348.41, abs=0.3)


def test_traces_bring_their_times(shared: Path) -> None:
    azure = load(shared / "data/azure_llm_2023_conv_2000.csv", "azure")
    assert azure.has_arrivals and azure.requests[0].arrival == 0.0
    assert azure.requests[1].arrival == pytest.approx(4.314579, abs=1e-6)
    mooncake = load(shared / "data/mooncake_conversation_300.jsonl")
    assert mooncake.requests[-1].arrival == pytest.approx(102.0)
    assert len({h for r in mooncake.requests for h in r.block_hashes}) == 7_814
    assert sum(len(r.block_hashes) for r in mooncake.requests) == 8_490


def test_chat_from_real_files(shared: Path) -> None:
    table = load(shared / "data/sharegpt_multiturn_lengths_llama2.csv", "chat")
    assert (table.kept, len(table.requests)) == (5_678, 30_731)
    assert mean_lengths(table) == pytest.approx((790.07, 438.70), abs=0.006)
    assert max(r.prompt_len for r in table.requests) == 1024
    assert max(r.output_len for r in table.requests) == 1016
    tools = load(shared / "data/sharegpt_toolcall_300.json", "chat")
    assert (tools.kept, len(tools.requests)) == (300, 746)
    dummy = load(shared / "data/fastchat_dummy_conversation.json", "chat")
    assert (dummy.kept, len(dummy.requests)) == (500, 1000)


def test_the_synthetic_chat_behaves_like_the_real_turns(shared: Path) -> None:
    """The same arrival process over real and synthetic conversations, at the size of a usual run and of all turns."""
    import numpy as np

    from pagedcli.workloads import WorkloadOptions

    def side(workload: Workload, name: str) -> np.ndarray:
        return np.array([getattr(r, name) for r in workload.requests])

    bare = WorkloadOptions(synthetic=True, text=False)
    begun = load_workload("chat", trace=shared / "data/sharegpt_multiturn_lengths_llama2.csv", num_requests=8000)
    drawn = load_workload("chat", num_requests=8000, seed=3, options=bare)
    for name in ("prompt_len", "output_len"):
        assert side(drawn, name).mean() == pytest.approx(side(begun, name).mean(), rel=0.03)
        assert np.percentile(side(drawn, name), 99) == pytest.approx(np.percentile(side(begun, name), 99), rel=0.01)
    assert np.median(side(drawn, "output_len")) == pytest.approx(np.median(side(begun, "output_len")), rel=0.04)


def test_turns_of_the_fit_against_the_real_turns(shared: Path) -> None:
    """All turns with equal weight: queries, answers and history-cut prompts within 1 % of the real means."""
    import numpy as np

    from pagedcli.workloads.chat_model import ChatModel, simulate_turns
    from pagedcli.workloads.lengths import load_sample
    from pagedcli.workloads.readers import read_table
    from pagedcli.workloads.traces import conversations_from_lengths

    def prompts(conversation: np.ndarray, query: np.ndarray, output: np.ndarray) -> np.ndarray:
        before = np.cumsum(query + output) - output
        starts = np.flatnonzero(np.diff(conversation, prepend=-1))
        base = np.repeat((before - query)[starts], np.diff(np.append(starts, len(query))))
        return np.minimum(before - base, 1024)

    rows = read_table(shared / "data/sharegpt_multiturn_lengths_llama2.csv").rows()
    turns = conversations_from_lengths([(r.prompt_len, r.output_len) for r in rows])
    conversation = np.repeat(np.arange(len(turns)), [len(c) for c in turns])
    query, output = np.array([t for c in turns for t in c]).T
    np.testing.assert_array_equal(prompts(conversation, query, output), [min(r.prompt_len, 1024) for r in rows])
    drawn = simulate_turns(ChatModel.from_json(load_sample("chat")["chat"]), 60_000, np.random.default_rng(4))
    for ours, real in ((drawn.query, query), (drawn.output, output),
                       (prompts(drawn.conversation, drawn.query, drawn.output), prompts(conversation, query, output))):
        assert ours.mean() == pytest.approx(real.mean(), rel=0.01)
        assert np.median(ours) == pytest.approx(np.median(real), rel=0.03)
        assert np.percentile(ours, 99) == pytest.approx(np.percentile(real, 99), rel=0.03)
