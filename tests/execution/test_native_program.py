"""Programs of native operations: every thread finishes an operation before any starts the next."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedcli.attention.cpu_team import Team
from pagedcli.execution.native_program import Program
from pagedcli.execution.row_ops import WORDS
from pagedcli.execution.row_team import compiled


def doubling(steps: int, rows: int) -> tuple[list[tuple[int, int]], list[torch.Tensor], np.ndarray, torch.Tensor]:
    """Operations that each reverse the rows of the buffer before them."""
    buffers = [torch.arange(rows, dtype=torch.float32)[:, None].repeat(1, 4)]
    buffers += [torch.zeros(rows, 4) for _ in range(steps)]
    backwards = torch.arange(rows - 1, -1, -1)
    blocks = np.zeros((steps, WORDS), np.int64)
    operations = []
    for step in range(steps):
        blocks[step, :9] = (rows, 1, 0, backwards.data_ptr(), buffers[step].data_ptr(), buffers[step + 1].data_ptr(), 4,
                            4, 4)
        operations.append((compiled("take", "fp32").address, int(blocks[step:].ctypes.data)))
    return operations, buffers, blocks, backwards


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_operations_run_in_order_on_all_threads(threads: int) -> None:
    operations, buffers, blocks, backwards = doubling(101, 64)
    program = Program(Team(), operations)
    for _ in range(5):
        blocks[:, 2] = 0
        for buffer in buffers[1:]:
            buffer.zero_()
        program.run(threads)
        assert torch.equal(buffers[-1], buffers[0][backwards]), "an odd number of turns"
        assert torch.equal(buffers[-2], buffers[0])


def test_shares_of_time_sum_to_one() -> None:
    operations, *kept = doubling(7, 500)
    program = Program(Team(), operations)
    assert program.shares.shape == (7,)
    program.run(2)
    assert program.shares.sum() == pytest.approx(1.0) and (program.shares > 0).all() and len(kept) == 3
