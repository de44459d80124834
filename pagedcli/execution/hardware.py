"""Devices as numbers: datasheet peaks, and the few coefficients that say how much of them a serving system reaches."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.core.wording import counted
from pagedcli.execution.shapes import DTYPE_BYTES, ModelShape

GIB = 1 << 30
PROFILE_TOKENS = 2560
"""Tokens of the step whose activations are set aside before the pool is sized (the paper's artefact)."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What the cost model knows beyond the datasheet. Efficiencies are shares of a peak, the rest seconds.

    weight_efficiency: memory bandwidth while weights are read. flop_efficiency: tensor throughput of the linear layers.
    kv_efficiency: memory bandwidth while cached keys and values are read. attention_efficiency: tensor throughput of
    prompt attention. step_seconds: software a step; layer_seconds: launches a layer; sequence_seconds: a sequence in
    the step (sampling, bookkeeping); token_seconds: a computed token. allreduce_seconds: latency of one
    all-reduce per doubling of devices (two a layer). link_efficiency: bandwidth between devices in an all-reduce.
    copy_seconds: one block copied on the device. swap_efficiency: host bandwidth while blocks are swapped.
    swap_copy_seconds: one transfer of a block's keys or values of one layer.
    prompt_seconds: a prompt or chunk in the step. block_overhead: what a block costs decode attention beyond its keys,
    in tokens' worth of reading (small blocks leave a GPU's threads idle, paper section 7.2).
    """

    weight_efficiency: float = 0.8
    flop_efficiency: float = 0.6
    kv_efficiency: float = 0.65
    attention_efficiency: float = 0.3
    step_seconds: float = 0.002
    layer_seconds: float = 0.0
    sequence_seconds: float = 0.0
    token_seconds: float = 0.0
    prompt_seconds: float = 0.0
    allreduce_seconds: float = 0.0
    link_efficiency: float = 1.0
    copy_seconds: float = 0.0
    swap_efficiency: float = 0.5
    swap_copy_seconds: float = 0.0
    block_overhead: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            share = item.name.endswith("efficiency")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise UsageError(f"coefficient {item.name} = {value!r}: must be a finite number")
            if value < 0 or (share and value == 0):
                raise UsageError(f"coefficient {item.name} = {value}: must be {'above' if share else 'at least'} 0")

    @classmethod
    def read(cls, data: Mapping[str, Any], base: Coefficients | None = None) -> Coefficients:
        """From a TOML table; absent ones keep `base`'s value. UsageError names an unknown one."""
        known = {item.name for item in fields(cls)}
        for name in data:
            if name not in known:
                raise UsageError(f"coefficient {name!r} is unknown; there are {', '.join(sorted(known))}")
        return replace(base or cls(), **data)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device and its links; bytes, bytes/s and FLOP/s. `engines` changes coefficients for one policy's software."""

    name: str
    title: str
    memory_bytes: int
    bandwidth: float
    flops: float
    link_bandwidth: float
    host_bandwidth: float
    source: str
    coefficients: Coefficients = field(default_factory=Coefficients)
    engines: Mapping[str, Coefficients] = field(default_factory=dict)
    calibrated: str | None = None
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "bandwidth", "flops", "link_bandwidth", "host_bandwidth"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise UsageError(f"hardware {self.name}: {name} = {value!r}: must be a number above 0")
        if self.num_blocks is not None and (not isinstance(self.num_blocks, int) or self.num_blocks < 1):
            raise UsageError(f"hardware {self.name}: num_blocks = {self.num_blocks!r}: must be at least 1")

    def coefficients_for(self, policy: str) -> Coefficients:
        """The coefficients of the software that runs this policy."""
        return self.engines.get(policy, self.coefficients)


_KEYS = frozenset({"title", "memory_bytes", "bandwidth", "flops", "link_bandwidth", "host_bandwidth", "source",
                   "coefficients", "engines", "calibrated", "num_blocks"})


def _hardware(name: str, data: Mapping[str, Any], base: Coefficients,
              engines: Mapping[str, Mapping[str, Any]]) -> Hardware:
    for key in data:
        if key not in _KEYS:
            raise UsageError(f"hardware {name}: unknown field {key!r}; there are {', '.join(sorted(_KEYS))}")
    missing = [key for key in ("title", "memory_bytes", "bandwidth", "flops") if key not in data]
    if missing:
        raise UsageError(f"hardware {name}: {', '.join(missing)} missing")
    own = Coefficients.read(data.get("coefficients", {}), base)
    changes = {**engines, **data.get("engines", {})}
    plain = {key: value for key, value in data.items() if key not in ("coefficients", "engines")}
    return Hardware(name=name, coefficients=own,
                    engines={policy: Coefficients.read(change, own) for policy, change in changes.items()},
                    **{"link_bandwidth": 25e9, "host_bandwidth": 25e9, "source": "", **plain})


def _read(text: str, where: str) -> dict[str, Hardware]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise UsageError(f"{where}: not a TOML file ({fault})") from fault
    default = data.pop("default", {})
    base = Coefficients.read(default.get("coefficients", {}))
    engines = default.get("engines", {})
    return {name: _hardware(name, table, base, engines) for name, table in data.items()}


