"""Runs the command line in process, with a fake engine behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from pagedcli.cli.app import app
from pagedcli.cli.environment import Environment
from pagedcli.core.config import RunConfig
from tests.generate.fake_engine import FakeEngine


class Console:
    """Invokes commands. `engines` holds every engine made; `options` go to the next ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: list[FakeEngine] = []
        self.configs: list[RunConfig] = []
        self.options: dict[str, Any] = {}
        self.variables: dict[str, str] = {}

    def __call__(self, *words: str, stdin: bytes | None = None) -> Result:
        environment = Environment(build_engine=self._build, variables=self.variables)
        return CliRunner().invoke(app, list(words), obj=environment, input=stdin, env=self.variables)

    def _build(self, config: RunConfig, say: Any) -> FakeEngine:
        del say
        self.configs.append(config)
        self.engines.append(FakeEngine(config, **self.options))
        return self.engines[-1]

    def write(self, name: str, data: bytes) -> str:
        path = self.folder / name
        path.write_bytes(data)
        return str(path)

    def generate(self, data: bytes, *words: str, name: str = "in.jsonl") -> tuple[Result, list[dict[str, Any]]]:
        """Run `generate` on rows; returns the result and the output's rows (none when there is no output)."""
        result = self("generate", self.write(name, data), *words)
        return result, self.rows(name)

    def rows(self, name: str = "in.jsonl") -> list[dict[str, Any]]:
        path = self.output(name)
        if not path.exists():
            return []
        text = path.read_bytes().decode()
        assert text.endswith("\n") or not text
        return [json.loads(line, parse_constant=_refuse) for line in text.split("\n")[:-1]]

    def output(self, name: str = "in.jsonl") -> Path:
        return self.folder / (name.removesuffix(".jsonl") + ".out.jsonl")

    def journal(self, name: str = "in.jsonl") -> Path:
        return Path(str(self.output(name)) + ".partial")


def _refuse(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")
