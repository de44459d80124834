"""Messages: options they name exist, and what they refuse is named with where it came from."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import pagedcli
from pagedcli.cli.app import COMMANDS, report
from pagedcli.core.config import CacheConfig, SchedulerConfig
from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.engine.build import make_memory
from pagedcli.execution.hardware import find_hardware
from tests.cli.console import Console

FOREIGN = {"--no-deps", "--version", "--help", "--debug", "--std", "--device-as-default-execution-space", "--format",
           "--head", "--porcelain", "--no-"}
"""Options of pip, nvrtc, git and ray, those of the command as a whole, and the beginning of a flag's twin."""


def _options(command: Any) -> Iterator[str]:
    for child in getattr(command, "commands", {}).values():
        yield from _options(child)
    for param in command.params:
        yield from (*param.opts, *param.secondary_opts)


COUNTED = re.compile(r" (?:[a-z]+ )?(?:rows|tokens|blocks|sequences|requests|prompts|positions|ranks|replicas|devices|"
                     r"threads|cores|steps|files|lines|layers|heads|processes|outputs|beams|models|folders)\b")
NEVER_ONE = {"{size} ranks", "{ranks.size} ranks", "{self.place.size} ranks", "{most} threads", "{len(given)} prompts",
             "{sum(widths)} blocks", "{side} tokens"}
"""Counts that are more than one wherever they are told, and one that is no count. Constants and rates are let pass."""


def test_no_message_writes_a_plural_beside_a_count_by_hand() -> None:
    """Counts go through `counted`, so that none says `1 tokens`."""
    root, wrong = Path(pagedcli.__file__).parent, []
    for file in sorted(root.rglob("*.py")):
        if {"bench", "attention", "memory"} & set(file.relative_to(root).parts[:1]):
            continue
        tree = ast.parse(file.read_text("utf-8"))
        internal = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Assert) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.JoinedStr) or id(node) in internal:
                continue
            for value, after in itertools.pairwise(node.values):
                if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant):
                    found = COUNTED.match(str(after.value))
                    source, kind = ast.unparse(value.value), ast.unparse(value.format_spec or ast.Constant(""))
                    if found is None or source.isupper() or kind[-2:-1] == "f" or source.startswith("significant("):
                        continue
                    said = f"{{{source}}}{found[0]}"
                    if said not in NEVER_ONE:
                        wrong.append(f"{file.relative_to(root)}:{node.lineno}: {said}")
    assert wrong == []


def test_every_option_that_a_message_names_exists() -> None:
    known = set(FOREIGN)
    for entry in COMMANDS.values():
        if importlib.util.find_spec(entry.module) is not None:
            command = getattr(importlib.import_module(entry.module), entry.attribute)
            known |= set(_options(typer.main.get_command(command)))
    root = Path(pagedcli.__file__).parent
    unknown = {}
    for path in root.rglob("*.py"):
        for name in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+(?![\w{*-])", path.read_text("utf-8")):
            if name not in known:
                unknown.setdefault(name, path.name)
    assert unknown == {}


@pytest.mark.parametrize(("fields", "says"), [({"num_blocks": 0}, "--num-kv-blocks = 0"),
                                              ({"memory": 0}, "--kv-cache-memory = 0"),
                                              ({"block_size": 0}, "--block-size = 0")])
def test_sizes_of_the_pool_go_by_their_options(fields: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        CacheConfig(**fields)
    with pytest.raises(UsageError, match="--max-num-seqs = 0"):
        SchedulerConfig(max_num_seqs=0)


def test_hardware_goes_by_the_option_that_named_it(console: Console) -> None:
    with pytest.raises(UsageError, match="--hardware = 'nogpu'"):
        find_hardware("nogpu")
    done = console("bench", "--simulate", "nogpu", "--model", "opt-13b")
    assert done.exit_code == 2 and "--simulate = 'nogpu'" in done.stderr


def test_a_pool_beyond_all_memory_names_its_size_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    from pagedcli.core.config import RunConfig
    from pagedcli.execution.interface import ExecutorLimits

    limits = ExecutorLimits(num_blocks=10**18, host_blocks=0, block_size=16, max_positions=64, vocab_size=9,
                            bytes_per_block=1)
    with pytest.raises(CannotRunError, match=r"1,000,000,000,000,000,000 KV blocks .* --num-kv-blocks"):
        make_memory(RunConfig(), limits, 64)
    report(MemoryError())
    said = capsys.readouterr().err
    assert "()" not in said and "--num-kv-blocks" in said


@pytest.mark.parametrize(("words", "variables", "says"), [
    (("--temperature", "x"), {}, "'--temperature': 'x': "),
    (("--limit", "0"), {}, "'--limit': '0': "),
    (("--dtype", "zz"), {}, "'--dtype': 'zz' is not one of"),
    ((), {"PAGEDCLI_MAX_TOKENS": "foo"}, "'foo': Input should be a valid integer"),
    ((), {"PAGEDCLI_MAX_TOKENS": "foo"}, "environment variable PAGEDCLI_MAX_TOKENS"),
    ((), {"PAGEDCLI_IGNORE_EOS": "zz"}, "environment variable PAGEDCLI_IGNORE_EOS"),
])
def test_values_that_do_not_parse_are_named(console: Console, words: tuple[str, ...], variables: dict[str, str],
                                            says: str) -> None:
    console.variables = variables
    done = console("generate", "x.jsonl", *words)
    assert done.exit_code == 2 and says in done.stderr, done.stderr
    assert ("environment" in done.stderr) == bool(variables)


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_help_shows_every_name_in_full_on_eighty_columns(console: Console, command: str,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = console(command, "--help")
    entry = COMMANDS[command]
    names = set(_options(typer.main.get_command(getattr(importlib.import_module(entry.module), entry.attribute))))
    shown = set(re.findall(r"(?<!\S)(-[\w-]+)(?=[\s,]|$)", done.stdout))
    assert names - {"INPUT", "input"} <= shown and "\u2026" not in done.stdout
    assert not re.search(r"--[\w-]*-$", done.stdout, re.MULTILINE), "a name is broken over two lines"
    assert max(map(len, done.stdout.splitlines())) <= 80 and "Sampling (a row's own fields win):" in done.stdout


def test_workloads_are_listed_in_full_on_eighty_columns(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedcli.workloads import specs

    monkeypatch.setenv("COLUMNS", "80")
    done = console("workloads")
    table = done.stdout.split("\u2514")[0]
    assert done.exit_code == 0 and "\u2026" not in table
    assert all(re.search(rf"\u2502 ?{name} ", table) for name in specs())
