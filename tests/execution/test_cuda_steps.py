"""The GPU's steps, pool size and profile run without a GPU: fakes for what only a GPU has, kernels on the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcli.attention.cuda import CudaBackend
from pagedcli.attention.cuda_graph import Forward, padded_rows
from pagedcli.attention.interface import BatchLayout, KVLayout, LayerSpec
from pagedcli.core.config import CacheConfig
from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.core.plan import Slice, StepPlan
from pagedcli.execution.cuda_path import profile_plan, room_beside
from pagedcli.execution.cuda_steps import CudaSteps, table_widths
from pagedcli.execution.device_path import HostSteps, LargestStep
from pagedcli.execution.flat_batch import flatten
from pagedcli.execution.kv_store import Room, size_pool
from pagedcli.execution.torch_executor import TorchExecutor
from tests.emulator.backend import EmulatedLauncher
from tests.emulator.cases import Kernels
from tests.emulator.emulator import compiler
from tests.execution.tiny_models import load, save_model

BLOCK = 8
PROMPTS = [[3 + (7 * i + 5 * s) % 90 for i in range(4 + 3 * s)] for s in range(5)]
TABLES = [[3, 17, 9], [1, 30, 22], [12, 5, 14], [2, 7, 21], [40, 41, 42]]


class FixedGraphs:
    """What a graph is to its caller: the same inputs' addresses every time, one output that the next run overwrites."""

    def __init__(self, backend: CudaBackend, forward: Forward, max_blocks: int) -> None:
        self.backend, self.forward, self.max_blocks = backend, forward, max_blocks
        self.outs: dict[int, torch.Tensor] = {}
        self.runs: list[int] = []

    def run(self, batch: BatchLayout) -> torch.Tensor | None:
        rows = padded_rows(batch.num_seqs)
        assert rows is not None and batch.tables.shape[1] <= self.max_blocks
        self.backend.prepare_graph(batch, rows, self.max_blocks)
        self.runs.append(rows)
        made = self.forward(rows)
        return self.outs.setdefault(rows, made.clone()).copy_(made)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> TorchExecutor:
    folder = save_model("llama", tmp_path_factory.mktemp("m"), hidden_size=128, num_attention_heads=4,
                        num_key_value_heads=2, head_dim=32)
    return load(folder, block_size=BLOCK)


def plans() -> list[StepPlan]:
    """Prompts in two chunks, then decode steps of growing and shrinking batches, one with rows nobody wants."""
    seqs = range(len(PROMPTS))
    steps = [StepPlan([Slice(s, PROMPTS[s][:3], 0, TABLES[s], 0) for s in seqs]),
             StepPlan([Slice(s, PROMPTS[s][3:], 3, TABLES[s], 1) for s in seqs])]
    at = [len(prompt) for prompt in PROMPTS]
    for members, wanted in (((0, 1, 2), 1), ((4, 2, 0, 1, 3), 1), ((2,), 1), ((3, 1), 0), ((1, 3, 4), 1)):
        steps.append(StepPlan([Slice(s, [5 + s], at[s], TABLES[s], wanted) for s in members]))
        for s in members:
            at[s] += 1
    return steps


@pytest.mark.skipif(compiler() is None, reason="the CUDA emulator needs g++, which is not installed")
def test_graph_steps_equal_plain_ones_and_the_reference(executor: TorchExecutor) -> None:
    made: list[FixedGraphs] = []

    def make(*given: Any) -> FixedGraphs:
        made.append(FixedGraphs(*given))
        return made[-1]

    backend = CudaBackend(EmulatedLauncher(Kernels(per_module=4)))
    layout = KVLayout(executor.decoder.specs, BLOCK)
    results = (executor.execute(plan).logits for plan in plans())
    expected = [None if logits is None else logits.clone() for logits in results]
    outputs = []
    for graphs in (True, False):
        backend.bind(layout, torch.zeros(64, layout.block_elements))
        executor.decoder.attach(backend)
        steps = CudaSteps(executor.decoder, backend, executor.limits, graphs=graphs, make_graphs=make)
        steps.try_graphs()
        with torch.inference_mode():
            found = (steps.run(flatten(plan, BLOCK)) for plan in plans())
            # Copies, since the next run writes where this one's logits lie.
            outputs.append([None if logits is None else logits.clone() for logits in found])
        assert ("CUDA graphs for up to 256 sequences" in steps.notes[0]) is graphs
    executor.decoder.attach(executor.backend)
    (used,) = made
    assert used.runs == [1, 4, 8, 1, 4]  # the trial, then all decode steps but the one that wants no logits
    for want, graphed, plain in zip(expected, *outputs, strict=True):
        if want is None:
            assert graphed is None and plain is None
            continue
        assert graphed is not None and plain is not None
        assert torch.allclose(graphed, want, atol=1e-4) and torch.allclose(plain, want, atol=1e-4)


