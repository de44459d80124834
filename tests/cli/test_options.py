"""Options: where values come from, which wins, and what they become."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from pagedcli.cli.generate import generate
from pagedcli.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, parse_size, run_config, sampling_fields
from pagedcli.core.config import CacheConfig, ModelConfig, RunConfig, SchedulerConfig
from pagedcli.core.errors import UsageError
from pagedcli.core.request import SamplingParams
from tests.cli.console import Console
from tests.generate.fake_engine import lines

CONVENTIONS = set("""model load-format dtype device attention-backend block-size num-kv-blocks kv-cache-memory
kv-cache-dtype max-model-len max-num-seqs max-num-batched-tokens no-chunked-prefill no-prefix-cache shared-prefix
preemption swap-space tensor-parallel-size threads seed no-same-bits output overwrite restart limit quiet json-summary
config""".split())  # noqa: SIM905 - a list this long reads better as text


def test_every_named_option_exists() -> None:
    names = {name.replace("_", "-") for name in inspect.signature(generate).parameters}
    wanted = CONVENTIONS | {name.replace("_", "-") for name in SamplingParams.field_names()}
    assert wanted <= names


def test_sampling_options_are_the_sampling_fields() -> None:
    assert {option.name for option in SAMPLING_OPTIONS} | {"seed"} == set(SamplingParams.field_names())


def test_help_states_the_real_defaults() -> None:
    real = {field.name: field.default for config in (ModelConfig, CacheConfig, SchedulerConfig, SamplingParams)
            for field in fields(config)}
    for option in (*ENGINE_OPTIONS, *SAMPLING_OPTIONS):
        if option.name in ("swap_space", "seed") or option.kind is bool or option.default is None:
            continue
        if option.name in real:
            shown = real[option.name]
            assert str(option.default).lower() == str(shown).lower(), option.name
    assert parse_size("--swap-space", "4GiB") == CacheConfig().swap_space


def test_nothing_set_is_the_default_config() -> None:
    assert run_config({}) == RunConfig() and sampling_fields({}) == {}


def test_every_engine_option_reaches_the_config() -> None:
    config = run_config({
        "model": "m", "load_format": "dummy", "dtype": "fp32", "device": "cpu", "attention_backend": "reference",
        "max_model_len": 5, "threads": 3, "tensor_parallel_size": 2, "seed": 9, "trust_remote_code": True,
        "no_same_bits": True, "block_size": 8, "num_kv_blocks": 7, "kv_cache_memory": "1KiB", "kv_cache_dtype": "bf16",
        "swap_space": "2kB", "no_prefix_cache": True, "preemption": "swap", "max_num_seqs": 4,
        "max_num_batched_tokens": 6, "no_chunked_prefill": True, "gpu_memory_utilization": 0.5})
    assert config == RunConfig(
        ModelConfig("m", "dummy", "fp32", "cpu", "reference", 5, 3, True, False, 2, 9),
        CacheConfig(8, 7, 1024, "bf16", 2000, False, gpu_memory_utilization=0.5),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=6, chunked_prefill=False, preemption="swap"), seed=9)


@pytest.mark.parametrize(("text", "size"), [
    ("5", 5), ("1KiB", 1024), ("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("3MB", 3000000), ("1tib", 1 << 40), ("7B", 7),
    ("2G", 2 * 10**9), ("2Gi", 2 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size("--x", text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1XB", "1e9", "GiB"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="--x"):
        parse_size("--x", text)


def sampled(console: Console, *words: str) -> dict[str, object]:
    """The job's sampling fields, as its journal would hold them."""
    import json

    file = console.folder / "s.json"
    result, _ = console.generate(lines({"prompt": "a"}), *words, "--overwrite", "--json-summary", str(file))
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text())["signature"]["sampling"]


def test_precedence(console: Console) -> None:
    text = b'temperature = 0.1\ntop-k = 1\nseed = 1\n[generate]\ntop_p = 0.1\nmax-tokens = 1\n'
    config = console.write("c.toml", text)
    console.variables = {"PAGEDCLI_TEMPERATURE": "0.2", "PAGEDCLI_TOP_P": "0.2", "PAGEDCLI_SEED": "2"}
    found = sampled(console, "--config", config, "--temperature", "0.3")
    assert found == {"temperature": 0.3, "top_p": 0.2, "top_k": 1, "max_tokens": 1}
    assert console.configs[-1].seed == 2


def test_config_by_environment_and_flags(console: Console) -> None:
    config = console.write("c.toml", b'no-prefix-cache = true\nmax-num-seqs = 3\nignore-eos = true\nstop = "x"\n')
    console.variables = {"PAGEDCLI_CONFIG": config, "PAGEDCLI_NO_CHUNKED_PREFILL": "1"}
    assert sampled(console) == {"ignore_eos": True, "stop": ["x"]}
    made = console.configs[-1]
    assert (made.cache.prefix_cache, made.scheduler.max_num_seqs, made.scheduler.chunked_prefill) == (False, 3, False)
    assert sampled(console, "--no-ignore-eos") == {"ignore_eos": False, "stop": ["x"]}


