"""Numba functions whose machine code is kept on disk, safe where several processes start at once.

Numba's own cache has two faults that end in the wrong code being run, which for code that takes addresses means memory
overwritten at random:

- Its index gives each key a number, and names the file of the code by it. Two processes that add different keys at the
  same moment choose the same number; the index of one then leads to the code of the other. The same happens when a
  process ends between writing the index and writing the code. Here a file's name comes from its key, and the file says
  which key it was written for.
- A symbol is the function's name, its argument types and a count of the functions that the process compiled before it.
  Two closures of one function, compiled in two processes, can get the same symbol; in a third process that loads both,
  the first may stand for the second (numba issue 10486). Here what a closure holds is part of its name.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

_DIGEST = 32


class OneFilePerKey(IndexDataCacheFile):
    """Files of compiled code in a folder, each named by its key. No index: nothing is shared between keys.

    A file is the SHA-256 of the rest, then the pickled key and code. One that is damaged, or was written for another
    key, counts as absent: the code is compiled again and the file replaced.
    """

    def __init__(self, folder: str, base: str, stamp: str) -> None:
        super().__init__(folder, base, stamp)
        self._base = base

    def path(self, key: object) -> Path:
        text = repr((numba.__version__, llvmlite.__version__, self._source_stamp, key))
        return Path(self._cache_path) / f"{self._base}.{hashlib.sha256(text.encode()).hexdigest()[:24]}.nbc"

    def flush(self) -> None:
        """Numba asks for it before it compiles again what is kept; a file is replaced when its key is saved."""

    def save(self, key: object, data: object) -> None:
        body = self._dump((key, data))
        with self._open_for_write(str(self.path(key))) as file:
            file.write(hashlib.sha256(body).digest() + body)

    def load(self, key: object) -> object | None:
        try:
            content = self.path(key).read_bytes()
        except OSError:
            return None
        body = content[_DIGEST:]
        if hashlib.sha256(body).digest() != content[:_DIGEST]:
            return None
        found, data = pickle.loads(body)
        return data if found == key else None


class KeptCode(FunctionCache):
    """Numba's cache of one function over files of its own. RuntimeError: no folder for them can be found or made."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = OneFilePerKey(self._cache_path, self._impl.filename_base,
                                         source_sum(Path(function.__code__.co_filename).parent))

    def save_overload(self, signature: Any, data: Any) -> None:
        """A full disk costs the next start its time, not this one its work."""
        with suppress(OSError):
            super().save_overload(signature, data)


@cache
def source_sum(folder: Path) -> str:
    """SHA-256 of the files that code compiled in `folder` may come from: its own and this package's.

    Of what they say, not of how old they are: files out of a wheel may all be of one age.
    """
    total = hashlib.sha256()
    for file in sorted({*folder.glob("*.py"), *Path(__file__).parent.glob("*.py")}):
        total.update(file.read_bytes())
    return total.hexdigest()


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the values a closure holds part of its name, and so of its symbol.

    TypeError: it holds something whose text is not the same in every process.
    """
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    for value in held:
        if not isinstance(value, int | float | str | None | type | types.Type):
            raise TypeError(f"{function.__qualname__} holds {value!r}: kept code holds numbers, text and types only")
    if held:
        text = repr((function.__code__.co_freevars, held))
        function.__qualname__ += "_" + hashlib.sha256(text.encode()).hexdigest()[:12]
    return function


def kept_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with its code kept on disk. `options`: as there."""
    def make(function: Callable[..., Any]) -> Any:
        made = numba.njit(**options)(_named(function))
        made._cache = KeptCode(function)
        return made
    return make


def kept_cfunc(signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.cfunc` with its code kept on disk. `options`: as there."""
    def make(function: Callable[..., Any]) -> Any:
        made: Any = CFunc(_named(function), normalize_signature(signature), locals={}, options=options)
        made._cache = KeptCode(function)
        made.compile()
        return made
    return make
