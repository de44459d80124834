"""Options that several commands share: declared once, with their units and defaults, and turned into configs.

Each option can also be set by an environment variable (PAGEDCLI_ and its name) or in a TOML file given by --config;
the command line wins over the environment, that over the file, and that over the default.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from pagedcli.cli.config_file import config_parameter
from pagedcli.cli.environment import environment_of
from pagedcli.cli.known import PREFIX, check_variables
from pagedcli.core.config import CacheConfig, ModelConfig, RunConfig, SchedulerConfig
from pagedcli.core.errors import UsageError
from pagedcli.core.request import SamplingParams

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_SHOWN = 40
"""Characters of a refused value that a message shows."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `kind`: the type of its value (bool: a flag). `default` is only for the help; unset options are None
    (flags False), so that what a user set can be told from what is usual. Numbers must be above `above`, at least
    `least` and at most `most`."""

    name: str
    kind: Any
    help: str
    panel: str
    default: object = None
    many: bool = False
    pair: bool = False  # a flag with a --no- twin, None when neither is given
    metavar: str | None = None
    short: str | None = None
    above: float | None = None
    least: float | None = None
    most: float = math.inf

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def parameter(self) -> inspect.Parameter:
        """The option as a parameter that Typer understands."""
        text = self.help if self.default is None else f"{self.help} Default {self.default}."
        names = [f"{self.flag}/--no-{self.flag[2:]}" if self.pair else self.flag]
        names += [self.short] if self.short else []
        info = typer.Option(*names, help=text, rich_help_panel=self.panel, metavar=self.metavar, show_default=False,
                            envvar=None if self.many else self.variable, show_envvar=False)
        flag = self.kind is bool and not self.pair
        kind: Any = bool if flag else (list[self.kind] | None if self.many else self.kind | None)  # type: ignore[name-defined]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=False if flag else None,
                                 annotation=Annotated[kind, info])


    def check(self, value: Any) -> None:
        """UsageError for a number that is not finite or beyond the option's bounds, where it has any."""
        if value is None or isinstance(value, bool) or self.kind not in (int, float):
            return
        rules = ["a finite number"] if self.kind is float else []
        rules += [f"above {self.above:g}"] if self.above is not None else []
        rules += [f"at least {self.least:g}"] if self.least is not None else []
        rules += [f"at most {self.most:g}"] if self.most < math.inf else []
        good = ((self.kind is int or math.isfinite(value)) and (self.above is None or value > self.above)
                and (self.least is None or value >= self.least) and value <= self.most)
        if not good:
            raise UsageError(f"{self.flag} = {short(value)}: must be {', '.join(rules)}")


