"""Short names of number types, whoever's type objects they are (numpy's, ml_dtypes', torch's)."""

from __future__ import annotations

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8_e4m3",
          "float8_e5m2": "fp8_e5m2"}
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


def dtype_name(dtype: object) -> str:
    """`bf16` for numpy's or torch's bfloat16 and so on; ValueError for a type that has no short name here."""
    long = str(dtype).rpartition(".")[2]
    if long in DTYPE_BYTES:
        return long
    if long not in _SHORT:
        raise ValueError(f"{dtype} is none of {', '.join(_SHORT)}")
    return _SHORT[long]
