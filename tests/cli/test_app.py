"""The command as a whole: quick help, lazy parts, version, exit codes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from statistics import median

import pytest
import torch

from pagedcli import __version__
from pagedcli.cli import app as module
from pagedcli.cli.app import COMMANDS, report
from pagedcli.core.errors import CannotRunError, ExitStatus, UsageError
from pagedcli.generate.job import Interrupted
from tests.cli.console import Console

HEAVY = ("torch", "transformers", "numba", "pandas", "cupy", "datasets", "matplotlib", "numpy")
PROGRAM = [sys.executable, "-c", "from pagedcli.cli.app import main; main()"]


def test_help_is_quick_and_light() -> None:
    done = subprocess.run([sys.executable, "-X", "importtime", *PROGRAM[1:], "--help"], capture_output=True, text=True,
                          check=True)
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert imported.isdisjoint(HEAVY) and "typer" in imported
    assert "generate" in done.stdout and "doctor" in done.stdout
    spent = []
    for _ in range(3):
        before, started = os.times(), time.perf_counter()
        subprocess.run([*PROGRAM, "--help"], capture_output=True, check=True)
        after = os.times()
        # Processor time as well as the wall's: this must hold on a machine that is busy with other things too.
        busy = after.children_user + after.children_system - before.children_user - before.children_system
        spent.append(min(busy, time.perf_counter() - started))
    assert median(spent) < 0.5


def test_generate_help_names_units_and_defaults(console: Console) -> None:
    result = console("generate", "--help")
    assert result.exit_code == 0
    for words in ("--max-tokens", "--kv-cache-memory", "PAGEDCLI_MAX_TOKENS", "Default 16", "--beam-width", "256, cut"):
        assert words in result.stdout.replace("\n", " ") or words.split()[0] in result.stdout


def test_version(console: Console) -> None:
    result = console("--version")
    assert (result.exit_code, result.stdout) == (0, f"pagedcli {__version__}\n")


@pytest.mark.parametrize("words", [("nonsense",), ("--nonsense",), ("generate",), ("generate", "a", "b")])
def test_wrong_commands(console: Console, words: tuple[str, ...]) -> None:
    result = console(*words)
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_commands_that_exist_load() -> None:
    for entry in COMMANDS.values():
        if importlib.util.find_spec(entry.module) is not None:
            assert hasattr(importlib.import_module(entry.module), entry.attribute), entry


@pytest.mark.parametrize(("fault", "status", "words"), [
    (UsageError("wrong"), ExitStatus.USAGE, "pagedcli: wrong\n"),
    (CannotRunError("no"), ExitStatus.CANNOT_RUN, "pagedcli: no\n"),
    (Interrupted("stopped"), ExitStatus.INTERRUPTED, "pagedcli: stopped\n"),
    (MemoryError(), ExitStatus.CANNOT_RUN, "ran out of memory"),
    (OSError(28, "No space left on device"), ExitStatus.CANNOT_RUN, "disk is full"),
    (ZeroDivisionError("x"), ExitStatus.CANNOT_RUN, "internal error: ZeroDivisionError: x"),
])
def test_every_fault_has_its_exit_status(fault: Exception, status: int, words: str,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    assert report(fault) == status
    assert words in capsys.readouterr().err


def test_torchs_words_for_too_little_memory_reach_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="alloc_cpu") as fault:
        torch.empty(1 << 55)
    assert report(fault.value) == ExitStatus.CANNOT_RUN
    told = capsys.readouterr().err
    assert told.startswith("pagedcli: this machine ran out of memory; lower --num-kv-blocks")
    assert "alloc" not in told and "internal" not in told
    assert report(RuntimeError("shapes do not match")) == ExitStatus.CANNOT_RUN
    assert "internal error: RuntimeError: shapes do not match" in capsys.readouterr().err


def test_debug_is_not_taken_from_behind_a_double_dash() -> None:
    assert module._take_debug(["a", "--debug", "--", "--debug"]) == (["a", "--", "--debug"], True)
    assert module._take_debug(["a", "--", "--debug"]) == (["a", "--", "--debug"], False)
