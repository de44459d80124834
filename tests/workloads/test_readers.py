"""Every file shape, and the message for every way a file can be wrong."""

import json
from pathlib import Path

import pytest

from pagedcli.core.errors import UsageError
from pagedcli.workloads import WorkloadOptions, load_workload
from pagedcli.workloads.readers import read_table
from pagedcli.workloads.traces import conversations_from_lengths


def write(tmp_path: Path, name: str, content: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


AZURE = ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
         "2023-11-16 18:15:50.9951690,396,109\n")
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,m,472,18,490,chat\n45,m,10,0,10,api\n"
BURST_3 = ("Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
           "1.5,a,2,m,4,5,9,chat\n")
MOONCAKE = '{"timestamp": 2000, "input_length": 513, "output_length": 5, "hash_ids": [0, 7]}\n'
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,20\n1.5,30,2\n"
VLLM = '{"request_id": "a", "input_toks": 23, "output_toks": 5, "arrival_time": 1787267980.5}\n'


@pytest.mark.parametrize(("name", "content", "shape", "first"), [
    ("a.csv", AZURE, "azure", (374, 44)),
    ("b.csv", BURST, "burstgpt", (472, 18)),
    ("b3.csv", BURST_3, "burstgpt", (4, 5)),
    ("m.jsonl", MOONCAKE, "mooncake", (513, 5)),
    ("v.csv", VIDUR, "vidur", (100, 20)),
    ("v2.csv", "num_prefill_tokens,num_decode_tokens\n9,8\n", "vidur", (9, 8)),
    ("r.jsonl", VLLM, "vllm-requests", (23, 5)),
    ("l.csv", "input,output\r\n21,518\r\n", "lengths", (21, 518)),
    ("bom.csv", "\ufeffinput,output\n21,518\n\n", "lengths", (21, 518)),
    ("x.json", '[{"input_length": 3, "output_length": 4}]', "lengths", (3, 4)),
    ("p.jsonl", '{"prompt_token_ids": [5, 6, 7], "max_tokens": 9}\n', "prompt-ids", (3, 9)),
])
def test_shapes_are_found_from_the_content(tmp_path: Path, name: str, content: str, shape: str, first: tuple) -> None:
    path = write(tmp_path, name, content)
    assert read_table(path).format.name == shape
    request = load_workload(trace=path).requests[0]
    assert (request.prompt_len, request.output_len) == first


def test_times_count_from_the_start_in_seconds(tmp_path: Path) -> None:
    azure = load_workload(trace=write(tmp_path, "a.csv", AZURE))
    assert azure.has_arrivals
    assert [r.arrival for r in azure.requests] == pytest.approx([0.0, 4.314579], abs=1e-6)
    later = MOONCAKE.replace("2000", "5500")
    mooncake = load_workload(trace=write(tmp_path, "m.jsonl", MOONCAKE + later))
    assert [r.arrival for r in mooncake.requests] == [0.0, 3.5]
    assert mooncake.requests[0].block_hashes == (0, 7)
    disordered = load_workload(trace=write(tmp_path, "d.jsonl", later + MOONCAKE))
    assert [r.arrival for r in disordered.requests] == [0.0, 3.5]


def test_failed_burstgpt_requests_are_dropped_and_counted(tmp_path: Path) -> None:
    workload = load_workload(trace=write(tmp_path, "b.csv", BURST))
    assert workload.kept == 1
    assert workload.dropped == {"failed request (0 response tokens)": 1}


def test_json_lines_split_on_newline_only(tmp_path: Path) -> None:
    rows = [{"prompt": "one\u2028two\u0085three\x0cfour"}, {"prompt": "next"}]
    content = "\ufeff" + "\n\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\r\n"
    workload = load_workload(prompts=write(tmp_path, "p.jsonl", content))
    assert [r.prompt for r in workload.requests] == [r["prompt"] for r in rows]


def test_prompts_keep_their_order_and_lengths(tmp_path: Path) -> None:
    rows = [{"prompt": f"word {n}", "max_tokens": n + 1} for n in range(30)] + [{"prompt": "no length"}]
    path = write(tmp_path, "p.jsonl", "\n".join(map(json.dumps, rows)))
    workload = load_workload(prompts=path, count_tokens=lambda text: len(text.split()), tokenizer="words",
                             options=WorkloadOptions(default_output=64))
    assert [r.prompt for r in workload.requests] == [r["prompt"] for r in rows]
    assert [r.output_len for r in workload.requests] == [*range(1, 31), 64]
    assert {r.prompt_len for r in workload.requests} == {2}
    assert workload.tokenizer == "words"
    assert load_workload(prompts=path).tokenizer == "estimate (no tokenizer given)"


SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "q one"}, {"from": "gpt", "value": "a one two"}]},
    {"id": "b", "conversations": [{"from": "system", "value": "s"}, {"from": "user", "value": "q"},
                                  {"from": "assistant", "value": "a"}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "{}"}]},
    {"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "q"}]},
    {"conversations": [{"from": "human", "value": "q"}]},
    {"conversations": [{"from": "human", "value": " "}, {"from": "gpt", "value": "a"}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}]},
    {"conversations": []},
    {"conversations": [{"from": "human", "value": "w " * 1500}, {"from": "gpt", "value": "w " * 548}]},
    {"conversations": [{"from": "human", "value": "w " * 1500}, {"from": "gpt", "value": "w " * 547}]},
]


def test_sharegpt_rows_are_dropped_with_counted_reasons(tmp_path: Path) -> None:
    path = write(tmp_path, "s.json", json.dumps(SHAREGPT))
    workload = load_workload("sharegpt", trace=path, count_tokens=lambda text: len(text.split()), tokenizer="words")
    assert sorted((r.prompt_len, r.output_len) for r in workload.requests) == [(1, 1), (2, 3), (1500, 547)]
    assert workload.kept == 3
    assert workload.dropped == {
        "first answer is a tool call": 1, "first turn is not the user's": 1, "fewer than two turns": 2,
        "empty first question": 1, "empty first answer": 1, "paper filter: prompt + output >= 2048": 1}
    assert not workload.synthetic and workload.source == "sharegpt: local file s.json (ShareGPT conversations (JSON))"


def test_the_vllm_filter_on_request(tmp_path: Path) -> None:
    table = "input,output\n3,9\n9,3\n4,4\n1025,9\n1024,1024\n1024,1025\n"
    path = write(tmp_path, "l.csv", table)
    workload = load_workload("sharegpt", trace=path, options=WorkloadOptions(filter="vllm"))
    assert sorted((r.prompt_len, r.output_len) for r in workload.requests) == [(4, 4), (1024, 1024)]
    assert workload.dropped == {"vLLM filter: prompt or output < 4": 2, "vLLM filter: prompt > 1024": 1,
                                "vLLM filter: prompt + output > 2048": 1}
    assert load_workload("sharegpt", trace=path).kept == 4  # paper: only sums of 2048 and more go
    short = load_workload("sharegpt", trace=path, options=WorkloadOptions(filter="none", max_total=100))
    assert short.dropped == {"longer than the model's 100 positions": 3}


def test_alpaca_joins_instruction_and_input(tmp_path: Path) -> None:
    rows = [{"instruction": "Sort", "input": "b a", "output": "a b"}, {"instruction": "Hi", "input": "", "output": "x"},
            {"instruction": "None", "input": "", "output": ""}]
    workload = load_workload("alpaca", trace=write(tmp_path, "a.json", json.dumps(rows)))
    assert sorted(r.prompt or "" for r in workload.requests) == ["Hi", "Sort\nb a"]
    assert workload.dropped == {"empty output": 1}


def test_translation_shots_share_their_prefix(tmp_path: Path) -> None:
    rows = "\n".join(json.dumps({"translation": {"de": "eins zwei", "en": f"one {n} three"}}) for n in range(4))
    path = write(tmp_path, "w.jsonl", rows)
    for name, length in (("wmt16", 0), ("wmt16-1shot", 80), ("wmt16-5shot", 341)):
        workload = load_workload(name, trace=path, count_tokens=lambda text: len(text.split()))
        assert {(r.prompt_len, r.output_len, r.prefix_len) for r in workload.requests} == {(length + 3, 2, length)}
        assert len({r.prefix_id for r in workload.requests}) == 1
        first = workload.requests[0]
        assert (first.prefix_id is None) == (length == 0)
        assert first.prompt is not None and first.prompt.startswith(first.prefix_text or "one")
    assert load_workload("wmt16", trace=path, options=WorkloadOptions(shots=5)).requests[0].prefix_len == 341


