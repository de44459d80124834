"""GGUF files, dequantised once into a cached folder of safetensors weights, config and tokenizer."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any

from pagedcli.core.devices import HOST
from pagedcli.core.errors import CannotRunError
from pagedcli.execution.seals import SEAL, broken, seal

FORMAT = 2
"""Raise it when a converted folder's content changes, so that older ones are made anew."""

ORIGIN = "origin.json"
"""Says of a conversion which file it was last used for and in which format, so that useless ones can be told (see
old_models). Nothing else reads it, so no seal covers it."""
DIGITS = 16
CONVERSION = re.compile(rf".+-([0-9a-f]{{{DIGITS}}})")
"""How conversions are named: the file's stem and its identity (group 1)."""
SCRATCH = re.compile(rf"\.({CONVERSION.pattern})\.[^.]+\.tmp")
"""How the folder is named in which a conversion (group 1) is being made."""
SAMPLE_BYTES = 1 << 20
QUICK_BYTES = 16 << 20
"""Files up to here are read at every start to see that they are whole; weights when they are loaded (see seals)."""

_MEMORY_WAY_OUT = "Choose a smaller --model, or the same one as safetensors, which need no conversion"


def cache_dir() -> Path:
    """Where converted models and probe results lie: $PAGEDCLI_CACHE, else `pagedcli` in the user's cache folder."""
    own = os.environ.get("PAGEDCLI_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagedcli"


def file_identity(file: Path) -> str:
    """A short digest of size, time of change and both ends of a file: cheap, and new when the file is replaced."""
    facts = file.stat()
    digest = hashlib.sha256(f"{FORMAT} {facts.st_size} {facts.st_mtime_ns} ".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(SAMPLE_BYTES))
        stream.seek(max(0, facts.st_size - SAMPLE_BYTES))
        digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:DIGITS]