def test_lists(console: Console) -> None:
    found = sampled(console, "--stop", "a b", "--stop", "c", "--stop-token-ids", "4", "--logit-bias", "5=-1.5")
    assert found == {"stop": ["a b", "c"], "stop_token_ids": [4], "logit_bias": {"5": -1.5}}
    console.variables = {"PAGEDCLI_STOP": "a b", "PAGEDCLI_STOP_TOKEN_IDS": "[4, 5]"}
    assert sampled(console) == {"stop": ["a b"], "stop_token_ids": [4, 5]}
    assert sampled(console, "--stop", "z")["stop"] == ["z"]
    config = console.write("c.toml", b'stop = ["q"]\nbad_words = ["r", "s"]\n[logit_bias]\n7 = 2\n')
    assert sampled(console, "--config", config) == {"stop": ["a b"], "stop_token_ids": [4, 5], "bad_words": ["r", "s"],
                                                    "logit_bias": {"7": 2.0}}


def test_zero_is_a_setting(console: Console) -> None:
    assert sampled(console, "--temperature", "0", "--max-tokens", "0", "--logprobs", "0") == {
        "temperature": 0.0, "max_tokens": 0, "logprobs": 0}


def test_early_stopping_words(console: Console) -> None:
    for word, value in (("true", True), ("false", False), ("never", "never")):
        assert sampled(console, "--early-stopping", word) == {"early_stopping": value}


@pytest.mark.parametrize(("text", "words"), [
    (b"temprature = 1", "no option 'temprature'; did you mean 'temperature'"),
    (b"[generate]\nmax_tokns = 1", "no option 'max_tokns'; did you mean 'max_tokens'"),
    (b"[gnerate]\nmax_tokens = 1", "no table [gnerate]; did you mean 'generate'?"),
    (b"[plan]\nmodel = 1", "no table [plan] (there are [generate] and [bench]"),
    (b"[bench]\nmax_tokns = 1", "[bench] has no option 'max_tokns'; did you mean 'max_tokens'"),
    (b"input = 1", "generate has no option 'input'\n"),
    (b"max-tokens = 1.5", "max-tokens = 1.5: must be an integer"),
    (b'max-tokens = "7"', "must be an integer"),
    (b"max-tokens = true", "must be an integer"),
    (b"no-prefix-cache = 1", "must be true or false"),
    (b'temperature = "hot"', "must be a number"),
    (b"x = ", "is not TOML"),
    (b"\xff", "is not TOML"),
])
def test_wrong_config_files(console: Console, text: bytes, words: str) -> None:
    result, _ = console.generate(lines({"prompt": "a"}), "--config", console.write("c.toml", text))
    assert result.exit_code == 2 and words in result.stderr


def test_wrong_variables(console: Console) -> None:
    for name, value in (("PAGEDCLI_MAX_TOKENS", "x"), ("PAGEDCLI_STOP_TOKEN_IDS", "x"), ("PAGEDCLI_STOP", "[")):
        console.variables = {name: value}
        result, _ = console.generate(lines({"prompt": "a"}))
        assert result.exit_code == 2 and (value in result.stderr or "--max-tokens" in result.stderr)


def test_a_table_of_another_command_is_passed_over(console: Console) -> None:
    text = b"max-tokens = 3\n[bench]\nrate = 2\nnum-requests = 5\n"
    assert sampled(console, "--config", console.write("c.toml", text)) == {"max_tokens": 3}


@pytest.mark.parametrize(("name", "says"), [
    ("PAGEDCLI_MAXTOKENS", "PAGEDCLI_MAXTOKENS is no setting of pagedcli; did you mean 'PAGEDCLI_MAX_TOKENS'?"),
    ("PAGEDCLI_INPUT", "PAGEDCLI_INPUT is no setting"), ("PAGEDCLI_QQQ", "is no setting of pagedcli: unset it"),
    ("PAGEDCLI_", "is no setting")])
def test_unknown_variables_are_refused(console: Console, name: str, says: str) -> None:
    console.variables = {name: "1"}
    result, _ = console.generate(lines({"prompt": "a"}))
    assert result.exit_code == 2 and says in result.stderr


def test_variables_of_other_commands_and_of_caches_are_known(console: Console) -> None:
    console.variables = {"PAGEDCLI_FIND_CAPACITY": "1", "PAGEDCLI_LATENCY_LIMIT": "1", "PAGEDCLI_GOODPUT": "ttft:1",
                         **{f"PAGEDCLI_{name}": "1" for name in ("CACHE", "CUDA_CACHE", "DEBUG", "EMULATOR_CACHE",
                                                                 "FUZZ_JOBS")}}
    result, _ = console.generate(lines({"prompt": "a"}))
    assert result.exit_code == 0, result.output


def test_a_negative_seed_is_refused_by_generate_as_by_bench_and_plan(console: Console) -> None:
    for words in (("generate", console.write("in.jsonl", b'{"prompt": "a"}\n')), ("bench",), ("plan",)):
        result = console(*words, "--seed", "-1")
        assert result.exit_code == 2 and "--seed = -1: must be at least 0" in result.stderr
