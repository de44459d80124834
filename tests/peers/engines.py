"""The engines that are compared: where each lives, how it is started, and with which settings on which workload.

Settings are the fastest that were found for an engine on this kind of work, not those that it comes with; docs/peers.md
says what was tried.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DRIVERS = Path(__file__).resolve().parent / "drivers"
OURS, JOB, LEAN = "ours", "ours-job", "ours-lean"
OWN_PYTHON = Path(sys.executable)


@dataclass(frozen=True)
class Place:
    """Folders of a comparison. `root` holds environments and models, `weights` the model in fp32."""

    root: Path
    weights: Path

    def python(self, environment: str) -> Path:
        """The interpreter of an environment under the root."""
        return self.root / environment / "bin" / "python"

    @property
    def weights_bf16(self) -> Path:
        return self.root / "models" / "bf16"

    def weights_as(self, dtype: str) -> Path:
        return self.weights_bf16 if dtype == "bf16" else self.weights

    def gguf(self, dtype: str) -> Path:
        return self.root / "models" / f"{dtype}.gguf"

    def openvino(self, dtype: str) -> Path:
        return self.root / "models" / f"openvino-{dtype}"

    @property
    def llama_build(self) -> Path:
        return self.root / "llamacpp" / "build" / "bin"


@dataclass(frozen=True)
class Ask:
    """What one run is to do: which workload in which type on how many threads, from `rows`, into `out`."""

    workload: str
    dtype: str
    threads: int
    rows: Path
    out: Path


Command = Callable[[Place, Ask], list[str | Path]]
Environment = Callable[[Place, Ask], dict[str, str]]


@dataclass(frozen=True)
class Engine:
    """One engine. `needs`: the set-up it needs, by name, if any. `most_rounds`: for one too slow to repeat.
    `forbids_end`: it cannot write the end token and go on, so it forces lengths by never choosing it."""

    name: str
    title: str
    command: Command
    environment: Environment
    needs: str | None = None
    most_rounds: int | None = None
    forbids_end: bool = False

    @property
    def ours(self) -> bool:
        return self.name in (OURS, JOB, LEAN)


def _driver(name: str, python: Path, ask: Ask, model: Path | None, *more: str | Path) -> list[str | Path]:
    chosen: list[str | Path] = [] if model is None else ["--model", model]
    return [python, DRIVERS / f"drive_{name}.py", "--rows", ask.rows, "--out", ask.out, "--dtype", ask.dtype,
            "--threads", str(ask.threads), *chosen, *more]


def _own(*more: str) -> Command:
    return lambda place, ask: _driver("ours", OWN_PYTHON, ask, None, *more)


def _job(place: Place, ask: Ask) -> list[str | Path]:
    """The whole job as a user starts it; every row says itself what it wants."""
    return [OWN_PYTHON.parent / "pagedcli", "generate", ask.rows, "--output", ask.out.with_suffix(".answers.jsonl"),
            "--dtype", ask.dtype, "--device", "cpu", "--threads", str(ask.threads), "--overwrite", "--restart",
            "--quiet"]


def _openvino(place: Place, ask: Ask) -> list[str | Path]:
    first = ["--first-alone"] if ask.workload == "W2" else []
    return _driver("openvino", place.python("openvino"), ask, place.openvino(ask.dtype), *first)


def _vllm(*more: str) -> Command:
    return lambda place, ask: _driver("vllm", place.python("vllm"), ask, place.weights_as(ask.dtype), *more)


LLAMA_SLOTS: Mapping[str, tuple[int, bool]] = {"W1": (16, True), "W2": (4, False), "W3": (128, True), "W4": (1, False),
                                                "W5": (1, False)}
"""Slots, and whether each has a cache of its own: the fastest that were tried on a cut of each (docs/peers.md)."""


def _llama(place: Place, ask: Ask) -> list[str | Path]:
    slots, split = LLAMA_SLOTS[ask.workload]
    pins = (Path(__file__).resolve().parent / "requirements" / "llamacpp.txt").read_text(encoding="utf-8")
    return _driver("llamacpp", OWN_PYTHON, ask, place.gguf(ask.dtype), "--server", place.llama_build / "llama-server",
                   "--slots", str(slots), *(["--split"] if split else []), "--release", pins.split()[-1])


def _transformers(place: Place, ask: Ask) -> list[str | Path]:
    return _driver("transformers", OWN_PYTHON, ask, place.weights_as(ask.dtype))


def _plain(place: Place, ask: Ask) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(ask.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _with_repository(place: Place, ask: Ask) -> dict[str, str]:
    return _plain(place, ask) | {"PYTHONPATH": str(REPOSITORY)}


def _vllm_environment(place: Place, ask: Ask) -> dict[str, str]:
    """Its documentation asks for both libraries to be loaded first."""
    return _plain(place, ask) | {"LD_PRELOAD": ":".join(str(file) for file in preloads(place)),
                                 "VLLM_CACHE_ROOT": str(place.root / "vllm-cache")}


def preloads(place: Place) -> list[Path]:
    """tcmalloc of the system and the OpenMP of vLLM's own environment, those that there are."""
    systems = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    return systems[:1] + [file for file in [place.root / "vllm" / "lib" / "libiomp5.so"] if file.is_file()]


ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (
    Engine(OURS, "pagedcli", _own(), _with_repository),
    Engine(LEAN, "pagedcli, sparing memory", _own("--lean"), _with_repository),
    Engine(JOB, "pagedcli generate, the whole job", _job, _with_repository),
    Engine("openvino", "OpenVINO GenAI", _openvino, _plain, "openvino"),
    Engine("vllm", "vLLM CPU, compiled", _vllm(), _vllm_environment, "vllm"),
    Engine("vllm-eager", "vLLM CPU, eager", _vllm("--eager"), _vllm_environment, "vllm"),
    Engine("llamacpp", "llama.cpp server", _llama, _plain, "llamacpp", forbids_end=True),
    Engine("transformers", "transformers, static batches", _transformers, _plain, "transformers", most_rounds=1),
)}
PEERS = tuple(name for name in ENGINES if name != JOB)
"""What --peers can name; the whole job comes with `ours`."""


def chosen(names: str) -> tuple[Engine, ...]:
    """Engines by comma-separated names, each once. ValueError names those there are."""
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in wanted if name not in PEERS]
    if unknown or not wanted:
        raise ValueError(f"--peers = {names!r}: must be some of {', '.join(PEERS)}")
    return tuple(ENGINES[name] for name in wanted)