def short(value: float | str) -> str:
    """A refused value as messages show it: whole when it is no longer than a line can bear."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}... ({len(text)} characters)"


MODEL, MEMORY, BATCH, SAMPLE = "Model", "KV cache", "Batching", "Sampling (a row's own fields win)"
_M, _C, _S, _P = ModelConfig(), CacheConfig(), SchedulerConfig(), SamplingParams()
_DEVICE = Literal["auto", "cpu", "cuda"]
_DTYPE = Literal["auto", "fp32", "bf16", "fp16"]
_KV_DTYPE = Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2"]
_BACKEND = Literal["auto", "cpu", "reference", "cuda"]

ENGINE_OPTIONS: tuple[Option, ...] = (
    Option("model", str, "Hub id, local folder, .gguf file or short name; `null` runs everything but a model.", MODEL,
           _M.model),
    Option("load_format", Literal["auto", "dummy"], "`dummy` fills the model with random weights.", MODEL,
           _M.load_format),
    Option("dtype", _DTYPE, "Type of weights and arithmetic; auto picks what this machine is fast at.", MODEL,
           _M.dtype),
    Option("device", _DEVICE, "Where the model runs.", MODEL, _M.device),
    Option("attention_backend", _BACKEND, "Implementation of attention.", MODEL, _M.attention_backend),
    Option("max_model_len", int, "Most tokens of prompt plus output. Default: what the model allows.", MODEL),
    Option("threads", int, "CPU threads. Default: all cores.", MODEL),
    Option("tensor_parallel_size", int, "Devices that share each layer.", MODEL, _M.tensor_parallel_size),
    Option("seed", int, "Seed of all draws, hashed with a row's id (or number); rows may set it.", MODEL, 0, least=0),
    Option("trust_remote_code", bool, "Run code and unpickle weights that come with the model.", MODEL),
    Option("no_same_bits", bool, "Allow faster arithmetic whose bits depend on the batch.", MODEL),
    Option("block_size", int, "Tokens a KV block.", MEMORY, _C.block_size),
    Option("num_kv_blocks", int, "Blocks in the pool. Default: from --kv-cache-memory.", MEMORY),
    Option("kv_cache_memory", str, "Size of the pool in bytes, or such as 2GiB. Default: a share of free memory.",
           MEMORY, metavar="SIZE"),
    Option("gpu_memory_utilization", float, "Share of a GPU's memory for weights, steps and, with what is left, the "
           "pool, when the pool has no size.", MEMORY, _C.gpu_memory_utilization),
    Option("kv_cache_dtype", _KV_DTYPE, "Type of cached keys and values; auto is the model's.", MEMORY, _C.dtype),
    Option("swap_space", str, "Host memory for preempted sequences in bytes, or such as 4GiB (--simulate, where "
           "unset: the paper's 20GiB a device).", MEMORY, "4GiB", metavar="SIZE"),
    Option("no_prefix_cache", bool, "Do not reuse blocks of equal prompt beginnings.", MEMORY),
    Option("idle_kv_share", float, "On a CPU, to spare memory: keep blocks of finished rows up to this share of the "
           "most in use at once. Default: all.", MEMORY, least=0),
    Option("preemption", Literal["auto", "recompute", "swap"], "What happens to a running group when blocks run out.",
           MEMORY, _S.preemption),
    Option("max_num_seqs", int, "Sequences in one step at most.", BATCH, _S.max_num_seqs),
    Option("max_num_batched_tokens", int, "Tokens in one step at most. Default 2048, or 2560 without chunks.", BATCH),
    Option("no_chunked_prefill", bool, "Whole prompts only, as in the paper.", BATCH),
)

SAMPLING_OPTIONS: tuple[Option, ...] = (
    Option("max_tokens", int, "Output tokens a sequence; 0 only scores. Unset: 256, cut to what fits; a number that "
           "cannot fit gives an error row.", SAMPLE),
    Option("min_tokens", int, "Output tokens before a stop counts.", SAMPLE, _P.min_tokens),
    Option("temperature", float, "0 to 2; 0 is greedy.", SAMPLE, _P.temperature),
    Option("top_p", float, "Keep the likeliest tokens up to this probability, above 0 to 1.", SAMPLE, _P.top_p),
    Option("top_k", int, "Keep this many of the likeliest tokens; 0 or -1: all.", SAMPLE, _P.top_k),
    Option("min_p", float, "Keep tokens at least this share as likely as the likeliest, 0 to 1.", SAMPLE, _P.min_p),
    Option("n", int, "Outputs a row.", SAMPLE, _P.n),
    Option("best_of", int, "Sample this many and keep the n likeliest. Default: n.", SAMPLE),
    Option("presence_penalty", float, "Taken off tokens seen in the output, -2 to 2.", SAMPLE, _P.presence_penalty),
    Option("frequency_penalty", float, "Taken off for each time seen in the output, -2 to 2.", SAMPLE,
           _P.frequency_penalty),
    Option("repetition_penalty", float, "Divides scores of tokens seen, above 0.", SAMPLE, _P.repetition_penalty),
    Option("stop", str, "End where this text appears (repeatable).", SAMPLE, many=True, metavar="TEXT"),
    Option("stop_token_ids", int, "End after this token id (repeatable).", SAMPLE, many=True, metavar="ID"),
    Option("include_stop_str_in_output", bool, "Keep the stop text in the output.", SAMPLE, "no", pair=True),
    Option("ignore_eos", bool, "Go on after the end-of-text token.", SAMPLE, "no", pair=True),
    Option("logprobs", int, "Log probabilities of the chosen and this many likeliest tokens; -1: all.", SAMPLE),
    Option("prompt_logprobs", int, "The same for the prompt's tokens.", SAMPLE),
    Option("logit_bias", str, "Add to a token's score, clamped to -100..100 (repeatable).", SAMPLE, many=True,
           metavar="ID=NUMBER"),
    Option("bad_words", str, "Never write this text (repeatable).", SAMPLE, many=True, metavar="TEXT"),
    Option("use_beam_search", bool, "Beam search instead of sampling.", SAMPLE, "no", pair=True),
    Option("beam_width", int, "Beams, at least 1 (1 is greedy). Default: the larger of n and 2.", SAMPLE),
    Option("length_penalty", float, "Power of the length that beam scores are divided by.", SAMPLE, _P.length_penalty),
    Option("early_stopping", Literal["true", "false", "never"], "When beams end, as in Hugging Face.", SAMPLE, "false"),
)


def with_options(*options: Option, config_file: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command these options; it gets the ones that were set as one mapping, `settings`, by name.

    The command must take `context: typer.Context` and `settings: dict`. `config_file` adds --config.
    """
    known = {option.name: option for option in options}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [parameter for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
               if name != "settings"]

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            context = values["context"]
            values.pop("config", None)
            given = {name: values.pop(name) for name in known}
            variables = environment_of(context).variables
            check_variables(variables)
            for option in options:
                if option.many:
                    given[option.name] = _many(option, context, given[option.name], variables)
                else:
                    option.check(given[option.name])
            # Told apart by identity: 0 is a setting like any other, and equal to False.
            settings = {name: value for name, value in given.items() if value is not None and value != []
                        and (value is not False or known[name].pair)}
            return command(**values, settings=settings)

        parameters = [*own, *(option.parameter() for option in options)]
        parameters += [config_parameter(parameters)] if config_file else []
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # how a callable says it
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__  # else the old signature would be found through it
        return run

    return decorate


