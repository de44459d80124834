"""The cost model: loads counted by hand, terms with the right size, and published profiles as a check."""

from __future__ import annotations

import pytest

from pagedcli.core.plan import Slice, StepPlan
from pagedcli.execution.cost_model import CostModel, StepLoad
from pagedcli.execution.hardware import Coefficients, Hardware, find_hardware
from pagedcli.execution.shapes import SHAPES
from pagedcli.execution.simulated import Deployment, SimulatedExecutor

IDEAL = Coefficients(weight_efficiency=1, flop_efficiency=1, kv_efficiency=1, attention_efficiency=1, step_seconds=0)


def _hardware(bandwidth: float = 1e12, flops: float = 1e14) -> Hardware:
    return Hardware("x", "x", 40 << 30, bandwidth, flops, 1e11, 1e10, "", IDEAL)


def test_a_load_counts_slices() -> None:
    plan = StepPlan([Slice(0, (5,), 9, (0,)), Slice(1, (1, 2, 3), 0, (1,)), Slice(2, (7, 8), 4, (2,))],
                    copies=[(0, 1)], swap_in=[(0, 3), (1, 4)])
    load = StepLoad.of(plan)
    assert (load.decodes, load.context) == (1, 10)
    assert (load.prompts, load.prompt_tokens) == (2, 5)
    assert load.prompt_pairs == (1 + 2 + 3) + (5 + 6)  # key 1 .. own position, for each token
    assert (load.copies, load.swaps, load.tokens) == (1, 2, 6)


def test_a_lone_decode_reads_the_weights_once() -> None:
    shape = SHAPES["opt-13b"]
    model = CostModel(_hardware(), shape)
    assert model.seconds(StepLoad(decodes=1)) == pytest.approx(shape.weight_bytes("fp16") / 1e12, rel=0.001)
    read = model.seconds(StepLoad(decodes=1, context=1000)) - model.seconds(StepLoad(decodes=1))
    assert read == pytest.approx(1000 * 819_200 / 1e12)  # 800 KiB a token, paper section 3


def test_a_step_waits_for_its_swaps() -> None:
    model = CostModel(_hardware(), SHAPES["opt-13b"])
    alone, moving = (model.seconds(StepLoad(decodes=1, swaps=blocks)) for blocks in (0, 30))
    assert moving - alone == pytest.approx(30 * 16 * 819_200 / (1e10 * 0.5))  # half of the host link is reached
    assert sum(model.parts(StepLoad(decodes=1, swaps=30)).values()) == pytest.approx(moving)


def test_many_tokens_are_bound_by_arithmetic() -> None:
    shape = SHAPES["opt-13b"]
    model = CostModel(_hardware(), shape)
    seconds = model.seconds(StepLoad(prompts=1, prompt_tokens=2000))
    assert seconds == pytest.approx(2 * shape.active_parameters * 2000 / 1e14, rel=0.01)


def test_devices_share_the_work_and_pay_for_talking() -> None:
    shape = SHAPES["opt-66b"]
    load = StepLoad(decodes=8, context=4000)
    alone, four = (CostModel(_hardware(), shape, count).seconds(load) for count in (1, 4))
    assert 0.24 < four / alone < 0.26
    use = Coefficients(**{**IDEAL.as_dict(), "allreduce_seconds": 1e-3})
    slower = CostModel(_hardware(), shape, 4, coefficients=use).seconds(load)
    assert slower - four == pytest.approx(64 * 2 * 2 * 1e-3)  # layers x two all-reduces x log2(4)


def test_an_exchange_takes_its_share_of_the_link() -> None:
    """Of n devices each sends 2 (n - 1) / n of a token's activations twice a layer (ring all-reduce)."""
    shape = SHAPES["opt-66b"]
    full, quarter = (CostModel(_hardware(), shape, 4, coefficients=Coefficients(
        **{**IDEAL.as_dict(), "link_efficiency": share})) for share in (1.0, 0.25))
    assert full.token == pytest.approx(2 * 64 * (2 * 3 / 4) * 9216 * 2 / 1e11)
    assert quarter.token == pytest.approx(4 * full.token)
    assert CostModel(_hardware(), shape).token == 0.0


def test_parts_add_up() -> None:
    model = Deployment(find_hardware("a100-40gb"), SHAPES["opt-13b"]).cost_model
    load = StepLoad(30, 12_000, 2, 300, 30_000, 3, 5)
    assert sum(model.parts(load).values()) == pytest.approx(model.seconds(load))


@pytest.mark.parametrize(("model", "devices", "decode"), [
    ("opt-13b", 1, lambda batch, context: 23.48 + 5.93e-4 * context + 0.0607 * batch),
    ("opt-66b", 4, lambda batch, context: 39.58 + 6.95e-4 * context + 0.1358 * batch),
])
def test_decode_steps_are_near_a_published_profile(model: str, devices: int, decode: object) -> None:
    """DistServe's measured profile of OPT on A100-80GB (ms): other software than the paper's, so within 40 %."""
    cost = Deployment(find_hardware("a100-80gb"), SHAPES[model], devices).cost_model
    for batch, context in ((1, 300), (16, 6000), (32, 13_000), (64, 26_000)):
        ours = 1e3 * cost.seconds(StepLoad(decodes=batch, context=context))
        assert ours == pytest.approx(decode(batch, context), rel=0.4)  # type: ignore[operator]


def test_the_executor_says_that_it_simulates() -> None:
    executor = SimulatedExecutor(Deployment(find_hardware("a100-40gb"), SHAPES["opt-13b"]))
    assert executor.info.simulated and "no model was run" in executor.info.notes[0]
    assert executor.limits.num_blocks == 983
    assert executor.execute(StepPlan([Slice(0, (1,), 0, (0,))])).seconds > 0.01
