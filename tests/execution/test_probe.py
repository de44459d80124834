"""How the load-time trial weighs a disagreement."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from pagedcli.execution.probe import disagreement


def test_one_rerouted_row_is_forgiven_only_in_low_precision() -> None:
    theirs = np.ones((9, 4), np.float32)
    ours = theirs.copy()
    ours[3] = 2.0
    assert disagreement(ours, theirs, exact=True) == pytest.approx(1.0)
    assert disagreement(ours, theirs, exact=False) == 0
    assert disagreement(theirs * 1.5, theirs, exact=False) == pytest.approx(0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_anything_not_finite_fails_without_a_warning(value: float) -> None:
    """Of 1e30 the square is not."""
    good = np.ones((9, 4), np.float32)
    bad = good.copy()
    bad[0, 0] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert disagreement(bad, good, exact=False) == disagreement(good, bad, exact=False) == math.inf
        nothing = np.zeros((2, 2), np.float32)
        assert disagreement(nothing, nothing, exact=True) == 0
