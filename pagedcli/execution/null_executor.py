"""An executor without a model: everything but the model can be run and measured on it."""

from __future__ import annotations

from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.execution.interface import Executor, ExecutorInfo, ExecutorLimits


class NullExecutor(Executor):
    """Computes nothing, takes no time of its own, returns no logits. Use with a sampler that needs none."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self.limits = limits
        self.info = ExecutorInfo(model="null", device="none", dtype="none", kv_dtype="none", attention="none",
                                 threads=1, notes=("no model: tokens follow a fixed rule",))

    def execute(self, plan: StepPlan) -> StepResult:
        del plan
        return StepResult(None, 0.0)

    def close(self) -> None:
        return
