"""`pagedcli doctor`: what this machine can run, and what to do about the rest."""

from __future__ import annotations

import importlib
import os
import platform
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedcli import __version__
from pagedcli.core.config import ModelConfig
from pagedcli.core.errors import ExitStatus, PagedError
from pagedcli.core.wording import counted

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]})
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `needed`: whether `generate` cannot run without it."""

    name: str
    good: bool
    text: str
    needed: bool = False


@app.command()
def doctor(
    model: Annotated[str, typer.Option("--model", envvar="PAGEDCLI_MODEL", show_envvar=False,
                                       help="Model to look for; a hub id that is not here yet is fetched."),
    ] = ModelConfig().model,
) -> None:
    """Say what this machine can run: Python, torch, devices, kernels, memory, the default model and the caches.

    Exit status 0 when `generate` can run, 3 when something it needs is missing.
    """
    findings = examine(model)
    width = max(len(item.name) for item in findings)
    for item in findings:
        mark = "ok" if item.good else "MISSING" if item.needed else "--"
        typer.echo(f"{mark:<8}{item.name:<{width}}  {item.text}")
    missing = [item.name for item in findings if item.needed and not item.good]
    if missing:
        typer.echo(f"generate cannot run here: {', '.join(missing)}")
        raise typer.Exit(ExitStatus.CANNOT_RUN)
    typer.echo("generate can run here")


def examine(model: str) -> list[Finding]:
    """All findings, in the order they are printed."""
    return [
        Finding("pagedcli", True, __version__),
        Finding("python", sys.version_info >= (3, 11), f"{platform.python_version()} at {sys.executable}", needed=True),
        *(_package(name, needed=True) for name in ("torch", "transformers", "tokenizers", "numba", "safetensors")),
        _looked_at("devices", _devices),
        _looked_at("cupy", _cupy),
        _looked_at("numba threads", _numba),
        _looked_at("cpu", _cpu),
        _looked_at("memory", _memory),
        _model(model),
        _looked_at("model cache", lambda: _cache(_own_cache())),
        _looked_at("Hugging Face cache", lambda: _cache(_hub_cache())),
        *_old_models(),
    ]


def _package(name: str, needed: bool) -> Finding:
    try:
        return Finding(name, True, version(name), needed)
    except PackageNotFoundError:
        return Finding(name, False, f"not installed: pip install {name}", needed)


def _looked_at(name: str, look: Callable[[], tuple[bool, str]]) -> Finding:
    """A finding about an optional part; whatever goes wrong in looking is what is found."""
    try:
        return Finding(name, *look())
    except Exception as fault:  # a doctor must outlive any patient: broken drivers raise all kinds of errors
        return _cannot_tell(name, fault)


def _cannot_tell(name: str, fault: Exception) -> Finding:
    return Finding(name, False, f"cannot tell: {type(fault).__name__}: {fault}")


def _devices() -> tuple[bool, str]:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return True, f"CPU only (torch {torch.__version__}, {counted(torch.get_num_threads(), 'thread')})"
    names = []
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        names.append(f"cuda:{number} {facts.name}, {facts.total_memory / 2**30:.0f} GiB, sm_{facts.major}{facts.minor}")
    return True, "; ".join(names)


def _cupy() -> tuple[bool, str]:
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError:
        return False, "not installed; the CUDA kernels need it: pip install 'pagedcli[cuda12]' or 'pagedcli[cuda13]'"
    return True, f"{cupy.__version__}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}"


def _numba() -> tuple[bool, str]:
    numba: Any = importlib.import_module("numba")

    @numba.njit(parallel=True)
    def count(values: Any) -> float:
        total = 0.0
        for place in numba.prange(values.size):
            total += values[place]
        return total

    numpy: Any = importlib.import_module("numpy")
    good = count(numpy.ones(64)) == 64.0
    return good, f"{counted(numba.get_num_threads(), 'thread')}, {numba.threading_layer()} layer, compiled a test loop"


def _cpu() -> tuple[bool, str]:
    flags: set[str] = set()
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
        elif name.strip() == "model name":
            model = value.strip()
    found = [name for name in _CPU_FEATURES if name in flags]
    bf16 = "bf16 in hardware" if flags & {"avx512_bf16", "amx_bf16", "bf16"} else "bf16 widened in software"
    cores = len(os.sched_getaffinity(0))
    vectors = " ".join(found) or "no vector extensions listed"
    return True, f"{model}, {counted(cores, 'core')} for this process, {vectors}, {bf16}"


def _memory() -> tuple[bool, str]:
    psutil: Any = importlib.import_module("psutil")
    memory = psutil.virtual_memory()
    return True, f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f} GiB"


def _model(name: str) -> Finding:
    try:
        from pagedcli.execution.gguf_cache import check_conversion
        from pagedcli.execution.model_hub import resolve_model

        source = resolve_model(ModelConfig(model=name), lambda line: typer.echo(line, err=True))
        if source.folder is not None:
            check_conversion(source.folder)
        return Finding("model", True, f"{name} found at {source.folder or 'no folder (a shape for simulation)'}",
                       needed=True)
    except PagedError as fault:
        return Finding("model", False, f"{name}: {fault.message}", needed=True)
    except Exception as fault:  # a part that is not installed, a folder that is shut, or what else there is
        return Finding("model", False, f"{name}: cannot look for it: {type(fault).__name__}: {fault}", needed=True)


def _cache(path: Path) -> tuple[bool, str]:
    writable = _writable(path)
    return writable, (f"{path} ({_held(path) if path.exists() else 'made when needed'}, "
                      f"{'writable' if writable else 'not writable'})")


def _held(folder: Path) -> str:
    """What a cache takes on disk."""
    from pagedcli.execution.old_models import held_bytes

    return _mebibytes(held_bytes(folder))


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def _old_models() -> list[Finding]:
    """One line for each folder of the model cache that is of no use any more, and one that says how to delete them."""
    try:
        from pagedcli.execution.old_models import old_models

        found = old_models()
    except Exception as fault:  # as in _looked_at: what lies in a folder may surprise in any way
        return [_cannot_tell("old models", fault)]
    if not found:
        return []
    lines = [Finding("old model", False, f"{item.folder} ({_mebibytes(item.size)}): {item.why}") for item in found]
    names = " ".join(shlex.quote(str(item.folder)) for item in found)
    total = sum(item.size for item in found)
    return [*lines, Finding("old models", False, f"{_mebibytes(total)} in {counted(len(found), 'folder')}. When no "
                            f"other version of pagedcli uses this cache, delete them with: rm -r -- {names}")]


def _own_cache() -> Path:
    from pagedcli.execution.gguf_cache import cache_dir

    return cache_dir()


def _hub_cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
    return Path(os.environ.get("HF_HOME", "") or home / "huggingface")


def _writable(path: Path) -> bool:
    while not path.exists():
        path = path.parent
    return os.access(path, os.W_OK)