class PlainBackend:
    """The reference in a CudaBackend's place, for steps that no graph runs."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.device = inner, torch.device("cpu")

    def prepare(self, batch: BatchLayout) -> None:
        self.inner.prepare(batch)


def test_a_model_that_cannot_be_captured_runs_without_graphs_and_says_so(executor: TorchExecutor) -> None:
    class Failing:
        def __init__(self, *_: Any) -> None: ...

        def run(self, batch: BatchLayout) -> torch.Tensor | None:
            raise CannotRunError("operation not permitted when stream is capturing", "graph_capture")

    backend: Any = PlainBackend(executor.backend)
    steps = CudaSteps(executor.decoder, backend, executor.limits, graphs=True, make_graphs=Failing)
    steps.try_graphs()
    assert "launched kernel by kernel" in steps.notes[0] and "stream is capturing" in steps.notes[0]
    want = HostSteps(executor.decoder, executor.backend)
    with torch.inference_mode():
        for plan in plans():
            batch = flatten(plan, BLOCK)
            ours, theirs = steps.run(batch), want.run(batch)
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)


def test_other_faults_of_a_graph_are_not_hidden(executor: TorchExecutor) -> None:
    class Broken:
        def __init__(self, *_: Any) -> None: ...

        def run(self, batch: BatchLayout) -> torch.Tensor | None:
            raise CannotRunError("illegal memory access", "launch_failed")

    backend: Any = PlainBackend(executor.backend)
    with pytest.raises(CannotRunError, match="illegal memory"):
        CudaSteps(executor.decoder, backend, executor.limits, graphs=True, make_graphs=Broken).try_graphs()


def test_notes_of_steps_reach_the_summary_once(executor: TorchExecutor) -> None:
    class Noted(HostSteps):
        notes = ("decode steps: so and so",)

    run = TorchExecutor(executor.decoder, executor.backend, executor.store,
                        Noted(executor.decoder, executor.backend), executor.limits, executor.info)
    run.info = run.info  # build.py sets what it read, with more seconds
    assert run.info.notes.count("decode steps: so and so") == 1


def test_widths_of_tables() -> None:
    assert table_widths(2048, 16) == (64, 128)
    assert table_widths(1000, 16) == (63,)
    assert table_widths(131_072, 16) == (64, 256, 1024, 4096, 8192)


class FakeMemory:
    """80 GB of which another process holds 1 and the weights 26; the largest step takes 3 for a while."""

    def __init__(self) -> None:
        self.now, self.top, self.elsewhere = 26 * 10**9, 26 * 10**9, 10**9
        self.settled = 0

    def settle(self) -> None:
        self.top = self.now
        self.settled += 1

    def allocated(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.top

    def free_and_total(self) -> tuple[int, int]:
        return 80 * 10**9 - self.now - self.elsewhere, 80 * 10**9


def test_the_pool_gets_what_weights_and_the_largest_step_leave() -> None:
    memory = FakeMemory()

    def step() -> None:
        assert memory.settled == 1, "old peaks must be forgotten first"
        memory.top = memory.now + 3 * 10**9

    room = room_beside(memory, 0.9, step)
    assert room.bytes == (72 - 27 - 3) * 10**9
    assert "90% of the GPU's 80,000,000,000 bytes, less 27,000,000,000 in use and 3,000,000,000" in room.note
    layout = KVLayout((LayerSpec(40, 40, 128, 128, 0.1),) * 40, 16)
    size = size_pool(layout, torch.float16, CacheConfig(), torch.device("cuda"), 2048, room)
    assert size.num_blocks == room.bytes // (40 * 2 * 40 * 128 * 16 * 2) and room.note in size.note
    given = size_pool(layout, torch.float16, CacheConfig(num_blocks=7), torch.device("cuda"), 2048, room)
    assert given.num_blocks == 7
    with pytest.raises(CannotRunError, match=r"has 0 bytes .*Raise --gpu-memory-utilization \(now 0.3\)"):
        size_pool(layout, torch.float16, CacheConfig(), torch.device("cuda"), 2048,
                  room_beside(FakeMemory(), 0.3, lambda: None))
    assert isinstance(room, Room)


def test_utilization_has_limits() -> None:
    for wrong in (0.0, 1.01, -1.0):
        with pytest.raises(UsageError, match="--gpu-memory-utilization"):
            CacheConfig(gpu_memory_utilization=wrong)


@pytest.mark.parametrize(("rows", "positions", "lengths"), [
    (2560, 2048, [2048, 512]), (2048, 2048, [2048]), (100, 2048, [100]), (300, 128, [128, 128, 44])])
def test_the_profile_step_is_the_largest(rows: int, positions: int, lengths: list[int]) -> None:
    plan, blocks = profile_plan(LargestStep(rows, 256, positions), 16)
    assert [len(item.tokens) for item in plan.slices] == lengths and plan.num_tokens == rows
    assert plan.num_logit_rows == min(256, lengths[0])
    assert blocks == -(-lengths[0] // 16)
    batch = flatten(plan, 16)
    assert batch.layout.slots.max() < blocks * 16


def test_profile_step_runs_on_a_model(executor: TorchExecutor, tmp_path: Path) -> None:
    del tmp_path
    plan, blocks = profile_plan(LargestStep(50, 16, 24), BLOCK)
    assert blocks == 3
    assert executor.execute(plan).logits.shape == (16, executor.limits.vocab_size)
