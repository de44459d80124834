"""Levenberg-Marquardt on positive parameters: enough for a dozen coefficients, without another dependency."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pagedcli.bench.records import Floats

Residuals = Callable[[Mapping[str, float]], Floats]


def fit_positive(residuals: Residuals, start: Mapping[str, float], bounds: Mapping[str, tuple[float, float]],
                 prior: float = 0.0, rounds: int = 60, step: float = 1e-4) -> dict[str, float]:
    """Parameters that make the sum of squared residuals least, searched on a logarithmic scale within `bounds`.

    `prior` is the weight of a pull towards `start` (per unit of log squared), which keeps parameters that the data
    say nothing about where they were. `step`: how far slopes are measured, on the logarithmic scale; larger for
    functions that jump a little, such as a simulation whose schedule changes.
    """
    names = list(start)
    low = np.log([bounds[name][0] for name in names])
    high = np.log([bounds[name][1] for name in names])
    origin = np.clip(np.log([start[name] for name in names]), low, high)

    def of(point: Floats) -> Floats:
        values = residuals(dict(zip(names, np.exp(point).tolist(), strict=True)))
        return np.concatenate([values, np.sqrt(prior) * (point - origin)])

    point, damping = origin.copy(), 1e-2
    errors = of(point)
    for _ in range(rounds):
        slopes = np.empty((len(errors), len(names)))
        for place in range(len(names)):
            forward = step if point[place] + step <= high[place] else -step
            moved = point.copy()
            moved[place] += forward
            slopes[:, place] = (of(moved) - errors) / forward
        square, pull = slopes.T @ slopes, slopes.T @ errors
        improved = False
        for _ in range(8):
            move = np.linalg.solve(square + damping * (np.diag(np.diag(square)) + 1e-9 * np.eye(len(names))), -pull)
            trial = np.clip(point + np.clip(move, -0.7, 0.7), low, high)
            fresh = of(trial)
            if fresh @ fresh < errors @ errors:
                gain = 1 - (fresh @ fresh) / (errors @ errors)
                point, errors, damping = trial, fresh, max(damping / 4, 1e-9)
                improved = bool(gain > 1e-9)
                break
            damping = min(damping * 4, 1e9)
        if not improved:
            break
    return dict(zip(names, np.exp(point).tolist(), strict=True))