@cache
def known_hardware() -> Mapping[str, Hardware]:
    """The devices of hardware.toml by name."""
    return _read((files("pagedcli.execution") / "hardware.toml").read_text("utf-8"), "hardware.toml")


def find_hardware(name: str, option: str = "--hardware") -> Hardware:
    """A known device, or the only one of a TOML file such as `pagedcli calibrate` writes.

    Raises UsageError that lists the names, or says what is wrong with the file that `option` gave.
    """
    found = known_hardware().get(name.lower())
    if found is not None:
        return found
    path = Path(name)
    if path.suffix != ".toml":
        raise UsageError(f"{option} = {name!r}: no such hardware; there are {', '.join(known_hardware())}, "
                         "or give a .toml file that `pagedcli calibrate` wrote")
    try:
        read = _read(path.read_text("utf-8"), str(path))
    except OSError as fault:
        raise UsageError(f"{option} {path}: cannot be read ({fault.strerror})") from fault
    if len(read) != 1:
        raise UsageError(f"{option} {path}: holds {counted(len(read), 'device')}, must be one table (and "
                         "[default] at most)")
    return next(iter(read.values()))


def hardware_toml(hardware: Hardware, note: str = "") -> str:
    """A file that `find_hardware` reads back as `hardware`."""
    lines = [f"# {line}" for line in note.splitlines()] + [f"[{hardware.name}]"]
    for key in ("title", "source", "calibrated"):
        value = getattr(hardware, key)
        if value:
            lines.append(f'{key} = "{_quoted(value)}"')
    lines += [f"{key} = {getattr(hardware, key)!r}" for key in ("memory_bytes", "bandwidth", "flops", "link_bandwidth",
                                                                "host_bandwidth")]
    if hardware.num_blocks is not None:
        lines.append(f"num_blocks = {hardware.num_blocks}")
    lines += ["", f"[{hardware.name}.coefficients]"]
    lines += [f"{key} = {value!r}" for key, value in hardware.coefficients.as_dict().items()]
    for policy, own in hardware.engines.items():
        lines += ["", f"[{hardware.name}.engines.{policy}]"]
        lines += [f"{key} = {value!r}" for key, value in own.as_dict().items()
                  if value != getattr(hardware.coefficients, key)]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


def activation_bytes(shape: ModelShape, tensor_parallel: int, dtype: str = "fp16") -> int:
    """Bytes a device needs for the activations of PROFILE_TOKENS tokens (rule of the paper's artefact)."""
    tokens, hidden = PROFILE_TOKENS, shape.hidden
    widest = max(3 * tokens * hidden // tensor_parallel, tokens * shape.intermediate // tensor_parallel)
    return DTYPE_BYTES[dtype] * max(2 * (widest + tokens * hidden), 2 * tokens * shape.vocab)


def replicated_bytes(shape: ModelShape, dtype: str = "fp16") -> int:
    """Bytes of the weights that each device of a tensor-parallel group holds whole: positions, norms, output biases."""
    norm = shape.hidden * (2 if shape.linear_bias else 1)
    biases = 2 * shape.hidden + shape.intermediate if shape.linear_bias else 0
    count = shape.learned_positions * shape.hidden + (2 * shape.layers + 1) * norm + shape.layers * biases
    return count * DTYPE_BYTES[dtype]


def device_weight_bytes(shape: ModelShape, tensor_parallel: int = 1, dtype: str = "fp16") -> float:
    """Bytes of weights on each of `tensor_parallel` devices."""
    whole = replicated_bytes(shape, dtype)
    return whole + (shape.weight_bytes(dtype) - whole) / tensor_parallel


def kv_pool_bytes(hardware: Hardware, shape: ModelShape, tensor_parallel: int = 1, *, utilization: float = 0.95,
                  dtype: str = "fp16") -> int:
    """Bytes left for keys and values on all devices together (paper Table 1; rule of its artefact).

    Each device keeps `utilization` of its memory less its share of the weights, the activations and 1 GiB of
    workspace. May be negative: the model does not fit.
    """
    each = (utilization * hardware.memory_bytes - device_weight_bytes(shape, tensor_parallel, dtype)
            - activation_bytes(shape, tensor_parallel, dtype) - GIB)
    return int(each * tensor_parallel)


def pool_blocks(hardware: Hardware, shape: ModelShape, tensor_parallel: int = 1, block_size: int = 16, *,
                utilization: float = 0.95, dtype: str = "fp16") -> int:
    """Blocks of the KV pool: Table 1's rule gives 983 / 603 / 3,754 blocks for its three rows.

    Raises CannotRunError, with the numbers, when weights and activations leave no room.
    """
    room = kv_pool_bytes(hardware, shape, tensor_parallel, utilization=utilization, dtype=dtype)
    blocks = room // (block_size * shape.kv_bytes_per_token(dtype))
    if blocks < 1:
        raise CannotRunError(
            f"{shape.name} needs {shape.weight_bytes(dtype) / 1e9:.1f} GB for its weights and {tensor_parallel} x "
            f"{hardware.title} leave {_left(room)}; use more devices (--tensor-parallel-size) or a smaller model")
    return int(blocks)


def _left(room: float) -> str:
    return f"{room / 1e9:.1f} GB for keys and values" if room > 0 else f"no room, {-room / 1e9:.1f} GB too little"
