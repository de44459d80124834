"""Start-up helpers."""

from __future__ import annotations

import gc

import pytest

from pagedcli.execution.startup import without_collection


def test_collection_pauses_and_comes_back() -> None:
    assert gc.isenabled()
    try:
        frozen = gc.get_freeze_count()
        with without_collection():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > frozen
        with pytest.raises(KeyError), without_collection():
            raise KeyError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_caller_who_had_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
