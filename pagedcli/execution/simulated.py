"""An executor that runs nothing and says how long it would have taken, for a VirtualClock and a scripted sampler."""

from __future__ import annotations

from dataclasses import dataclass

from pagedcli.core.errors import UsageError
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.wording import counted
from pagedcli.execution.cost_model import CostModel, StepLoad
from pagedcli.execution.hardware import Hardware, pool_blocks
from pagedcli.execution.interface import Executor, ExecutorInfo, ExecutorLimits
from pagedcli.execution.shapes import ModelShape

DEFAULT_SWAP_BYTES = 20 << 30
"""Host memory for swapped blocks, per device (the paper's artefact)."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is simulated: a model on some devices. `num_blocks` None sizes the pool by the paper's Table 1 rule.

    `policy` picks the software's coefficients (FasterTransformer's differ from those of the Python systems);
    `software`, where given, names them instead (a build of its own that runs several policies).
    """

    hardware: Hardware
    shape: ModelShape
    tensor_parallel: int = 1
    block_size: int = 16
    num_blocks: int | None = None
    host_blocks: int | None = None
    dtype: str = "fp16"
    utilization: float = 0.95
    policy: str = "paged"
    software: str | None = None
    max_positions: int | None = None

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise UsageError(f"--tensor-parallel-size = {self.tensor_parallel}: must be at least 1")
        if self.shape.heads % self.tensor_parallel:
            raise UsageError(f"--tensor-parallel-size = {self.tensor_parallel}: {self.shape.name}'s "
                             f"{counted(self.shape.heads, 'head')} cannot be divided by it")

    @property
    def cost_model(self) -> CostModel:
        coefficients = self.hardware.coefficients_for(self.software or self.policy)
        return CostModel(self.hardware, self.shape, self.tensor_parallel, dtype=self.dtype, kv_dtype=self.dtype,
                         block_size=self.block_size, coefficients=coefficients)

    @property
    def blocks(self) -> int:
        """Blocks of the pool: as given, else the hardware file's measured number, else by Table 1's rule."""
        given = self.num_blocks or self.hardware.num_blocks
        if given is not None:
            return given
        return pool_blocks(self.hardware, self.shape, self.tensor_parallel, self.block_size, dtype=self.dtype,
                           utilization=self.utilization)

    @property
    def limits(self) -> ExecutorLimits:
        """Swap space is never more than the pool (paper section 4.5)."""
        blocks = self.blocks
        block_bytes = self.block_size * self.shape.kv_bytes_per_token(self.dtype)
        host = (min(blocks, DEFAULT_SWAP_BYTES * self.tensor_parallel // block_bytes)
                if self.host_blocks is None else self.host_blocks)
        return ExecutorLimits(num_blocks=blocks, host_blocks=host, block_size=self.block_size,
                              max_positions=self.max_positions or self.shape.max_positions,
                              vocab_size=self.shape.vocab, bytes_per_block=block_bytes)

    @property
    def info(self) -> ExecutorInfo:
        used = self.hardware.calibrated or "coefficients fitted to the paper's Figure 12 (A100)"
        return ExecutorInfo(model=self.shape.name, device=f"{self.tensor_parallel} x {self.hardware.title}",
                            dtype=self.dtype, kv_dtype=self.dtype, attention="cost model", threads=1, simulated=True,
                            notes=(f"simulated: no model was run; {used}",))


class SimulatedExecutor(Executor):
    """Costs plans on a deployment. Results have no logits; `seconds` is for the virtual clock."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.cost = deployment.cost_model
        self.limits = deployment.limits
        self.info = deployment.info

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(None, self.cost.seconds(StepLoad.of(plan)))

    def close(self) -> None:
        return