def _many(option: Option, context: Any, value: list[Any] | None, variables: Mapping[str, str]) -> list[Any] | None:
    """Repeatable options take a JSON list, or one value, from the environment."""
    source = context.get_parameter_source(option.name)
    text = variables.get(option.variable)
    if not text or (source is not None and source.name == "COMMANDLINE"):
        return value
    if not text.startswith("["):
        items: Any = [text]
    else:
        try:
            items = json.loads(text)
        except ValueError as fault:
            raise UsageError(f"{option.variable} = {text!r}: must be one value or a JSON list") from fault
    try:
        return [option.kind(item) for item in items]
    except ValueError as fault:
        raise UsageError(f"{option.variable} = {text!r}: must hold values of type {option.kind.__name__}") from fault


MAX_BLOCK_SIZE = 1 << 14
"""Tokens a block at most: far more than any block should have, far less than overflows any machine."""

MAX_REQUESTS = 1_000_000
"""Requests of a workload at most: all are in memory at once, some kilobytes each."""

_IDLE_WITHOUT_MODEL = ("load_format", "dtype", "device", "attention_backend", "threads", "tensor_parallel_size", "seed",
                       "trust_remote_code", "no_same_bits", "kv_cache_memory", "gpu_memory_utilization",
                       "kv_cache_dtype", "swap_space")
"""Engine options that mean nothing to `--model null`, which has no arithmetic and no bytes."""


def idle_note(settings: Mapping[str, Any]) -> str | None:
    """Which of the options that were set mean nothing for want of a model; None when all are heeded."""
    if settings.get("model") != "null":
        return None
    idle = [option.flag for option in ENGINE_OPTIONS if option.name in _IDLE_WITHOUT_MODEL and option.name in settings]
    return f"--model null has no use for {', '.join(idle)}: ignored" if idle else None


def run_config(settings: Mapping[str, Any], policy: str = "paged") -> RunConfig:
    """The engine's configuration from what was set. Raises UsageError naming option, value and limit."""
    get = settings.get
    seed = get("seed", 0)
    if get("block_size", 1) > MAX_BLOCK_SIZE:
        raise UsageError(f"--block-size = {settings['block_size']}: must be at most {MAX_BLOCK_SIZE}")
    model = {name: settings[name] for name in (
        "model", "load_format", "dtype", "device", "attention_backend", "max_model_len", "threads",
        "tensor_parallel_size", "trust_remote_code") if name in settings}
    cache = {new: settings[old] for old, new in (
        ("block_size", "block_size"), ("num_kv_blocks", "num_blocks"), ("kv_cache_dtype", "dtype"),
        ("gpu_memory_utilization", "gpu_memory_utilization"), ("idle_kv_share", "idle_share")) if old in settings}
    for old, new in (("kv_cache_memory", "memory"), ("swap_space", "swap_space")):
        if old in settings:
            cache[new] = parse_size("--" + old.replace("_", "-"), settings[old])
    scheduler = {name: settings[name] for name in ("max_num_seqs", "max_num_batched_tokens", "preemption")
                 if name in settings}
    return RunConfig(
        model=ModelConfig(**model, seed=seed, same_bits=not get("no_same_bits", False)),
        cache=CacheConfig(**cache, prefix_cache=not get("no_prefix_cache", False)),
        scheduler=SchedulerConfig(**scheduler, chunked_prefill=not get("no_chunked_prefill", False)),
        policy=policy, seed=seed)


def requests_within(number: int, what: str = "--num-requests") -> int:
    """`number`, when that many requests can be held. UsageError names `what`, the value and the limit."""
    if number > MAX_REQUESTS:
        raise UsageError(f"{what} = {short(number)}: must be at most {MAX_REQUESTS:,}, since all are held in memory")
    return number


def sampling_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields that were set, as SamplingParams takes them."""
    fields = {option.name: settings[option.name] for option in SAMPLING_OPTIONS if option.name in settings}
    if "early_stopping" in fields:
        word = fields["early_stopping"]
        fields["early_stopping"] = word == "true" if word in ("true", "false") else word
    if "logit_bias" in fields:
        fields["logit_bias"] = _biases(fields["logit_bias"])
    return fields


def _biases(items: Iterable[str]) -> dict[str, float]:
    result = {}
    for item in items:
        token, _, amount = item.partition("=")
        try:
            result[str(int(token))] = float(amount)
        except ValueError as fault:
            raise UsageError(f"--logit-bias {item!r}: must be a token id, = and a number") from fault
    return result


def parse_size(name: str, text: str) -> int:
    """Bytes in a size such as 1048576, 512MiB or 2GB (powers of 1024 with an i, of 1000 without)."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{name} = {text!r}: must be a number of bytes, or a number with KiB, MiB, GiB, TiB, kB, MB, "
                         "GB or TB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
