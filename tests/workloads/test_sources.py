"""Where a named set comes from: file, cache, Hub (a local folder stands in), shipped set; and how fast it fails."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from pagedcli.workloads import WorkloadOptions, hub, load_workload, specs
from pagedcli.workloads.spec import HubSource

SHAREGPT = [{"id": f"c{n}", "conversations": [{"from": "human", "value": f"question {n}"},
                                              {"from": "gpt", "value": f"answer {n} done"},
                                              {"from": "human", "value": "more"},
                                              {"from": "gpt", "value": "enough"}]} for n in range(6)]
ALPACA = [{"instruction": f"Do {n}", "input": "", "output": "done now", "text": "unused"} for n in range(5)]
WMT = [{"translation": {"de": f"eins {n}", "en": f"one two {n}"}} for n in range(4)]


def source(name: str) -> HubSource:
    found = specs()[name].hub
    assert found is not None
    return found


def fill(folder: Path, name: str) -> None:
    """The files of one set as they lie in its repository."""
    import pyarrow as pa
    import pyarrow.parquet

    rows, path = {"sharegpt": (SHAREGPT, "ShareGPT_V3_unfiltered_cleaned_split.json"),
                  "alpaca": (ALPACA, "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet"),
                  "wmt16": (WMT, "de-en/test-00000-of-00001.parquet")}[name]
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".json":
        target.write_text(json.dumps(rows))
    else:
        pa.parquet.write_table(pa.Table.from_pylist(rows), target)


def words(text: str) -> int:
    return len(text.split())


EXPECTED = {"sharegpt": (6, {(2, 3)}), "alpaca": (5, {(2, 2)}), "wmt16": (4, {(3, 2)})}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_the_hub_through_datasets_on_a_local_folder(tmp_path: Path, name: str) -> None:
    fill(tmp_path / "hub" / source(name).repo, name)
    workload = load_workload(name, count_tokens=words, tokenizer="words",
                             options=WorkloadOptions(hub_root=tmp_path / "hub"))
    count, lengths = EXPECTED[name]
    assert workload.kept == count and not workload.synthetic
    assert {(r.prompt_len, r.output_len) for r in workload.requests} == lengths
    assert source(name).repo in workload.source and workload.tokenizer == "words"


def test_chat_through_datasets_keeps_whole_conversations(tmp_path: Path) -> None:
    fill(tmp_path / "hub" / source("chat").repo, "sharegpt")
    workload = load_workload("chat", count_tokens=words, options=WorkloadOptions(hub_root=tmp_path / "hub"))
    assert len(workload.requests) == 12 and workload.kept == 6


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_downloaded_snapshot_is_read_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           name: str) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / f"datasets--{source(name).repo.replace('/', '--')}" / "snapshots" / "0123456789abcdef"
    fill(folder, name)
    workload = load_workload(name, count_tokens=words)
    assert workload.source == f"{name}: Hugging Face cache, {source(name).repo}"
    assert workload.kept == EXPECTED[name][0]


def test_a_set_prepared_by_datasets_is_read_from_its_arrow_files(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    folder = tmp_path / "tatsu-lab___alpaca" / "default" / "0.0.0" / "dce01c9b08f87459cf36a430d809084718273017"
    prepared = datasets.Dataset.from_list(ALPACA)
    folder.mkdir(parents=True)
    with datasets.arrow_writer.ArrowWriter(path=str(folder / "alpaca-train.arrow"), features=prepared.features) as out:
        for row in ALPACA:
            out.write(row)
        out.finalize()
    workload = load_workload("alpaca", count_tokens=words)
    assert workload.source == "alpaca: Hugging Face datasets cache, tatsu-lab/alpaca"
    assert workload.kept == 5


def test_a_trace_wins_over_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    fill(tmp_path / "datasets--tatsu-lab--alpaca" / "snapshots" / "0", "alpaca")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(ALPACA[:2]))
    assert load_workload("alpaca", trace=path).kept == 2
    assert load_workload("alpaca").kept == 5
    assert load_workload("alpaca", num_requests=3, options=WorkloadOptions(synthetic=True)).synthetic


@pytest.mark.parametrize("name", list(specs()))
def test_every_named_set_works_off_line_in_seconds_and_says_so(name: str) -> None:
    start = time.perf_counter()
    workload = load_workload(name, num_requests=200)
    assert time.perf_counter() - start < 5
    assert workload.synthetic and len(workload.requests) == 200 == workload.kept
    assert workload.source.startswith(f"{name}: synthetic (fitted to ")
    assert workload.label == f"{name} (synthetic)"
    assert len(workload.notes) == 1
    assert workload.notes[0].endswith("and HF_HUB_OFFLINE is set" if specs()[name].hub else "for the real one")


def silent_server() -> tuple[socket.socket, int]:
    """Takes connections and never answers: the worst kind of network."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(8)
    return server, server.getsockname()[1]


@pytest.mark.parametrize("kind", ["refused", "silent", "no such name"])
def test_a_hub_out_of_reach_costs_seconds_and_one_message(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    import huggingface_hub.constants

    server, port = silent_server()
    if kind == "refused":
        server.close()
    address = "http://unknown.invalid" if kind == "no such name" else f"http://127.0.0.1:{port}"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    start = time.perf_counter()
    workload = load_workload("wmt16", num_requests=10)
    assert time.perf_counter() - start < hub.PROBE_SECONDS + 2
    assert workload.synthetic
    assert len(workload.notes) == 1 and workload.notes[0].startswith("Hugging Face Hub not reachable (")
    server.close()


def test_a_hub_that_answers_but_fails_is_one_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("404 not here\nlong trace")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "reachable", lambda: None)
    monkeypatch.setattr(hub, "from_hub", broken)
    workload = load_workload("wmt16", num_requests=10)
    assert workload.notes == ("wmt/wmt16 could not be loaded from the Hub (RuntimeError: 404 not here)",)


def test_any_answer_of_the_hub_counts_as_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    import http.server

    import huggingface_hub.constants

    class NotFound(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), NotFound)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    assert hub.reachable() is None
    server.shutdown()
    server.server_close()


def test_off_line_as_asked_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "reachable", lambda: pytest.fail("the network was asked"))
    workload = load_workload("alpaca", num_requests=5, options=WorkloadOptions(offline=True))
    assert workload.notes == ("tatsu-lab/alpaca is not in the Hugging Face cache and off line as asked",)
