"""Emulator tests need a C++ compiler; built modules are kept between runs in a temp folder."""

from __future__ import annotations

import pytest

from tests.emulator.cases import Kernels
from tests.emulator.emulator import compiler


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The kernels on the emulator's fast build."""
    if compiler() is None:
        pytest.skip("the CUDA emulator needs g++, which is not installed")
    return Kernels(per_module=4)
