"""Synthetic sets against the published figures and, where they are at hand, the real lengths."""

from pathlib import Path

import numpy as np
import pytest

from pagedcli.core.errors import UsageError
from pagedcli.workloads import TraceRequest, Workload, WorkloadOptions, find_spec, load_workload
from pagedcli.workloads.lengths import (
    KNOTS,
    LengthModel,
    Marginal,
    load_sample,
    pair_model,
    rank_correlation,
    spread_normals,
)
from pagedcli.workloads.readers import read_table

BARE = WorkloadOptions(synthetic=True, text=False)

# (set, prompt mean, median, p99, output mean, median, p99, rank correlation): measured with another program (pandas)
# on the lengths after the paper's filter.
TARGETS = [
    ("sharegpt", 161.184, 35, 1460, 337.997, 271, 1280, 0.2143),
    ("alpaca", 18.0, 14, 71, 58.27, 44, 264, -0.2856),
    ("wmt16", 30.475, 27, 92, 60.73, 52, 197, 0.9359),
]


def lengths(requests: tuple[TraceRequest, ...]) -> np.ndarray:
    return np.array([(r.prompt_len, r.output_len) for r in requests])


def check(pairs: np.ndarray, means: tuple[float, float], medians: tuple[float, float],
          p99: tuple[float, float]) -> None:
    for side in (0, 1):
        values = pairs[:, side]
        assert values.mean() == pytest.approx(means[side], rel=0.01)
        assert np.median(values) == pytest.approx(medians[side], rel=0.03)
        assert np.percentile(values, 99) == pytest.approx(p99[side], rel=0.03)


@pytest.mark.parametrize("target", TARGETS, ids=[t[0] for t in TARGETS])
@pytest.mark.parametrize("count", [1000, 20_000])
def test_synthetic_sets_have_the_measured_statistics(target: tuple, count: int) -> None:
    name, prompt_mean, prompt_median, prompt_p99, output_mean, output_median, output_p99, correlation = target
    workload = load_workload(name, num_requests=count, seed=11, options=BARE)
    pairs = lengths(workload.requests)
    assert workload.synthetic and len(pairs) == count
    assert rank_correlation(pairs[:, 0], pairs[:, 1]) == pytest.approx(correlation, abs=0.1 if count < 5000 else 0.025)
    if count < 5000:  # the 99th percentile of 1,000 requests hangs on ten of them
        prompt_p99, output_p99 = np.percentile(pairs, 99, axis=0)
    check(pairs, (prompt_mean, output_mean), (prompt_median, output_median), (prompt_p99, output_p99))


def test_sharegpt_meets_the_printed_means_and_the_filter() -> None:
    pairs = lengths(load_workload("sharegpt", num_requests=30_000, options=BARE).requests)
    assert pairs.sum(axis=1).max() < 2048
    assert pairs[:, 0].mean() == pytest.approx(161.31, rel=0.01)
    assert pairs[:, 1].mean() == pytest.approx(337.99, rel=0.01)


def test_alpaca_can_be_scaled_to_the_printed_means() -> None:
    workload = load_workload("alpaca-paper", num_requests=20_000, options=BARE)
    pairs = lengths(workload.requests)
    assert pairs[:, 0].mean() == pytest.approx(19.31, rel=0.005)
    assert pairs[:, 1].mean() == pytest.approx(58.45, rel=0.005)
    assert "scaled to the paper's printed means 19.31 / 58.45" in workload.source
    other = load_workload("alpaca", num_requests=10, options=WorkloadOptions(synthetic=True, paper_means=True))
    assert "scaled" in other.source
    assert "scaled" not in load_workload("alpaca", num_requests=10, options=BARE).source


def test_vllm_filter_on_the_synthetic_set() -> None:
    pairs = lengths(load_workload("sharegpt-vllm", num_requests=20_000, options=BARE).requests)
    assert pairs.min() >= 4 and pairs[:, 0].max() <= 1024 and pairs.sum(axis=1).max() <= 2048
    # Measured on the real lengths: 119.6 and 348.4. The fit was made for the paper's filter, hence the wider band.
    assert pairs.mean(axis=0) == pytest.approx([119.58, 348.41], rel=0.025)


