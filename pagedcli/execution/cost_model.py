"""How long a step takes on a device: a sum of a few terms, each with a name, a unit and a reason.

    seconds = step + layers * (layer + 2 * allreduce * log2(devices))       software and launches
            + max(weights / bandwidth, tokens * FLOPs / throughput)         linear layers (a roofline)
            + context * (1 + block overhead / block size) * KV bytes / bandwidth     decode attention
            + prompt attention FLOPs / throughput
            + sequences * (sequence + output head) + prompts * prompt + tokens * (token + exchange between devices)
            + copies * copy + swapped blocks * (block bytes / host bandwidth + 2 * layers * transfer)

Everything is linear in the counts of a `StepLoad` but for the roofline, so a scheduler that keeps those counts as it
goes along gets the time of a step without looking at a single sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pagedcli.core.plan import Slice, StepPlan
from pagedcli.execution.hardware import Coefficients, Hardware, device_weight_bytes
from pagedcli.execution.shapes import DTYPE_BYTES, ModelShape


@dataclass(slots=True)
class StepLoad:
    """What a step computes and moves, as counts.

    decodes: sequences that compute one token; context: keys that those read, summed, their own included. prompts:
    slices of several tokens; prompt_tokens: their tokens; prompt_pairs: (token, key) pairs that their attention
    scores. copies, swaps: blocks copied on the device, and moved to or from the host.
    """

    decodes: int = 0
    context: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    prompt_pairs: int = 0
    copies: int = 0
    swaps: int = 0

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt_tokens

    def add(self, slices: Iterable[Slice]) -> None:
        """Count slices in. One token is a decode, whatever it is for: it costs the same."""
        for item in slices:
            count = len(item.tokens)
            if count == 1:
                self.decodes += 1
                self.context += item.start + 1
            else:
                self.prompts += 1
                self.prompt_tokens += count
                self.prompt_pairs += item.start * count + count * (count + 1) // 2

    @classmethod
    def of(cls, plan: StepPlan) -> StepLoad:
        """The load of a whole plan. O(slices)."""
        load = cls(copies=len(plan.copies), swaps=len(plan.swap_in) + len(plan.swap_out))
        load.add(plan.slices)
        return load


class CostModel:
    """Step times of one model on `tensor_parallel` devices. Its attributes are the derived costs, in seconds.

    `block_bytes`: bytes of one KV block over all layers and devices (for copies and swaps).
    """

    def __init__(self, hardware: Hardware, shape: ModelShape, tensor_parallel: int = 1, *, dtype: str = "fp16",
                 kv_dtype: str = "fp16", block_size: int = 16, coefficients: Coefficients | None = None) -> None:
        use = coefficients or hardware.coefficients
        self.hardware, self.shape, self.tensor_parallel, self.coefficients = hardware, shape, tensor_parallel, use
        devices = tensor_parallel
        doublings = math.log2(devices)
        throughput = devices * hardware.flops * use.flop_efficiency
        exchanges = 2 * shape.layers
        exchanged = (2 * (devices - 1) / devices * shape.hidden * DTYPE_BYTES[dtype]
                     / (hardware.link_bandwidth * use.link_efficiency))
        block_bytes = block_size * shape.kv_bytes_per_token(kv_dtype)

        self.step = use.step_seconds + shape.layers * use.layer_seconds + exchanges * use.allreduce_seconds * doublings
        self.weights = device_weight_bytes(shape, devices, dtype) / (hardware.bandwidth * use.weight_efficiency)
        self.linear = 2 * shape.active_parameters / throughput
        self.token = use.token_seconds + exchanges * exchanged
        self.sequence = use.sequence_seconds + 2 * shape.head_parameters / throughput
        self.prompt = use.prompt_seconds
        self.key = (shape.kv_bytes_per_token(kv_dtype) * (1 + use.block_overhead / block_size)
                    / (devices * hardware.bandwidth * use.kv_efficiency))
        self.pair = shape.attention_flops(1) / (devices * hardware.flops * use.attention_efficiency)
        self.copy = use.copy_seconds + 2 * block_bytes / (devices * hardware.bandwidth)
        self.swap = (block_bytes / (devices * hardware.host_bandwidth * use.swap_efficiency)
                     + 2 * shape.layers * use.swap_copy_seconds)

    def seconds(self, load: StepLoad) -> float:
        """Time of one step."""
        tokens = load.decodes + load.prompt_tokens
        linear = self.linear * tokens
        seconds = (self.step + (linear if linear > self.weights else self.weights) + self.key * load.context
                   + self.sequence * (load.decodes + load.prompts) + self.token * tokens)
        if load.prompts:
            seconds += self.pair * load.prompt_pairs + self.prompt * load.prompts
        if load.copies or load.swaps:
            seconds += self.copy * load.copies + self.swap * load.swaps
        return seconds

    def parts(self, load: StepLoad) -> dict[str, float]:
        """`seconds` by term, for profiles."""
        return {
            "overhead": self.step + self.sequence * (load.decodes + load.prompts) + self.token * load.tokens
            + self.prompt * load.prompts,
            "linear": max(self.linear * load.tokens, self.weights),
            "attention": self.key * load.context + self.pair * load.prompt_pairs,
            "copies": self.copy * load.copies, "swap": self.swap * load.swaps,
        }
