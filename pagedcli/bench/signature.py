"""One line that says what a result was measured with, so that two results are compared only when they may be."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pagedcli

_PACKAGES = ("torch", "transformers", "numba", "numpy")


@dataclass(frozen=True)
class Signature:
    """`settings`: what was asked, equal on every machine. `machine`: where and with which versions it ran."""

    settings: Mapping[str, str]
    machine: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Twelve hex digits of the settings: equal digests, equal experiments."""
        text = "\n".join(f"{key}={value}" for key, value in sorted(self.settings.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def text(self) -> str:
        """The whole signature in one line."""
        parts = [f"{key}={value}" for group in (self.settings, self.machine) for key, value in group.items()]
        return f"pagedcli|{self.digest}|" + "|".join(parts)

    def differences(self, other: Signature) -> list[str]:
        """Settings that are not the same, as `name: here / there`."""
        names = sorted({*self.settings, *other.settings})
        return [f"{name}: {self.settings.get(name, '-')} / {other.settings.get(name, '-')}" for name in names
                if self.settings.get(name) != other.settings.get(name)]

    def as_dict(self) -> dict[str, dict[str, str]]:
        return {"settings": dict(self.settings), "machine": dict(self.machine)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, str]]) -> Signature:
        return cls(dict(data.get("settings", {})), dict(data.get("machine", {})))


def make_signature(settings: Mapping[str, Any], *, device: str = "", threads: int | None = None) -> Signature:
    """A signature of these settings on this machine. Paths are cut to their last part."""
    machine = {"version": pagedcli.__version__, "commit": _commit(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            machine[package] = version(package)
        except PackageNotFoundError:
            continue
    machine |= {"os": platform.system().lower(), "cpu": _processor(), "cores": str(os.cpu_count() or 0)}
    if device:
        machine["device"] = device
    if threads is not None:
        machine["threads"] = str(threads)
    return Signature({key: _plain(value) for key, value in settings.items() if value is not None}, machine)


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return value.name
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ",".join(_plain(item) for item in value)
    text = str(value).replace("|", "/").replace("\n", " ")
    return Path(text).name if text.startswith(("/", "~", "./", "../")) else text


def _processor() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Commit of the checkout this code runs from, with + when files differ from it; `release` outside a checkout."""
    folder = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("log", "-1", "--format=%h", "--", str(folder))
        return f"{commit}+" if commit and git("status", "--porcelain", "--", str(folder)) else commit or "release"
    except (OSError, subprocess.TimeoutExpired):
        return "release"
