"""`pagedcli generate` end to end over a fake engine: the rows, the files, the exit codes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pagedcli.core.sequence import SequenceGroup
from tests.cli.console import Console
from tests.generate.fake_engine import ANSWER, lines

PROMPTS = [{"prompt": f"number {index}", "max_tokens": 3 + index * 7 % 11} for index in range(40)]


def codes(rows: list[dict[str, Any]]) -> list[str | None]:
    return [row["error"] and row["error"]["code"] for row in rows]


def test_one_long_prompt_fails_alone(console: Console) -> None:  # reports 1 and 2
    result, rows = console.generate(lines({"prompt": "a"}, {"prompt": "b" * 600}, {"prompt": "c"}), "--max-tokens", "4")
    assert result.exit_code == 1
    assert codes(rows) == [None, "too_long", None]
    # A prompt that does not fit alone is not helped by fewer output tokens.
    assert rows[1]["error"]["message"] == ("the prompt alone has 600 tokens, above the model's limit of 512; shorten "
                                           "the prompt")
    assert rows[1] == {"id": 1, "index": 1, "outputs": [], "error": rows[1]["error"],
                       "usage": {"prompt_tokens": 600, "completion_tokens": 0, "cached_tokens": 0}}
    assert rows[0] == {
        "id": 0, "index": 0, "error": None, "usage": {"prompt_tokens": 1, "completion_tokens": 4, "cached_tokens": 0},
        "outputs": [{"index": 0, "text": ANSWER[:4], "token_ids": list(ANSWER[:4].encode()), "finish_reason": "length",
                     "stop_reason": None, "cumulative_logprob": -2.0, "logprobs": None}]}
    assert "2 good, 1 failed" in result.stderr


def test_input_order(console: Console) -> None:  # report 3
    result, rows = console.generate(lines({"prompt": "a", "max_tokens": 50}, {"prompt": "b", "max_tokens": 1}))
    assert result.exit_code == 0 and console.engines[0].served == [1, 0]
    assert [row["index"] for row in rows] == [0, 1]
    assert [row["usage"]["completion_tokens"] for row in rows] == [50, 1]


def test_a_row_once_done_is_not_done_again(console: Console) -> None:  # report 4
    data = lines(*PROMPTS)
    console.generate(data, name="whole.jsonl")
    whole = console.output("whole.jsonl").read_bytes()

    def crash(group: SequenceGroup) -> None:
        if len(console.engines[-1].served) == 13:
            raise RuntimeError("pulled the plug")

    console.options["after"] = crash
    result, rows = console.generate(data, "--max-num-seqs", "4")
    assert (result.exit_code, rows) == (3, [])
    assert "internal error: RuntimeError: pulled the plug" in result.stderr and "Traceback" not in result.stderr
    console.options.clear()
    result, _ = console.generate(data)
    assert result.exit_code == 0 and "rows done" in result.stderr
    first, second = console.engines[-2].served, console.engines[-1].served
    kept = 40 - len(second)
    assert 0 < kept <= 13 and set(second).isdisjoint(first[:kept]) and set(first[:kept]) | set(second) == set(range(40))
    assert console.output().read_bytes() == whole
    assert not console.journal().exists()


def test_duplicate_ids(console: Console) -> None:  # report 5
    _, rows = console.generate(lines({"prompt": "x", "id": "a"}, {"prompt": "y", "id": "a"}))
    assert codes(rows) == [None, "duplicate_id"]
    assert "line 2" in rows[1]["error"]["message"] and "line 1" in rows[1]["error"]["message"]


def test_an_id_in_the_output_is_one_rows(console: Console) -> None:
    _, rows = console.generate(b'{"id":1,"prompt":"x"}\nnot json\n{"prompt":"y"}\n{"id":4,"prompt":"z"}\n'
                               b'{"prompt":"w"}\n{"id":"a","prompt":"v"}\n{"id":"a","prompt":"u"}\n')
    assert [row["id"] for row in rows] == [1, None, 2, None, 4, "a", None]
    assert codes(rows) == [None, "invalid_json", None, "duplicate_id", None, None, "duplicate_id"]
    assert [row["index"] for row in rows] == list(range(7)) and "id 4 on line 4" in rows[3]["error"]["message"]


def test_line_separators_inside_strings(console: Console) -> None:  # report 6
    texts = ["a\u2028b", "a\u0085b", "a\x0cb"]
    console.options["answer"] = "x\u2028y\u0085z"
    result, rows = console.generate(lines(*({"prompt": text, "max_tokens": 8} for text in texts)))
    assert result.exit_code == 0
    assert [row["usage"]["prompt_tokens"] for row in rows] == [len(text.encode()) for text in texts]
    assert rows[0]["outputs"][0]["text"] == "x\u2028y\u0085z"
    assert len(console.output().read_text("utf-8").splitlines()) == 3


def test_empty_prompt(console: Console) -> None:  # report 7
    result, rows = console.generate(lines({"prompt": ""}, {"prompt": "good"}))
    assert result.exit_code == 1 and codes(rows) == ["empty_prompt", None]


def test_scoring_without_output(console: Console) -> None:  # report 8
    _, rows = console.generate(lines({"prompt": "abc", "max_tokens": 0, "prompt_logprobs": 0}))
    assert rows[0]["error"] is None and rows[0]["outputs"][0]["token_ids"] == []
    scored = rows[0]["prompt_logprobs"]
    assert scored[0] is None and scored[1][0] == {"token_id": 98, "token": "b", "logprob": -0.25}
    assert len(scored) == 3


@pytest.mark.parametrize(("length", "asked", "code"), [
    (512, 1, "too_long"), (512, None, "too_long"), (512, 0, None), (511, 1, None), (511, 2, "too_long"),
    (513, 0, "too_long"),
])
def test_prompts_as_long_as_the_model_allows(console: Console, length: int, asked: int | None,
                                             code: str | None) -> None:  # report 9
    _, rows = console.generate(lines({"prompt": "x" * length, "max_tokens": asked}, {"prompt": "y", "max_tokens": 1}))
    assert codes(rows) == [code, None]


def test_larger_than_the_pool(console: Console) -> None:  # report 10
    _, rows = console.generate(lines({"prompt": "x" * 80}, {"prompt": "short"}), "--num-kv-blocks", "4")
    assert codes(rows) == ["exceeds_kv_pool", None]
    assert "6 KV blocks" in rows[0]["error"]["message"] and "has 4" in rows[0]["error"]["message"]
    assert rows[1]["usage"]["completion_tokens"] == 64 - len("short")


def test_max_tokens_that_nobody_set_is_cut(console: Console) -> None:
    long = "x" * 400
    _, rows = console.generate(lines({"prompt": long}, {"prompt": "a"}, {"prompt": long, "max_tokens": 256}))
    assert [row["usage"]["completion_tokens"] for row in rows] == [112, 256, 0]
    assert codes(rows) == [None, None, "too_long"]
    _, rows = console.generate(lines({"prompt": long}), "--max-tokens", "256", name="second.jsonl")
    assert codes(rows) == ["too_long"]


def test_several_outputs(console: Console) -> None:  # report 17
    _, rows = console.generate(lines({"prompt": "a", "n": 3, "max_tokens": 2}))
    assert [output["index"] for output in rows[0]["outputs"]] == [0, 1, 2]
    assert [output["text"] for output in rows[0]["outputs"]] == [ANSWER[i:i + 2] for i in range(3)]
    assert rows[0]["usage"]["completion_tokens"] == 6


def test_multibyte_text(console: Console) -> None:  # report 21
    console.options["answer"] = "春天👩‍👩‍👧‍👦"
    _, rows = console.generate(lines({"prompt": "é", "max_tokens": 8}))
    assert rows[0]["outputs"][0]["text"] == "春天" and len(rows[0]["outputs"][0]["token_ids"]) == 8
    assert "春天".encode() in console.output().read_bytes()


def test_infinities_never_reach_json(console: Console) -> None:  # report 23; console.rows refuses them
    _, rows = console.generate(lines({"prompt": "a", "max_tokens": 1, "top_k": 1, "logprobs": 5}))
    assert [entry["token_id"] for entry in rows[0]["outputs"][0]["logprobs"][0]] == [116, 0, 1]


def test_metadata_passes_through(console: Console) -> None:
    meta = {"a": [1, {"b": None}], "中": "文"}
    _, rows = console.generate(lines({"prompt": "a", "metadata": meta}, {"prompt": "", "metadata": meta}))
    assert [row["metadata"] for row in rows] == [meta, meta]


def test_mixed_forms_keep_their_places(console: Console) -> None:
    batch = {"custom_id": "q", "method": "POST", "url": "/v1/chat/completions",
             "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}}
    bad = {**batch, "custom_id": "r", "body": {**batch["body"], "stream": True}}
    result, rows = console.generate(lines({"prompt": "a"}, batch, "{", bad))
    assert result.exit_code == 1 and rows[0]["id"] == 0 and rows[2]["error"]["code"] == "invalid_json"
    assert rows[1]["response"]["body"]["choices"][0]["message"]["content"] == ANSWER[:2]
    assert rows[3]["response"]["status_code"] == 400 and rows[3]["custom_id"] == "r"


def test_rows_that_name_another_model_are_counted(console: Console) -> None:
    def request(place: int, model: str | None) -> dict[str, Any]:
        return {"custom_id": str(place), "method": "POST", "url": "/v1/completions",
                "body": {"prompt": "a", "max_tokens": 1, "model": model}}

    names = ["HuggingFaceTB/SmolLM2-135M", "gpt-4o", None, "gpt-4o", "smollm2-135m", "o1"]
    result, rows = console.generate(lines(*(request(*item) for item in enumerate(names))))
    assert result.exit_code == 0 and [row["response"]["body"]["model"] for row in rows] == ["smollm2-135m"] * 6
    assert result.stderr.count("another model") == 1
    assert '3 rows name another model (row 1: "gpt-4o")' in " ".join(result.stderr.split())
    result, _ = console.generate(lines(request(0, None), request(1, "smollm2-135m")), name="same.jsonl")
    assert "another model" not in result.stderr


def test_the_queue_is_bounded(console: Console) -> None:
    console.generate(lines(*({"prompt": "a", "max_tokens": 1} for _ in range(300))), "--max-num-seqs", "8")
    assert console.engines[0].most_queued == 16 and len(console.engines[0].served) == 300


def test_empty_file(console: Console) -> None:
    result, rows = console.generate(b"\n\n")
    assert result.exit_code == 0 and rows == [] and console.output().read_bytes() == b""
    assert "the input has no rows; nothing was generated" in result.stderr and "already" not in result.stderr
    assert console.engines == []


def test_limit(console: Console) -> None:
    _, rows = console.generate(lines(*PROMPTS), "--limit", "3")
    assert [row["index"] for row in rows] == [0, 1, 2]


def test_standard_input_and_output(console: Console) -> None:
    result = console("generate", "-", "--max-tokens", "2", stdin=lines({"prompt": "a"}, {"prompt": ""}))
    assert result.exit_code == 1
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["index"] for row in rows] == [0, 1] and rows[0]["outputs"][0]["text"] == ANSWER[:2]
    assert "1 good, 1 failed" in result.stderr
    result, _ = console.generate(lines({"prompt": "a"}), "-o", "-", "--quiet")
    assert json.loads(result.stdout)["index"] == 0 and result.stderr == "" and not console.output().exists()


def test_a_device_as_output_is_not_replaced(console: Console) -> None:
    result, _ = console.generate(lines({"prompt": "a"}), "-o", os.devnull)
    assert result.exit_code == 0 and not Path(os.devnull).is_file()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_device_gives_one_message_and_keeps_the_rows(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(console.folder))
    result, _ = console.generate(lines(*PROMPTS), "-o", "/dev/full", "-q")
    assert result.exit_code == 3 and result.stderr.count("\n") == 1 and "No space left" in result.stderr
    (kept,) = console.folder.glob("pagedcli-*.partial")
    assert str(kept) in result.stderr
    again, _ = console.generate(lines(*PROMPTS), "-o", "/dev/full", "-q")
    assert again.exit_code == 3 and kept.exists() and again.stderr == result.stderr
    result, _ = console.generate(lines(*PROMPTS), "-o", os.devnull)
    assert result.exit_code == 0 and len(console.engines) == 1 and "40 of them from the journal" in result.stderr


def test_quiet_and_json_summary(console: Console) -> None:
    file = console.folder / "summary.json"
    result, _ = console.generate(lines({"prompt": "ab", "n": 2, "max_tokens": 3}, {"prompt": ""}), "--quiet",
                                 "--json-summary", str(file), "--temperature", "0.5", "--seed", "9")
    assert result.stdout == ""
    assert result.stderr == ("pagedcli: 1 of 2 rows failed; the first, row 1, because of "
                             "empty_prompt: the prompt has 0 tokens; at least 1 is needed\n")
    summary = json.loads(file.read_text())
    assert (summary["rows"], summary["good"], summary["failed"], summary["resumed"]) == (2, 1, 1, 0)
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (2, 6)
    assert summary["signature"]["seed"] == 9 and summary["signature"]["sampling"] == {"temperature": 0.5}
    assert {"import", "scan", "build", "generate", "order", "load", "total"} <= summary["seconds"].keys()
    for name in ("waste", "preemptions", "prefix_hit_rate", "sharing_saving", "peak_kv_use", "output_tokens_per_s"):
        assert name in summary


def test_options_that_no_model_heeds_are_named(console: Console) -> None:
    file = console.folder / "summary.json"
    words = ("--tensor-parallel-size", "1", "--kv-cache-dtype", "fp8", "--block-size", "8", "--seed", "0")
    console.generate(lines({"prompt": "a"}), *words, "--model", "null", "--json-summary", str(file))
    assert json.loads(file.read_text())["notes"][-1] == (
        "--model null has no use for --tensor-parallel-size, --seed, --kv-cache-dtype: ignored")
    for more in (("--model", "null", "--block-size", "8"), words):
        console.generate(lines({"prompt": "a"}), *more, "--json-summary", str(file), "--overwrite")
        assert not any("no use" in note for note in json.loads(file.read_text())["notes"])


@pytest.mark.parametrize(("name", "default"), [("a.jsonl", "a.out.jsonl"), ("a.json", "a.json.out.jsonl"),
                                               ("a", "a.out.jsonl")])
def test_the_default_output_is_as_the_help_says(console: Console, name: str, default: str) -> None:
    assert console("generate", console.write(name, lines({"prompt": "a"}))).exit_code == 0
    assert (console.folder / default).exists()
    said = " ".join(console("generate", "--help").stdout.split())
    assert "INPUT with .out.jsonl for its .jsonl, or after any other name." in said


def test_existing_output_is_refused_before_any_work(console: Console) -> None:
    console.output().write_text("precious")
    result, _ = console("generate", console.write("in.jsonl", lines({"prompt": "a"}))), None
    assert result.exit_code == 2 and "--overwrite" in result.stderr and console.engines == []
    assert console.output().read_text() == "precious"
    result, rows = console.generate(lines({"prompt": "a"}), "--overwrite")
    assert result.exit_code == 0 and len(rows) == 1


def interrupted(console: Console, data: bytes, *words: str) -> None:
    """Leave a journal with some rows behind."""
    def crash(group: SequenceGroup) -> None:
        if len(console.engines[-1].served) == 5:
            raise RuntimeError("crash")

    console.options["after"] = crash
    assert console.generate(data, "--max-num-seqs", "2", *words)[0].exit_code == 3
    console.options.clear()
    assert console.journal().exists()


@pytest.mark.parametrize(("words", "differs"), [
    (("--temperature", "0.3"), "sampling.temperature: journal unset, this run 0.3"),
    (("--seed", "4"), "seed: journal 0, this run 4"),
    (("--model", "other"), 'model.model: journal "smollm2-135m", this run "other"'),
    (("--block-size", "8"), "cache.block_size: journal 16, this run 8"),
    (("--limit", "39"), "limit: journal null, this run 39"),
])
def test_other_settings_are_refused(console: Console, words: tuple[str, ...], differs: str) -> None:
    interrupted(console, lines(*PROMPTS))
    kept = console.journal().read_bytes()
    result, _ = console.generate(lines(*PROMPTS), *words)
    assert result.exit_code == 2 and differs in result.stderr and "--restart" in result.stderr
    assert "input." not in result.stderr
    assert console.journal().read_bytes() == kept and len(console.engines) == 1
    result, rows = console.generate(lines(*PROMPTS), *words, "--restart")
    assert result.exit_code == 0 and [row["index"] for row in rows] == list(range(len(rows))) and len(rows) >= 39


def test_other_input_is_refused(console: Console) -> None:
    interrupted(console, lines(*PROMPTS))
    result, _ = console.generate(lines(*PROMPTS[:-1], {"prompt": "new"}))
    assert result.exit_code == 2 and "input.content: the rows are other ones." in result.stderr


def test_settings_that_only_change_speed_may_change(console: Console) -> None:
    interrupted(console, lines(*PROMPTS))
    result, rows = console.generate(lines(*PROMPTS), "--max-num-seqs", "7", "--no-prefix-cache", "--threads", "1")
    assert result.exit_code == 0 and len(rows) == 40
    interrupted(console, lines(*PROMPTS), "--no-same-bits", "--overwrite")
    result, _ = console.generate(lines(*PROMPTS), "--no-same-bits", "--overwrite", "--max-num-seqs", "7")
    assert result.exit_code == 2 and "scheduler.max_num_seqs" in result.stderr


def test_a_finished_journal_needs_no_model(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        result, _ = console.generate(lines(*PROMPTS))
    assert result.exit_code == 130 and "40 of 40" in result.stderr
    result, rows = console.generate(lines(*PROMPTS))
    assert result.exit_code == 0 and len(rows) == 40 and len(console.engines) == 1
    assert "nothing was generated" in result.stderr


def test_ctrl_c_keeps_the_journal(console: Console) -> None:
    def press(group: SequenceGroup) -> None:
        if len(console.engines[-1].served) == 5:
            raise KeyboardInterrupt

    console.options["after"] = press
    result, _ = console.generate(lines(*PROMPTS), "--max-num-seqs", "2")
    assert result.exit_code == 130
    assert "of 40 rows done and kept in" in result.stderr and "same command again" in result.stderr
    assert console.engines[0].closed and console.journal().exists()


def test_ctrl_c_before_any_row_leaves_nothing(console: Console) -> None:
    def press(group: SequenceGroup) -> None:
        raise KeyboardInterrupt

    console.options["after"] = press
    result, _ = console.generate(lines({"prompt": "a"}))
    assert result.exit_code == 130 and "nothing is kept" in result.stderr and not console.journal().exists()


@pytest.mark.parametrize(("words", "message"), [
    (("--temperature", "7"), "temperature = 7.0: must be between 0 and 2"),
    (("--max-tokens", "many"), "'--max-tokens'"),
    (("--dtype", "fp64"), "fp64"),
    (("--block-size", "0"), "--block-size = 0"),
    (("--block-size", "1000000", "--model", "null"), "--block-size = 1000000: must be at most 16384"),
    (("--kv-cache-memory", "lots"), "--kv-cache-memory = 'lots'"),
    (("--logit-bias", "5"), "--logit-bias '5'"),
    (("--limit", "0"), "--limit"),
    (("--no-such-option",), "--no-such-option"),
    (("-o", "/"), "is a folder"),
    (("-o", "/no/such/folder/out"), "/no/such/folder does not exist"),
    (("--shared-prefix", "/no/such/file"), "--shared-prefix /no/such/file"),
    (("--json-summary", "/no/such/file"), "--json-summary /no/such/file"),
    (("--config", "/no/such/file"), "--config /no/such/file"),
])
def test_bad_usage(console: Console, words: tuple[str, ...], message: str) -> None:
    result, _ = console.generate(lines({"prompt": "a"}), *words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr and "Traceback" not in result.output and console.engines == []
    assert sorted(os.listdir(console.folder)) == ["in.jsonl"]


def test_bad_inputs(console: Console) -> None:
    for path, words in ((str(console.folder / "none.jsonl"), "cannot read"), (str(console.folder), "cannot read"),
                        (console.write("utf16.jsonl", '{"prompt": "a"}'.encode("utf-16")), "UTF-16")):
        result = console("generate", path)
        assert result.exit_code == 2 and words in result.stderr, result.output
    path = console.write("same.jsonl", lines({"prompt": "a"}))
    result = console("generate", path, "-o", path, "--overwrite")
    assert result.exit_code == 2 and "is the input itself" in result.stderr


def test_traceback_only_with_debug(console: Console) -> None:
    path = console.write("in.jsonl", lines({"prompt": "a"}))
    bad = ("generate", path, "--temperature", "7")
    for words in (("--debug", *bad), (*bad, "--debug")):
        result = console(*words)
        assert result.exit_code == 2 and "Traceback" in result.stderr and "UsageError" in result.stderr


def test_shared_prefix(console: Console) -> None:
    prefix = console.write("prefix.txt", b"You are kind.\n" * 3)
    result, _ = console.generate(lines({"prompt": "a"}), "--shared-prefix", prefix)
    assert result.exit_code == 0 and bytes(console.engines[0].pinned) == b"You are kind.\n" * 3
    assert "32 of its 42 tokens" in result.stderr
    long = console.write("long.txt", b"x" * 600)
    result, _ = console.generate(lines({"prompt": "a"}), "--shared-prefix", long, "--overwrite")
    assert result.exit_code == 2 and "600 tokens" in result.stderr


def test_progress_counts_rows(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:  # report 24
    from pagedcli.generate import job
    seen = []
    monkeypatch.setattr(job, "PROGRESS_SECONDS", 0.0)
    real = job.Job.progress
    monkeypatch.setattr(job.Job, "progress", lambda self: seen.append(real(self)) or seen[-1])
    monkeypatch.setattr("pagedcli.cli.environment.Environment.interactive", property(lambda self: True))
    result, _ = console.generate(lines(*({"prompt": str(i), "n": 10, "max_tokens": 2} for i in range(4))))
    assert result.exit_code == 0
    assert (seen[-1].rows, seen[-1].total, seen[-1].output_tokens) == (4, 4, 80)
    assert all(now.rows <= now.total == 4 for now in seen)
    assert "4/4 rows" in result.stderr


def test_a_summary_that_cannot_be_written_is_told_before_the_work(console: Console,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pagedcli.cli.bounds.tempfile.TemporaryFile", refused)
    result, _ = console.generate(lines({"prompt": "a"}), "--json-summary", str(console.folder / "s.json"))
    assert result.exit_code == 2 and "cannot be written (Read-only file system)" in result.output
    assert not console.engines


def test_a_disk_too_full_for_the_summary_leaves_no_half_of_it(console: Console,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(path: Path, text: str, **more: object) -> None:
        path.write_bytes(text[:10].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", cut)
    result, rows = console.generate(lines({"prompt": "a"}), "--json-summary", str(console.folder / "s.json"))
    assert result.exit_code == 3 and len(rows) == 1, "the rows are there"
    assert "s.json: No space left on device; the output is complete" in result.output
    assert not (console.folder / "s.json").exists()


@pytest.mark.parametrize(("given", "reason"), [
    ("in.jsonl", "is the input"), ("in.out.jsonl", "is the output"), ("in.out.jsonl.partial", "is the journal"),
    ("kept.json", "exists: use --overwrite"), ("-", "standard output may hold"), ("no/where.json", "does not exist"),
    (".", "is a folder")])
def test_a_summary_never_replaces_another_file(console: Console, given: str, reason: str) -> None:
    kept = console.write("kept.json", b"mine")
    data = lines({"prompt": "a"})
    path = given if given == "-" else str(console.folder / given)
    result, _ = console.generate(data, "--json-summary", path)
    assert result.exit_code == 2 and reason in result.output, result.output
    assert (console.folder / "in.jsonl").read_bytes() == data
    assert Path(kept).read_bytes() == b"mine" and not console.engines
