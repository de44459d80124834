"""A device by its kind and number, without torch. A `torch.device` will do wherever one of these is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Device(Protocol):
    """`type` is cpu or cuda; `index` numbers devices of one type, None where the current one is meant."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _Host:
    type: str = "cpu"
    index: int | None = None

    def __str__(self) -> str:
        return self.type


HOST: Device = _Host()
"""This machine's processor and memory."""
