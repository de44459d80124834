"""Set-up without a network: what is ready is left alone, what fails is told, and the others go on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.peers import set_up
from tests.peers.engines import Place
from tests.peers.set_up import REQUIREMENTS, SET_UPS, Say, SetUpError, environment, prepare, run, whole


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "root", tmp_path / "weights")


def test_an_environment_is_made_once_for_its_pins(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, ...]] = []

    def pretend(*command: str | Path, log: Path, **_: object) -> None:
        steps.append(tuple(map(str, command)))
        (place.root / "openvino").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(set_up, "run", pretend)
    place.root.mkdir()
    said: list[str] = []
    assert environment(place, "openvino", said.append) is True
    assert [step[1:3] for step in steps] == [("-m", "venv"), ("-m", "pip")]
    assert str(REQUIREMENTS / "openvino.txt") in steps[1] and "--no-deps" in steps[1]
    assert environment(place, "openvino", said.append) is False
    assert len(steps) == 2 and said == ["openvino: installing"]
    (place.root / "openvino" / ".ready").write_text("other pins")
    assert environment(place, "openvino", said.append) is True


def test_pins_are_exact_and_each_once() -> None:
    for file in REQUIREMENTS.glob("*.txt"):
        lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
        names = [line.partition("==")[0] for line in lines]
        assert all("==" in line for line in lines) and len(set(names)) == len(names), file.name


def test_what_exists_is_not_made_again_and_halves_are_not_kept(tmp_path: Path) -> None:
    target, made = tmp_path / "models" / "one", []

    def half(partial: Path) -> None:
        partial.mkdir()
        raise SetUpError("disk full")

    def make(partial: Path) -> None:
        partial.mkdir()
        made.append(partial)

    with pytest.raises(SetUpError):
        whole(target, half)
    assert not target.exists()
    whole(target, make)
    whole(target, make)
    assert target.is_dir() and len(made) == 1 and sorted(target.parent.iterdir()) == [target]


def test_a_failing_step_tells_the_fault_and_its_log(tmp_path: Path) -> None:
    code = "print('ERROR: no matching distribution'); print('hint'); raise SystemExit(1)"
    with pytest.raises(SetUpError, match=r"ERROR: no matching distribution \(all of it: a.log\)"):
        run(sys.executable, "-c", code, log=tmp_path / "a.log")


def test_a_step_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(SetUpError, match="not done after 1 s"):
        run(sys.executable, "-c", "import time; time.sleep(600)", log=tmp_path / "a.log", limit_seconds=1)


def test_one_that_fails_does_not_keep_the_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def refuse(place: Place, say: Say) -> None:
        raise SetUpError("no compiler")

    monkeypatch.setitem(SET_UPS, "llamacpp", refuse)
    monkeypatch.setitem(SET_UPS, "vllm", lambda place, say: done.append("vllm"))
    said: list[str] = []
    assert prepare(["llamacpp", "vllm", "vllm"], place, said.append) == {"llamacpp": "no compiler"}
    assert done == ["vllm"] and "llamacpp: cannot be set up: no compiler" in said and "vllm: ready" in said


def test_llamacpp_names_missing_tools(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert prepare(["llamacpp"], place, lambda _: None) == {
        "llamacpp": "llama.cpp is built from source and needs cmake and c++"}
