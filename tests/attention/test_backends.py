"""Backends by name, the thread team, and batches at the edge."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

from pagedcli.attention.backends import BACKENDS, make_backend
from pagedcli.attention.cpu import CpuBackend
from pagedcli.attention.cpu_team import Team
from pagedcli.attention.interface import KVLayout, LayerSpec, build_layout
from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.core.plan import Slice, StepPlan

from .cases import Sequences, in_chunks, run


def test_names() -> None:
    assert make_backend("cpu").name == "cpu"
    assert make_backend("reference").name == "reference"
    with pytest.raises(UsageError, match=r"'gpu': must be one of cpu, reference, cuda"):
        make_backend("gpu")


def test_a_backend_that_is_missing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "cuda", ("pagedcli.attention.absent", "CudaBackend"))
    with pytest.raises(CannotRunError, match=r"cuda cannot run here: No module named 'pagedcli.attention.absent'"):
        make_backend("cuda")


def test_what_the_cpu_backend_refuses() -> None:
    backend = CpuBackend()
    assert backend.supports(LayerSpec(4, 2, 64, 64, 1.0), torch.bfloat16, 16) is None
    assert "float64" in str(backend.supports(LayerSpec(4, 2, 64, 64, 1.0), torch.float64, 16))
    assert "no multiple" in str(backend.supports(LayerSpec(5, 2, 64, 64, 1.0), torch.bfloat16, 16))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have their own thread pools")
def test_torchs_threads_are_used() -> None:
    assert CpuBackend().threads_of == "torch's OpenMP"


def test_python_threads_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, lengths = LayerSpec(9, 3, 64, 64, 0.125), [70, 33, 128]
    seqs = Sequences(spec, lengths, torch.bfloat16)
    monkeypatch.setattr("pagedcli.attention.cpu.SMALL_WRITE", -1)
    monkeypatch.setattr("pagedcli.attention.cpu.SMALL_WORK", -1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        first = run(CpuBackend(), seqs, 16, torch.bfloat16, in_chunks(lengths, 1))
        monkeypatch.setattr("pagedcli.attention.cpu_team._openmp", lambda torch_in_use: None)
        backend = CpuBackend()
        assert backend.threads_of == "Python threads"
        second = run(backend, seqs, 16, torch.bfloat16, in_chunks(lengths, 1))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    team = Team()
    team.close()
    team.close()


def test_threads_that_the_system_refuses_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a wait without end for those that never come; the ones that did start end."""
    monkeypatch.setattr("pagedcli.attention.cpu_team._openmp", lambda torch_in_use: None)
    start, before = threading.Thread.start, threading.active_count()

    def refusing(self: threading.Thread) -> None:
        if threading.active_count() >= before + 2:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    with pytest.raises(CannotRunError, match=r"^the system refuses to start 9 threads \(can't start new thread\)"):
        Team().run(0, 0, 9)
    monkeypatch.undo()
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_an_empty_batch_gives_zeros(name: str) -> None:
    spec = LayerSpec(4, 2, 64, 64, 0.125)
    layout = KVLayout((spec,), 16)
    backend = make_backend(name)
    pool = torch.full((2, layout.block_elements), float("nan"))
    backend.bind(layout, pool)
    batch = build_layout(StepPlan([]), 16, 8)
    backend.prepare(batch)
    q, kv = torch.full((8, 4, 64), float("nan")), torch.full((8, 2, 64), float("nan"))
    assert torch.equal(backend.attend(0, q, kv, kv, spec), torch.zeros(8, 4, 64))
    assert bool(pool.isnan().all())


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_strided_inputs_of_other_types(name: str) -> None:
    """q, k and v as slices of one fused projection, in float64, over a float32 cache."""
    spec = LayerSpec(4, 2, 16, 16, 0.25)
    seqs = Sequences(spec, [20], torch.float32, seed=2)
    want = run(make_backend("reference"), seqs, 16, torch.float32, [[20]])[0]
    layout = KVLayout((spec,), 16)
    backend = make_backend(name)
    backend.bind(layout, torch.full((3, layout.block_elements), float("nan")))
    backend.prepare(build_layout(StepPlan([Slice(0, [0] * 20, 0, [2, 0])]), 16))
    fused = torch.cat([seqs.q[0].flatten(1), seqs.k[0].flatten(1), seqs.v[0].flatten(1)], 1).double()
    q, k, v = (part.unflatten(1, (-1, 16)) for part in fused.split([64, 32, 32], 1))
    got = backend.attend(0, q, k, v, spec)
    assert got.dtype == torch.float64
    assert float((got - want).abs().max()) < 1e-5
