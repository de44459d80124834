"""From a model's files to an executor: weights, the trial against the model's own attention, the KV pool, kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedcli.attention.cpu_team import threads
from pagedcli.attention.host_arrays import inference_mode
from pagedcli.attention.interface import AttentionBackend, KVLayout
from pagedcli.core.config import CacheConfig, ModelConfig, SchedulerConfig
from pagedcli.core.devices import Device
from pagedcli.core.dtypes import dtype_name
from pagedcli.core.errors import CannotRunError
from pagedcli.core.wording import counted
from pagedcli.execution.decoder import Decoder
from pagedcli.execution.device_path import DevicePath, LargestStep, device_path
from pagedcli.execution.families import position_limit
from pagedcli.execution.gguf_cache import check_conversion
from pagedcli.execution.host_memory import WEIGHTS_WAY_OUT, holding
from pagedcli.execution.interface import ExecutorInfo, ExecutorLimits
from pagedcli.execution.kv_store import PoolSize, Room, kv_dtype, size_pool
from pagedcli.execution.linear_kernels import lacks
from pagedcli.execution.model_hub import ModelSource
from pagedcli.execution.native_decoder import NATIVE, NativeDecoder
from pagedcli.execution.packed_copy import PackedCopy, drop_copy, find_copy, keep_copy
from pagedcli.execution.placement import pick_device, pick_dtype, set_threads, torch_device, torch_dtype
from pagedcli.execution.probe import LOGIT_ROWS, Judged, probe
from pagedcli.execution.torch_executor import TorchExecutor

if TYPE_CHECKING:  # these import torch and transformers, which a start from a packed copy does without
    import torch

    from pagedcli.execution.hf_model import HFDecoder

LOGIT_COPIES = 3
"""Of the trial's logits that are held at once in float32: the model's own, ours, and their difference."""

class ModelSplit(Protocol):
    """Cuts a whole model to the part that one of several ranks runs (see tensor_parallel.py)."""

    def device(self, device: Device) -> torch.device: ...

    def apply(self, decoder: HFDecoder, device: torch.device, name: str) -> HFDecoder: ...

    def size_pool(self, layout: KVLayout, dtype: Any, cache: CacheConfig, device: Device,
                  max_positions: int, room: Room | None = None) -> PoolSize: ...


@dataclass(frozen=True, slots=True)
class _Model:
    """A model whose weights are there. `refine` makes what runs (the model, most positions); `layers` says what."""

    own: Judged
    config: Mapping[str, Any]
    refine: Callable[[Any, int], Decoder]
    layers: str
    notes: tuple[str, ...] = ()


def load_executor(source: ModelSource, model: ModelConfig, cache: CacheConfig, split: ModelSplit | None = None, *,
                  step: SchedulerConfig | None = None) -> TorchExecutor:
    """Load the model of `source`, try it against eager attention, make its pool and compile its kernels.

    `info.load_seconds` tells load, probe and compile apart. Raises CannotRunError or UsageError (see
    model_hub, hf_model, probe, kv_store). `split` makes it one rank's part of a model. `step` bounds the steps that
    will be asked for, which is what a GPU's pool leaves room for. Packed weights are kept on disk for the next start
    where the native program runs them (see packed_copy).
    `model.threads` sets the thread count of the whole process. A start from a packed copy does not import torch.
    """
    started = time.perf_counter()
    device = pick_device(model.device, model.attention_backend)
    if split is not None:
        device = split.device(device)
    if model.threads is not None:
        set_threads(model.threads)
    dtype = pick_dtype(model.dtype, device)
    maker = _Maker(source, model, cache, split, step, device, dtype, started)
    copy = find_copy(source, dtype) if maker.keeps else None
    if copy is not None:
        try:
            return maker.from_copy(copy)
        except CannotRunError as fault:
            if fault.code != "model_unsupported":
                raise
            drop_copy(copy.folder)  # its logits are not the model's own: it was damaged
    return maker.from_files()


@dataclass(frozen=True, slots=True)
class _Maker:
    """What is known of an executor before any weight is read, and the steps from there."""

    source: ModelSource
    model: ModelConfig
    cache: CacheConfig
    split: ModelSplit | None
    step: SchedulerConfig | None
    device: Device
    dtype: str
    started: float

    @property
    def backend_name(self) -> str:
        return self.model.attention_backend if self.model.attention_backend != "auto" else self.device.type

    @property
    def keeps(self) -> bool:
        """Whether packed copies serve: the native program may run, and nothing but the files decides what it runs."""
        return (self.split is None and self.backend_name == "cpu" and not self.model.trust_remote_code
                and lacks(self.dtype) is None)

    def from_copy(self, copy: PackedCopy) -> TorchExecutor:
        path = device_path(self.device, self.model, graphs=True)
        model = _Model(copy, copy.config, lambda own, most: NativeDecoder(own.weights, most), NATIVE,
                       (f"weights read from their packed copy in {copy.folder}",))
        return self._finish(model, path, path.backend(self.backend_name))

    def from_files(self) -> TorchExecutor:
        import torch

        from pagedcli.execution.decoder_choice import choose_decoder
        from pagedcli.execution.hf_model import load_config, load_decoder

        if self.model.threads is not None:
            set_threads(self.model.threads)  # again, now that torch is there
        trust = self.model.trust_remote_code
        config = load_config(self.source, trust_remote_code=trust)
        position_limit(config.to_dict(), self.model.max_model_len)  # refuses before weights are read
        if self.source.folder is not None:
            check_conversion(self.source.folder)
        device = torch_device(self.device)
        first = device if self.split is None else torch.device("cpu")  # a whole model may not fit one device
        decoder = load_decoder(self.source, config, torch_dtype(self.dtype), first, trust_remote_code=trust,
                               seed=self.model.seed)
        with torch.inference_mode():
            if self.split is not None:
                decoder = self.split.apply(decoder, device, self.source.name)
            path = device_path(self.device, self.model, graphs=self.split is None)
            backend = path.backend(self.backend_name)
            refine, layers = choose_decoder(decoder, backend)
        return self._finish(_Model(decoder, config.to_dict(), refine, layers), path, backend)

    def _finish(self, model: _Model, path: DevicePath, backend: AttentionBackend) -> TorchExecutor:
        """The trial, the pool and the executor."""
        loaded_at = time.perf_counter()
        cache, own, name = self.cache, model.own, self.source.name
        max_positions, position_note = position_limit(model.config, self.model.max_model_len)
        with inference_mode():
            cache_dtype = kv_dtype(cache.dtype, own.dtype)
            layout = KVLayout(own.specs, cache.block_size)
            with holding(f"the trial of {name} at load, {LOGIT_ROWS} rows of {counted(own.vocab_size, 'logit')}",
                         self.device, WEIGHTS_WAY_OUT, LOGIT_COPIES * LOGIT_ROWS * 4 * own.vocab_size):
                trial = probe(own, backend, cache_dtype, cache.block_size, name,
                              lambda whole: self._refined(model, whole, max_positions))
            probed_at = time.perf_counter()
            kept = self._keep(model, trial.decoder, trial.judged)
            kept_at = time.perf_counter()
            room = None
            if cache.num_blocks is None and cache.memory is None:
                bounds = self.step or SchedulerConfig()
                largest = LargestStep(bounds.token_budget, bounds.max_logit_rows, max_positions)
                room = path.room(trial.decoder, backend, layout, cache_dtype, cache, largest)
            size = (size_pool if self.split is None else self.split.size_pool)(
                layout, cache_dtype, cache, self.device, max_positions, room)
            store = path.store(layout, cache_dtype, size, backend)
            backend.bind(layout, store.pool)
            trial.decoder.attach(backend)
            limits = ExecutorLimits(num_blocks=size.num_blocks, host_blocks=size.host_blocks,
                                    block_size=cache.block_size, max_positions=max_positions,
                                    vocab_size=own.vocab_size, bytes_per_block=size.block_bytes,
                                    grows=self.device.type == "cpu")
            steps = path.steps(trial.decoder, backend, limits)
        notes = [*self.source.notes,
                 f"KV pool: {counted(size.num_blocks, 'block')} of {counted(cache.block_size, 'token')} ({size.note})",
                 f"attention probe: relative error {trial.error:.2g} against eager", f"layers: {model.layers}",
                 *model.notes, *(note for note in (kept, position_note) if note)]
        info = ExecutorInfo(
            model=name, device=self.device.type, dtype=self.dtype, kv_dtype=dtype_name(cache_dtype),
            attention=self.backend_name, threads=threads(), notes=tuple(notes),
            load_seconds={"load": loaded_at - self.started + kept_at - probed_at, "compile": trial.compile_seconds,
                          "probe": trial.seconds, "pool": time.perf_counter() - kept_at})
        return TorchExecutor(trial.decoder, backend, store, steps, limits, info)

    def _refined(self, model: _Model, own: Judged, max_positions: int) -> Decoder:
        """What runs, made within the trial: memory that lacks here is not its logits'."""
        with holding(f"{self.source.name}: packing its weights", self.device, WEIGHTS_WAY_OUT):
            return model.refine(own, max_positions)

    def _keep(self, model: _Model, decoder: Decoder, judged: NDArray[np.float32]) -> str | None:
        """Keep a packed copy of weights that came from the model's own files; a note on it."""
        if not self.keeps or isinstance(model.own, PackedCopy) or not isinstance(decoder, NativeDecoder):
            return None
        return keep_copy(self.source, model.config, decoder.weights, judged)
