"""A log of step plans, one JSON object a line, to read, diff and replay schedules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.execution.interface import Executor


class TracingExecutor(Executor):
    """Passes plans to another executor and writes each one down first (`seconds` after it ran)."""

    def __init__(self, inner: Executor, path: Path) -> None:
        self.inner = inner
        self.limits = inner.limits
        self.info = inner.info
        self._file: IO[str] | None = path.open("w", encoding="utf-8")
        self._step = 0

    def execute(self, plan: StepPlan) -> StepResult:
        frozen = plan.frozen()
        result = self.inner.execute(plan)
        if self._file is not None:
            self._file.write(json.dumps({"step": self._step, "seconds": result.seconds, **frozen}) + "\n")
        self._step += 1
        return result

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self.inner.close()