@pytest.mark.parametrize("name", ["sharegpt", "alpaca", "wmt16"])
def test_synthetic_sets_against_the_real_lengths(shared: Path, real_sharegpt: Workload, name: str) -> None:
    file = shared / "paper" / f"{name.removesuffix('16')}_lengths.csv"
    real = lengths((real_sharegpt if name == "sharegpt" else load_workload(name, trace=file)).requests)
    drawn = lengths(load_workload(name, num_requests=50_000, seed=2, options=BARE).requests)
    check(drawn, tuple(real.mean(axis=0)), tuple(np.median(real, axis=0)), tuple(np.percentile(real, 99, axis=0)))
    assert rank_correlation(*drawn.T) == pytest.approx(rank_correlation(*real.T), abs=0.015)
    for side in (0, 1):  # the whole distribution, not three points of it
        grid = np.unique(real[:, side])
        gap = np.abs(np.searchsorted(np.sort(real[:, side]), grid, "right") / len(real)
                     - np.searchsorted(np.sort(drawn[:, side]), grid, "right") / len(drawn))
        assert gap.max() < 0.015


def test_reservations_of_the_synthetic_set_match_the_real_one(real_sharegpt: Workload) -> None:
    """What Orca's allocator sees: mean blocks of 16, rounded to powers of two, exact and by the doubled estimate."""
    def chunks(pairs: np.ndarray) -> np.ndarray:
        prompt, output = pairs.T
        estimate = 2 ** np.ceil(np.log2(output))
        blocks = [np.ceil((prompt + output) / 16), np.ceil(np.minimum(prompt + estimate, 2048) / 16)]
        return np.array([(2 ** np.ceil(np.log2(b))).mean() for b in blocks])

    real = lengths(real_sharegpt.requests)
    drawn = lengths(load_workload("sharegpt", num_requests=50_000, options=BARE).requests)
    assert chunks(drawn) == pytest.approx(chunks(real), rel=0.015)


def test_stratified_normals_keep_their_correlation() -> None:
    rows = spread_normals(np.random.default_rng(0), 50_000, 0.6)
    assert np.corrcoef(rows)[0, 1] == pytest.approx(0.6, abs=0.01)
    assert rows.mean(axis=1) == pytest.approx([0, 0], abs=1e-3)
    assert rows.std(axis=1) == pytest.approx([1, 1], abs=2e-3)


def test_a_tight_limit_is_kept_even_by_tiny_samples() -> None:
    model = pair_model(load_sample("sharegpt")["pairs"])
    tight = LengthModel(model.prompt, model.output, 0.9, max_total=300)
    for seed in range(20):
        pairs = tight.sample(3, np.random.default_rng(seed))
        assert pairs.sum(axis=1).max() <= 300 and pairs.min() >= 1


def test_seeds_repeat_and_differ() -> None:
    first, again, other = (lengths(load_workload("sharegpt", num_requests=50, seed=s, options=BARE).requests)
                           for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_the_shipped_files_hold_statistics_only() -> None:
    """Nothing but quantiles and summaries: far fewer numbers than rows, and no text of any data set."""
    for name in ("sharegpt", "alpaca", "wmt16", "azure", "mooncake"):
        data = load_sample(name)
        assert len(data["pairs"]["prompt"]) == len(KNOTS) < data["measured"]["rows"]
        assert {k for k, v in data.items() if isinstance(v, str)} == {"name", "measured_from"}


def test_a_broken_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="increasing"):
        Marginal(tuple(float(-k) for k in range(len(KNOTS))))


def test_ranks_average_ties() -> None:
    assert rank_correlation([1, 2, 2, 4], [10, 20, 20, 40]) == pytest.approx(1.0)
    # By hand: ranks 1, 2.5, 2.5, 4 against 4, 1, 2, 3 give -1.5 / sqrt(4.5 * 5) = -0.3162.
    assert rank_correlation([1, 2, 2, 4], [9, 1, 2, 5]) == pytest.approx(-0.31622777, abs=1e-6)


def test_unknown_names_are_listed() -> None:
    with pytest.raises(UsageError, match=r"no such workload; known are alpaca.*sharegpt"):
        find_spec("share-gpt")


def test_refitting_the_real_lengths_gives_the_shipped_file(shared: Path) -> None:
    from pagedcli.workloads.fit import fit_pairs, pairs_json

    rows = [(r.prompt_len, r.output_len) for r in read_table(shared / "paper" / "wmt_lengths.csv").rows()]
    fitted = pairs_json(fit_pairs(np.array([r[0] for r in rows]), np.array([r[1] for r in rows]), 2047))
    assert fitted == load_sample("wmt16")["pairs"]
