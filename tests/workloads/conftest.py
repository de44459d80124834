"""Keeps every test of this folder off the network and out of the user's caches."""

from pathlib import Path

import pytest

from pagedcli.workloads import Workload, load_workload

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty-hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "empty-datasets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def shared() -> Path:
    """The folder of real data beside the repository; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("../shared with the real data is not here")
    return SHARED


@pytest.fixture(scope="session")
def real_sharegpt() -> Workload:
    """The paper's ShareGPT lengths after its filter; read once, as there are 84,226."""
    path = SHARED / "paper" / "sharegpt_lengths.csv"
    if not path.is_file():
        pytest.skip("../shared with the real data is not here")
    return load_workload("sharegpt", trace=path)