def place_digest(folder: Path) -> str:
    """A short digest of where a folder lies, which the names of what is packed from it carry (see packed_copy)."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]


def lock_file(conversion: Path) -> Path:
    """What a process holds locked while it makes a conversion."""
    return conversion.with_name(f"{conversion.name}.lock")


def converted_folder(file: Path, say: Callable[[str], None]) -> tuple[Path, bool]:
    """The folder made from `file`, and whether it was made now.

    The folder appears by one rename, so it is whole or absent whatever is killed; a lock makes a second process wait
    for the first instead of doing the work twice. CannotRunError when the file cannot be read, converted or stored.
    """
    if not file.is_file():
        raise CannotRunError(f"no such GGUF file: {file}", "model_not_found")
    try:
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise CannotRunError(f"{file} is not a GGUF file (it does not begin with the letters GGUF)",
                                     "bad_model_file")
        parent = cache_dir() / "models"
        target = parent / f"{file.stem}-{file_identity(file)}"
        if _whole(target):
            _note_use(target, file)
            return target, False
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(lock_file(target)):
            if _whole(target):
                _note_use(target, file)
                return target, False
            if target.is_dir():
                say(f"{target} is damaged ({broken(target, QUICK_BYTES)}) and is made anew")
                shutil.rmtree(target)
            for stale in parent.glob(f".{target.name}.*.tmp"):
                shutil.rmtree(stale, ignore_errors=True)  # left by a process that was killed while it held the lock
            say(f"converting {file.name} (once; kept in {target})")
            scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=parent))
            try:
                _convert(file, scratch)
                seal(scratch)
                _name_origin(scratch, file)
                scratch.chmod(0o755)
                os.rename(scratch, target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as fault:
        raise CannotRunError(f"cannot convert {file}: {fault}. The converted model is kept in {cache_dir()}, which "
                             "must be writable and have room; PAGEDCLI_CACHE names another folder",
                             "cache_unusable") from fault
    return target, True


def read_origin(folder: Path) -> dict[str, Any] | None:
    """What ORIGIN says of a conversion: its "format" and its "source". None where it cannot be read."""
    try:
        origin: Any = json.loads((folder / ORIGIN).read_text("utf-8"))
        return {"format": int(origin["format"]), "source": str(origin["source"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _origin_of(file: Path) -> dict[str, Any]:
    return {"format": FORMAT, "source": str(file.resolve())}


def _note_use(folder: Path, file: Path) -> None:
    """Make ORIGIN name the file by which a conversion was found this time: a file that is moved or copied keeps its
    identity, and the conversion would else seem to be of one that is gone."""
    if read_origin(folder) != _origin_of(file):
        with suppress(OSError):  # a cache that cannot be written serves as well
            _name_origin(folder, file)


def _name_origin(folder: Path, file: Path) -> None:
    """Write ORIGIN at once or not at all: several processes may be doing the same."""
    draft = folder / f"{ORIGIN}.{os.getpid()}"
    try:
        draft.write_text(json.dumps(_origin_of(file)) + "\n", "utf-8")
        os.replace(draft, folder / ORIGIN)
    finally:
        draft.unlink(missing_ok=True)


def _whole(folder: Path) -> bool:
    """Whether a conversion is there and, as far as a start can look, as it was written."""
    return folder.is_dir() and broken(folder, QUICK_BYTES) is None


def check_conversion(folder: Path) -> None:
    """Before weights are read: CannotRunError when they are not as they were written. Other folders have no seal."""
    if (folder / SEAL).is_file() and (fault := broken(folder)) is not None:
        raise CannotRunError(f"the converted model in {folder} is damaged: {fault}. Delete that folder and run again: "
                             "it is then made anew from the GGUF file", "bad_model_file")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system frees it when its holder dies."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _convert(file: Path, out: Path) -> None:
    """Write config.json, model.safetensors (fp32, so that no later choice of dtype loses bits) and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pagedcli.execution.host_memory import check_room, is_out_of_memory
    from pagedcli.execution.quiet import quiet_transformers

    try:
        check_room(f"cannot convert {file}: its weights in fp32, of which all are held at once", _fp32_bytes(file),
                   HOST, _MEMORY_WAY_OUT)
        with quiet_transformers(), redirect_stderr(io.StringIO()):  # its progress bar knows no other way to be quiet
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except CannotRunError:
        raise
    except Exception as fault:  # the reader raises whatever its parts raise; each means the same to a user
        if is_out_of_memory(fault):
            raise _too_large(file) from fault
        reason = str(fault).strip().split("\n")[0]
        raise CannotRunError(f"cannot convert {file}: {type(fault).__name__}: {reason}", "bad_model_file") from fault
    try:
        _write_model(model, tokenizer, out)
    except Exception as fault:
        if is_out_of_memory(fault):
            raise _too_large(file) from fault
        if _could_not_write(fault):
            raise OSError(str(fault).strip().split("\n")[0]) from fault
        raise


def _fp32_bytes(file: Path) -> int:
    """Bytes of a GGUF file's weights once they are dequantised: 4 for each element that its table of tensors has."""
    from gguf import GGUFReader

    return 4 * sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)


def _too_large(file: Path) -> CannotRunError:
    return CannotRunError(f"cannot convert {file}: this machine has too little memory for its weights in fp32. "
                          f"{_MEMORY_WAY_OUT}", "out_of_memory")


def _could_not_write(fault: Exception) -> bool:
    """Whether an error of the Rust libraries below is one of writing: they have their own for a disk that is full,
    safetensors a type and tokenizers none at all, and only the text tells them from faults of this program."""
    from safetensors import SafetensorError

    theirs = type(fault) is Exception or isinstance(fault, SafetensorError)
    return theirs and re.search(r"os error \d+|I/O error|IoError", str(fault)) is not None


def _write_model(model: Any, tokenizer: Any, out: Path) -> None:
    """The files of a conversion, forced to the disk."""
    from safetensors.torch import save_file

    tokenizer.save_pretrained(out)
    config: dict[str, Any] = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    weights: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():  # tied weights are one tensor under two names: keep the first
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor.contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    if model.generation_config is not None:
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        wanted = {key: getattr(model.generation_config, key) for key in keys}
        (out / "generation_config.json").write_text(json.dumps(wanted, indent=2) + "\n", "utf-8")
    for item in out.iterdir():
        with item.open("rb") as stream:
            os.fsync(stream.fileno())
