"""Rows inside an engine: taken in as requests, given out as output lines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from pagedcli.core.errors import RequestError
from pagedcli.core.request import NO_ROW, Request, SamplingParams
from pagedcli.core.sequence import SequenceGroup
from pagedcli.core.wording import counted
from pagedcli.engine.interface import Counters
from pagedcli.execution.interface import Executor
from pagedcli.generate.encoding import Line
from pagedcli.generate.formats import render_failure, render_result
from pagedcli.generate.prefix_window import PrefixWindow
from pagedcli.generate.row import Row
from pagedcli.generate.sampling import SamplingDefaults
from pagedcli.generate.tokens import TextCodec, Tokeniser
from pagedcli.memory.interface import Usage

Deliver = Callable[[int, Line, bool], None]
"""(index, output line without its end, whether the row is good)."""


class Serving(Protocol):
    """The part of the engine that rows need."""

    executor: Executor
    counters: Counters
    max_num_seqs: int
    max_model_len: int

    def add(self, request: Request) -> SequenceGroup: ...

    def step(self) -> list[SequenceGroup]: ...

    def has_work(self) -> bool: ...

    @property
    def depth(self) -> tuple[int, int, int]: ...

    def usage(self) -> Usage: ...


class Desk:
    """Submits rows to an engine and delivers each one's line when its request ends. `len` is the rows inside.

    `window` holds what this engine has computed, where it has a prefix cache: the beginning that a row shares with
    earlier ones, and that is not there, is computed ahead of it.
    """

    def __init__(self, engine: Serving, codec: TextCodec | None, defaults: SamplingDefaults, deliver: Deliver,
                 window: PrefixWindow | None = None) -> None:
        self.engine = engine
        self._codec = codec
        self._defaults = defaults
        self._deliver = deliver
        self._window = window
        self._model = engine.executor.info.model
        self._rows: dict[int, Row] = {}  # by index, of the requests in the engine
        self.tokeniser = Tokeniser(codec, engine.executor.limits.vocab_size, defaults)

    def __len__(self) -> int:
        return len(self._rows)

    def submit(self, row: Row, request: Request | None) -> None:
        """Queue a row's request; a row with a fault (`request` None, or refused by the engine) is delivered at once."""
        if request is not None:
            self._compute_shared(row, request)
            try:
                self._add(row, request)
            except RequestError as fault:
                row.fail(fault.code, fault.message)
            else:
                self._rows[row.index] = row
                if self._window is not None:
                    self._window.add(request.prompt)
                return
        self._deliver(row.index, render_failure(row, len(row.ids or ())), False)

    def finish(self, group: SequenceGroup) -> None:
        """Deliver the row of a request that has ended, if it has one."""
        index = group.request.index
        if index == NO_ROW:
            return
        row = self._rows.pop(index)
        if row.shared is not None:
            group.cached_tokens = min(group.cached_tokens or 0, row.shared)
        if group.error is not None:
            row.fail(*group.error)
            self._deliver(index, render_failure(row, group.prompt_len), False)
            return
        self._deliver(index, render_result(row, group, self._codec, self._model), True)

    def _compute_shared(self, row: Row, request: Request) -> None:
        """Queue what this engine lacks of a row's shared beginning, ahead of the row. Rows whose prompt is scored use
        no cache."""
        if self._window is None or not row.shared or request.params.prompt_logprobs is not None:
            return
        if self._window.shared(request.prompt) < row.shared:
            ahead = Request(NO_ROW, "shared beginning", request.prompt[:row.shared], SamplingParams(max_tokens=0))
            with suppress(RequestError):  # a prompt that cannot fit is told so next
                self.engine.add(ahead)

    def _add(self, row: Row, request: Request) -> None:
        """Queue a request; a max_tokens that nobody set shrinks to what the model and the pool allow."""
        length, limit = len(request.prompt), self.engine.max_model_len
        if length > limit:
            raise RequestError("too_long", f"the prompt alone has {counted(length, 'token')}, above the model's limit "
                               f"of {limit}; shorten the prompt")
        try:
            self.engine.add(request)
        except RequestError:
            if self._defaults.limited(row.settings):
                raise
            self.engine.add(Request(request.index, request.key, request.prompt,
                                    self._defaults.unlimited(request.params)))
