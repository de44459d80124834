"""A Hugging Face decoder made ready for paged attention: loading, dummy weights, and the flattened forward."""

from __future__ import annotations

import difflib
import inspect
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pagedcli.attention.host_arrays import as_array
from pagedcli.attention.interface import AttentionBackend, LayerSpec
from pagedcli.core.errors import CannotRunError, PagedError
from pagedcli.execution.decoder import Integers
from pagedcli.execution.experts import tile_experts
from pagedcli.execution.families import check_family
from pagedcli.execution.flat_batch import ROW_TILE
from pagedcli.execution.hook import HOOK_NAME, Observer, PagedRun, running
from pagedcli.execution.host_memory import WEIGHTS_WAY_OUT, check_room, is_out_of_memory
from pagedcli.execution.model_hub import ModelSource
from pagedcli.execution.quiet import quiet_transformers

RANDOM_ELEMENTS = 4_194_301
"""Random numbers drawn for dummy weights, then repeated. A prime, so that no two rows of a matrix come out equal."""


class HFDecoder:
    """Hugging Face's own modules, with their attention replaced. One flattened batch a forward, no cache object."""

    row_tile = ROW_TILE

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self.dtype: torch.dtype = module.dtype
        self.device: torch.device = module.device
        text = module.config.get_text_config(decoder=True)
        self.vocab_size = int(text.vocab_size)
        self._slices_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._run: PagedRun | None = None
        observer = Observer()
        with running(observer):
            self._call(torch.zeros(8, dtype=torch.int64), torch.arange(8), torch.zeros(1, dtype=torch.int64))
        if not observer.specs:
            raise CannotRunError("its attention layers never call the attention interface", "model_bypasses")
        self._layers: Mapping[int, LayerSpec] = observer.specs
        self.specs = tuple(observer.specs.values())

    @property
    def attention_seconds(self) -> float:
        return 0.0 if self._run is None else self._run.seconds

    def attach(self, backend: AttentionBackend) -> None:
        self._run = PagedRun(backend, self._layers)

    def forward(self, ids: Integers, positions: Integers, rows: Integers) -> torch.Tensor:
        assert self._run is not None, "attach() comes before forward()"
        self._run.start()
        with running(self._run):
            logits = self._call(ids, positions, rows)
        self._run.finish()
        return logits

    def eager(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits [B, T, vocab_size] of a dense batch by the model's own attention: the judge of the probe."""
        self.module.config._attn_implementation = "eager"
        try:
            out: torch.Tensor = self.module(input_ids=torch.as_tensor(ids, device=self.device), use_cache=False).logits
            return as_array(out.float().cpu())
        finally:
            self.module.config._attn_implementation = HOOK_NAME

    def _call(self, ids: Integers, positions: Integers, rows: Integers) -> torch.Tensor:
        ids, positions, rows = (torch.as_tensor(item, device=self.device) for item in (ids, positions, rows))
        extra = {"logits_to_keep": rows} if self._slices_logits else {}
        # With use_cache off no layer has a cache to fill, so ours is the only one; without attention_mask and with a
        # name that has no mask function, no mask is made.
        out = self.module(input_ids=ids[None], position_ids=positions[None], use_cache=False, **extra)
        logits: torch.Tensor = out.logits[0]
        return logits if self._slices_logits else logits[rows]


def load_config(source: ModelSource, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's config with its type's defaults filled in.

    CannotRunError for types that cannot run (by name and reason), unknown types, and configs that need trust.
    """
    raw = source.read_config()
    check_family(raw)
    try:
        with quiet_transformers():
            config = _config(source, raw, trust_remote_code)
    except PagedError:
        raise
    except Exception as fault:  # config classes raise what they like
        raise _unloadable(source, raw.get("model_type"), fault) from fault
    check_family(config.to_dict())
    return config


def load_decoder(source: ModelSource, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, *,
                 trust_remote_code: bool = False, seed: int = 0) -> HFDecoder:
    """Load weights (or draw dummy ones) and find out what each attention layer needs.

    CannotRunError names the model type and why it cannot run, or what the loader said.
    """
    model_type = config.model_type
    try:
        with quiet_transformers(), torch.inference_mode():
            if source.dummy:
                module = random_model(config, dtype, device, seed)
            else:
                if getattr(config, "quantization_config", None) is None:  # elements of packed numbers tell no bytes
                    check_room("its weights", weight_bytes(source.weights_folder, dtype), device, WEIGHTS_WAY_OUT)
                module = AutoModelForCausalLM.from_pretrained(
                    source.weights_folder, config=config, dtype=dtype, attn_implementation=HOOK_NAME,
                    local_files_only=True, use_safetensors=None if trust_remote_code else True,
                    trust_remote_code=trust_remote_code)
                torch.nn.Module.to(module, device)
            tile_experts(module)
            return HFDecoder(module.eval())
    except PagedError as fault:
        if fault.code == "out_of_memory":
            raise CannotRunError(f"{source.name}: {fault.message}", fault.code) from fault
        raise CannotRunError(f"{source.name}: models of type {model_type!r} cannot run on a paged KV cache: "
                             f"{fault.message}", fault.code) from fault
    except Exception as fault:  # loaders and models raise what they like; to a user each means that it does not load
        if is_out_of_memory(fault):
            raise CannotRunError(f"{source.name}: not enough memory on {device} for the weights. {WEIGHTS_WAY_OUT}",
                                 "out_of_memory") from fault
        raise _unloadable(source, model_type, fault) from fault


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes that a folder's tensors take in `dtype`, by what the safetensors files that will be loaded say of
    themselves; 0 when they cannot be read, which their loader will tell."""
    total = 0
    try:
        for file in _weight_files(folder):
            with file.open("rb") as stream:
                head = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            total += sum(math.prod(facts["shape"]) for name, facts in head.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError):
        return 0
    return total * dtype.itemsize


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers loads: the one named model, else those of its index. Beside them a
    folder may hold the same weights in another form, or an adapter's. Without either, all there are."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def _unloadable(source: ModelSource, model_type: object, fault: Exception) -> CannotRunError:
    reason = str(fault).strip().split("\n")[0]
    return CannotRunError(f"{source.name} (type {model_type!r}) could not be loaded with transformers "
                          f"{transformers.__version__}: {type(fault).__name__}: {reason}", "model_unloadable")


def _config(source: ModelSource, raw: Mapping[str, Any], trust: bool) -> PretrainedConfig:
    if source.config is not None:
        _check_type(source, raw)
        fields = {key: value for key, value in source.config.items() if key != "model_type"}
        return AutoConfig.for_model(raw["model_type"], **fields)
    if raw.get("auto_map") and raw.get("model_type") not in native_types() and not trust:
        raise CannotRunError(f"the model in {source.folder} comes with its own code, which runs only with "
                             "--trust-remote-code", "untrusted_code")
    if not raw.get("auto_map"):
        _check_type(source, raw)
    return AutoConfig.from_pretrained(source.weights_folder, trust_remote_code=trust, local_files_only=True)


def _check_type(source: ModelSource, raw: Mapping[str, Any]) -> None:
    """transformers' own error for an unknown type lists all the types there are."""
    name = str(raw.get("model_type"))
    if name not in native_types():
        close = difflib.get_close_matches(name, native_types(), 1, 0.75)
        raise CannotRunError(f"{source.name}: transformers {transformers.__version__} knows no model of type {name!r}"
                             + (f"; did you mean {close[0]!r}?" if close else ""), "model_unloadable")


def native_types() -> frozenset[str]:
    """Model types that transformers has code for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return frozenset(CONFIG_MAPPING.keys())


def random_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, seed: int) -> PreTrainedModel:
    """A model with seeded random weights at the scale its config asks for, at the speed of a memory copy.

    Matrices are filled from one short run of normal numbers, repeated from a different place in each; what is left
    (norms, biases, sinks, rotary tables) is set by the model's own initialiser.
    """
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=HOOK_NAME)
    tensors = [*module.parameters(), *module.buffers()]
    check_room(f"{config.model_type} with random weights", sum(tensor.nbytes for tensor in tensors), device,
               WEIGHTS_WAY_OUT)
    module.to_empty(device=device)
    module.tie_weights()
    text = config.get_text_config(decoder=True)
    scale = next((float(value) for value in (getattr(text, key, None) for key in ("initializer_range", "init_std"))
                  if value), 0.02)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(RANDOM_ELEMENTS).normal_(0.0, scale, generator=generator).to(dtype).to(device)
    for parameter in module.parameters():
        if parameter.dim() >= 2:
            offset = int(torch.randint(RANDOM_ELEMENTS, (1,), generator=generator))
            fill_repeating(parameter.data.view(-1), noise, offset)
            parameter._is_hf_initialized = True  # the initialiser below then leaves it alone
    torch.manual_seed(seed)
    module.initialize_weights()
    module.tie_weights()
    return module


def fill_repeating(target: torch.Tensor, source: torch.Tensor, offset: int) -> None:
    """target[i] = source[(offset + i) % len(source)], by whole copies. Both are one-dimensional."""
    done = min(len(target), len(source) - offset)
    target[:done] = source[offset:offset + done]
    whole = (len(target) - done) // len(source)
    for piece in range(whole):
        at = done + piece * len(source)
        target[at:at + len(source)] = source
    at = done + whole * len(source)
    target[at:] = source[:len(target) - at]