def test_rows_repeat_when_more_are_asked_for(tmp_path: Path) -> None:
    workload = load_workload(trace=write(tmp_path, "a.csv", AZURE), num_requests=5)
    assert [r.prompt_len for r in workload.requests] == [374, 396, 374, 396, 374]
    gap = 4.314579
    assert [r.arrival for r in workload.requests] == pytest.approx([k * gap for k in range(5)], abs=1e-5)
    assert [r.index for r in workload.requests] == list(range(5))
    assert workload.notes == ("5 requests asked of 2 rows: rows are repeated",)


def test_growing_histories_split_into_conversations() -> None:
    assert conversations_from_lengths([(74, 10), (100, 5), (106, 1), (50, 9), (50, 9)]) == [
        [(74, 10), (16, 5), (1, 1)], [(50, 9)], [(50, 9)]]


@pytest.mark.parametrize(("name", "content", "words"), [
    ("e.csv", "", "e.csv: holds no rows"),
    ("h.csv", "input,output\n", "h.csv: holds no rows"),
    ("u.csv", "a,b\n1,2\n", "u.csv line 2: fields 'a', 'b' fit no known shape"),
    ("c.csv", AZURE + "2023-11-16 18:15:57,4\n", "c.csv line 4: 2 fields where the header has 3"),
    ("n.csv", "input,output\n1,2\nx,3\n", "n.csv line 3: field 'input' = 'x': must be a number"),
    ("f.csv", "input,output\n1,2.5\n", "f.csv line 2: field 'output' = '2.5': must be a whole number"),
    ("neg.csv", "input,output\n-1,2\n", "neg.csv line 2: field 'input' = '-1'"),
    ("t.csv", AZURE.replace("2023-11-16 18:15:50", "yesterday"), "t.csv line 3: field 'TIMESTAMP' = 'yesterday"),
    ("inf.csv", VIDUR.replace("1.5", "inf"), "inf.csv line 3: field 'arrived_at' = 'inf': must be finite"),
    ("j.jsonl", '{"prompt": "a"}\n{"prompt": \n', "j.jsonl line 2 column"),
    ("a.json", '[{"prompt": "a"},]', "a.json line 1 column"),
    ("o.json", "[1]", "o.json entry 1: must be an object, is int"),
    ("m.jsonl", MOONCAKE.replace("513", "512"), "m.jsonl line 1: field 'hash_ids' has 2 ids, but input_length = 512"),
    ("s.json", '[{"conversations": {}}]', "s.json entry 1: field 'conversations' = dict"),
    ("s2.json", '[{"conversations": [{"from": "human"}]}]', "s2.json entry 1: field 'conversations' turn 1"),
    ("w.jsonl", '{"translation": {"en": "a"}}', "w.jsonl line 1, translation: field 'de' is missing"),
    ("i.jsonl", '{"instruction": 3, "output": "a"}', "i.jsonl line 1: field 'instruction' = 3: must be a string"),
    ("p.jsonl", '{"prompt": "a"}\n{"text": "a"}', "p.jsonl line 2: field 'prompt' is missing; present: text"),
    ("b.csv", b"input,output\n1,\xff\n", "b.csv line 2: not UTF-8"),
    ("q.parquet", b"PAR1 nonsense", "q.parquet: damaged Parquet file"),
    ("z.csv", "input,output\n0,5\n5,0\n", "no request is left"),
])
def test_faults_name_file_line_and_field(tmp_path: Path, name: str, content: str | bytes, words: str) -> None:
    with pytest.raises(UsageError) as fault:
        load_workload(trace=write(tmp_path, name, content))
    assert words in str(fault.value)


def test_faults_of_the_call(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", AZURE)
    for call, words in ((lambda: load_workload(), "no workload given"),
                        (lambda: load_workload(trace=tmp_path / "none"), "no such file"),
                        (lambda: load_workload(trace=tmp_path), "is a folder"),
                        (lambda: load_workload(trace=path, prompts=path), "give one of them"),
                        (lambda: load_workload("sharegpt", num_requests=0), "--num-requests = 0"),
                        (lambda: load_workload("chat", trace=path), "needs whole conversations"),
                        (lambda: WorkloadOptions(shots=2), "shots = 2"),
                        (lambda: WorkloadOptions(new_conversation=0.0), "new_conversation = 0.0"),
                        (lambda: WorkloadOptions(filter="papr"), "filter = 'papr'"),
                        (lambda: WorkloadOptions(history=0), "history = 0")):
        with pytest.raises(UsageError, match=words):
            call()
