"""Sampling fields of a job: the command line's, overruled row by row, with equal settings made only once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagedcli.core.errors import RequestError, UsageError
from pagedcli.core.request import SamplingParams
from pagedcli.generate.row import wrong_type

SAMPLING_FIELDS = frozenset(SamplingParams.field_names())
_CACHED = 4096
_LISTS = ("stop_token_ids",)
_TEXTS = ("stop", "bad_words")


class SamplingDefaults:
    """Makes each row's SamplingParams.

    `given`: fields set for the whole job. `shared` serves every row that sets none; other settings are remembered by
    value, since rows of one file tend to use a few. Raises UsageError when the job's own fields are wrong.
    """

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        self.given = dict(given or {})
        self._known: dict[tuple[Any, ...], SamplingParams] = {}
        try:
            self.shared = SamplingParams(**self.given)
        except RequestError as fault:
            raise UsageError(fault.message, fault.code) from fault
        self._limited = "max_tokens" in self.given

    def params(self, settings: Mapping[str, Any]) -> SamplingParams:
        """Settings of a row over the job's. Raises RequestError naming the field, value and limit."""
        if not settings:
            return self.shared
        try:
            # True, 1 and 1.0 are equal as keys, and only one of them may be right for a field.
            key = tuple((name, type(value), value) for name, value in settings.items())
            found = self._known.get(key)
        except TypeError:  # a list or object among the values
            return self._make(settings)
        if found is None:
            found = self._make(settings)
            if len(self._known) >= _CACHED:
                self._known.clear()
            self._known[key] = found
        return found

    def limited(self, settings: Mapping[str, Any]) -> bool:
        """Whether someone has set max_tokens: such a number is kept or refused, an unset one is cut to fit."""
        return self._limited or "max_tokens" in settings

    def unlimited(self, params: SamplingParams) -> SamplingParams:
        """The same settings with max_tokens left to what model and pool allow."""
        key = ("unlimited", params)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = replace(params, max_tokens=None)
        return found

    def _make(self, settings: Mapping[str, Any]) -> SamplingParams:
        for name in _TEXTS:
            value = settings.get(name)
            if value is not None and not isinstance(value, (str, list)):
                raise wrong_type(name, value, "a string or a list of strings")
        for name in _LISTS:
            value = settings.get(name)
            if value is not None and not isinstance(value, list):
                raise wrong_type(name, value, "a list of token ids")
        bias = settings.get("logit_bias")
        if bias is not None and not isinstance(bias, dict):
            raise wrong_type("logit_bias", bias, "an object of token id: number")
        return SamplingParams(**{**self.given, **settings})
