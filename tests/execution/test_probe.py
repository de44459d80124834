"""How the load-time trial weighs a disagreement."""

from __future__ import annotations

import math

import pytest
import torch

from pagedcli.execution.probe import disagreement


def test_one_rerouted_row_is_forgiven_only_in_low_precision() -> None:
    theirs = torch.ones(9, 4)
    ours = theirs.clone()
    ours[3] = 2.0
    assert disagreement(ours, theirs, exact=True) == pytest.approx(1.0)
    assert disagreement(ours, theirs, exact=False) == 0
    assert disagreement(theirs * 1.5, theirs, exact=False) == pytest.approx(0.5)


def test_anything_not_finite_fails() -> None:
    theirs = torch.ones(9, 4)
    ours = theirs.clone()
    ours[0, 0] = math.nan
    assert disagreement(ours, theirs, exact=False) == math.inf
    assert disagreement(torch.zeros(2, 2), torch.zeros(2, 2), exact=True) == 0
