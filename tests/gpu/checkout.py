"""The tool straight from a checkout: a GPU machine without a network cannot install it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pagedcli

ROOT = Path(__file__).resolve().parents[2]


def use_checkout() -> None:
    """Make pagedcli.cuda and pagedcli.workloads, which lie beside the package's folder, importable where no
    installation has done so."""
    if importlib.util.find_spec("pagedcli.cuda") is None and str(ROOT) not in pagedcli.__path__:
        pagedcli.__path__.append(str(ROOT))


def command(*words: str) -> list[str]:
    """The command line of `pagedcli WORDS`, to be run in ROOT."""
    return [sys.executable, "-m", "tests.gpu.checkout", *words]


def main() -> None:
    use_checkout()
    from pagedcli.cli.app import main as run
    sys.argv[0] = os.path.join(os.path.dirname(sys.argv[0]), "pagedcli")
    run()


if __name__ == "__main__":
    main()
