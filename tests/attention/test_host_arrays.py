"""Arrays in host memory that numpy and torch share: same memory, same numbers, same alignment."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from pagedcli.attention import cpu_team
from pagedcli.attention.host_arrays import (
    HOST_DTYPES,
    LINE,
    address,
    aligned_copy,
    aligned_zeros,
    as_array,
    as_tensor,
    host_floats,
    lazy_zeros,
    words_of,
)
from pagedcli.core.dtypes import DTYPE_BYTES, dtype_name


@pytest.mark.parametrize("name", HOST_DTYPES)
def test_a_tensor_and_its_array_are_one_memory(name: str) -> None:
    array = lazy_zeros((3, 4), HOST_DTYPES[name])
    tensor = as_tensor(array)
    assert address(array) == address(tensor) and dtype_name(tensor.dtype) == name == dtype_name(array.dtype)
    assert array.itemsize == tensor.itemsize == DTYPE_BYTES[name]
    tensor[1, 2] = 1.5
    assert float(array[1, 2]) == 1.5 and int((words_of(tensor) != 0).sum()) == 1
    again = as_array(tensor.t())
    assert address(again) == address(array) and float(again[2, 1]) == 1.5 and again.dtype == array.dtype


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_both_round_and_widen_alike(name: str) -> None:
    numbers = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    ours = numbers.astype(HOST_DTYPES[name])
    theirs = torch.from_numpy(numbers).to(getattr(torch, str(HOST_DTYPES[name])))
    assert (words_of(ours) == words_of(theirs)).all()
    assert (host_floats(theirs) == theirs.float().numpy()).all() and (host_floats(ours) == host_floats(theirs)).all()


def test_float32_is_not_copied_and_strides_are() -> None:
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert host_floats(numbers) is numbers
    assert address(host_floats(torch.from_numpy(numbers))) == address(numbers)
    assert host_floats(numbers.T).flags.c_contiguous


@pytest.mark.parametrize("shape", [(1,), (3, 5), (65, 64)])
def test_kernels_get_whole_cache_lines(shape: tuple[int, ...]) -> None:
    for _ in range(20):
        made = aligned_zeros(shape, HOST_DTYPES["bf16"])
        assert address(made) % LINE == 0 and made.shape == shape and not made.any()
    given = np.random.default_rng(1).normal(size=shape[::-1]).T
    copy = aligned_copy(given)
    assert address(copy) % LINE == 0 and copy.flags.c_contiguous and (copy == given).all()


def test_threads_are_torchs_where_it_is_in_use() -> None:
    before = torch.get_num_threads()
    try:
        cpu_team.set_threads(3)
        assert torch.get_num_threads() == cpu_team.threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("variable", "wanted"), [("", 5), ("3", 5), ("x", 2), ("1", 64)])
def test_threads_without_torch_are_as_told(variable: str, wanted: int) -> None:
    assert _threads_of(f"cpu_team.set_threads({wanted})", variable) == (wanted, "Python threads", False)


@pytest.mark.parametrize("variable", ["", "1", " 1 ", "1,2", "0", "x", "9999"])
def test_threads_without_torch_are_as_many_as_it_would_use(variable: str) -> None:
    """More than the cores never: a program whose threads wait for one another would take for ever."""
    many, *rest = _threads_of("", variable)
    assert rest == ["Python threads", False]
    with_torch, _, there = _threads_of("import torch", variable)
    assert there and many == min(with_torch, cpu_team._cores())


def _threads_of(before: str, variable: str) -> tuple[int, str, bool]:
    """How many threads a process has with this OMP_NUM_THREADS, whose, and whether torch is in it."""
    code = (f"import sys\nfrom pagedcli.attention import cpu_team\n{before}\n"
            "print(cpu_team.threads(), cpu_team.Team().threads_of, 'torch' in sys.modules, sep='|')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={"OMP_NUM_THREADS": variable})
    threads, whose, torch_there = done.stdout.strip().split("|")
    return int(threads), whose, torch_there == "True"
