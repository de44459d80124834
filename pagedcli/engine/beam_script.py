"""Who forks from whom when there are no scores to tell: beam search in simulations."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from pagedcli.core.errors import UsageError
from pagedcli.core.sequence import SequenceGroup

NEVER = 1 << 60


class BeamScript(ABC):
    """A rule for beams. `made` counts the output tokens that the live sequences have so far."""

    @abstractmethod
    def parents(self, group: SequenceGroup, made: int) -> list[int]:
        """For each beam of the next step, the place of its parent among the live ones. The same answer whenever it
        is asked; a ParentRule of the scripted sampler."""

    @abstractmethod
    def next_change(self, group: SequenceGroup, made: int) -> int:
        """The first count at or after `made` at which some beam does not continue itself."""


class KeepBeams(BeamScript):
    """Every beam continues itself: the rule that shares least."""

    def parents(self, group: SequenceGroup, made: int) -> list[int]:
        del made
        return list(range(len(group.live)))

    def next_change(self, group: SequenceGroup, made: int) -> int:
        del group, made
        return NEVER


class ReplacingBeams(BeamScript):
    """A stated model of beam search: at each step, with probability `rate`, one beam is dropped and another forks.

    Which two is drawn evenly. Draws depend on the seed, the request's key and the step only. `rate` is a share of
    steps, 0 to 1; at 1 some beam changes every step.
    """

    def __init__(self, rate: float, seed: int = 0) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"rate = {rate}: must be from 0 to 1")
        self.rate = rate
        self.seed = seed
        self._known: dict[tuple[str, int, int], dict[int, tuple[int, int]]] = {}

    def parents(self, group: SequenceGroup, made: int) -> list[int]:
        width = group.params.width
        if len(group.live) != width:
            return [place % len(group.live) for place in range(width)]
        parents = list(range(width))
        change = self._changes(group).get(made)
        if change is not None:
            dropped, forked = change
            parents[dropped] = forked
        return parents

    def next_change(self, group: SequenceGroup, made: int) -> int:
        changes = self._changes(group)
        end = group.max_output
        while made < end:
            if made in changes:
                return made
            made += 1
        return NEVER

    def _changes(self, group: SequenceGroup) -> dict[int, tuple[int, int]]:
        """Step -> (dropped, forked), drawn once a request."""
        width, rate = group.params.width, self.rate
        key = group.request.key, width, group.max_output
        found = self._known.get(key)
        if found is None:
            rng = random.Random(f"{self.seed}/{group.request.key}")
            found = {}
            for made in range(group.max_output):
                if width > 1 and rng.random() < rate:
                    dropped, forked = rng.sample(range(width), 2)
                    found[made] = (dropped, forked)
            self._known[key] = found
        return found


class RecordedBeams(BeamScript):
    """Parents as a real beam search chose them. `recordings`: for each recorded request, for each step, the place of
    every beam's parent. Requests take recordings in turn; longer ones go on with its second half over and over (beams
    change most often at the beginning of a search, which does not come again)."""

    def __init__(self, recordings: Sequence[Sequence[Sequence[int]]], width: int) -> None:
        if not recordings or not all(recordings):
            raise UsageError(f"recorded beams of width {width}: there must be a request, and a step in each")
        for number, steps in enumerate(recordings):
            for step, parents in enumerate(steps):
                if len(parents) != width or not all(isinstance(p, int) and 0 <= p < width for p in parents):
                    raise UsageError(f"recorded beams of width {width}: request {number}, step {step} has parents "
                                     f"{list(parents)}; must be {width} numbers from 0 to {width - 1}")
        self.width = width
        self._recordings = [[list(parents) for parents in steps] for steps in recordings]
        same = list(range(width))
        self._changes = [[place for place, parents in enumerate(steps) if parents != same]
                         for steps in self._recordings]

    @classmethod
    def read(cls, path: Path, width: int) -> RecordedBeams:
        """From a JSON file `{"widths": {"4": [[[0, 0, 1, 3], ...], ...]}}`, where a request may also be a string of its
        steps in digits: "0013 0123". UsageError says what is wrong with it."""
        try:
            data = json.loads(path.read_text("utf-8"))
            return cls([[[int(digit) for digit in step] for step in request.split()] if isinstance(request, str)
                        else request for request in data["widths"][str(width)]], width)
        except (OSError, ValueError, KeyError, TypeError) as fault:
            raise UsageError(f"{path.name}: no recorded beams of width {width} ({type(fault).__name__}: {fault})"
                             ) from fault

    def parents(self, group: SequenceGroup, made: int) -> list[int]:
        if len(group.live) != self.width:
            return [place % len(group.live) for place in range(self.width)]
        number = group.request.index % len(self._recordings)
        return self._recordings[number][self._place(number, made)]

    def _place(self, number: int, made: int) -> int:
        """Where in a recording a search of `made` tokens is."""
        length = len(self._recordings[number])
        if made < length:
            return made
        half = length // 2
        return half + (made - half) % (length - half)

    def next_change(self, group: SequenceGroup, made: int) -> int:
        number = group.request.index % len(self._recordings)
        length, changes = len(self._recordings[number]), self._changes[number]
        place = self._place(number, made)
        following = next((change for change in changes if change >= place), None)
        if following is not None:
            return made + following - place
        again = next((change for change in changes if change >= length // 2), None)
        return NEVER if again is None else made + length - place + again - length // 2
