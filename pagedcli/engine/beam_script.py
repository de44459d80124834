"""Who forks from whom when there are no scores to tell: beam search in simulations."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

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


class EveryStep(BeamScript):
    """Any parent rule, asked at each step."""

    def __init__(self, rule: BeamScript) -> None:
        self._rule = rule

    def parents(self, group: SequenceGroup, made: int) -> list[int]:
        return self._rule.parents(group, made)

    def next_change(self, group: SequenceGroup, made: int) -> int:
        del group
        return made


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
        self._known: dict[str, dict[int, tuple[int, int]]] = {}

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
        key = group.request.key
        found = self._known.get(key)
        if found is None:
            rng = random.Random(f"{self.seed}/{key}")
            width, rate = group.params.width, self.rate
            found = {}
            for made in range(group.max_output):
                if width > 1 and rng.random() < rate:
                    dropped, forked = rng.sample(range(width), 2)
                    found[made] = (dropped, forked)
            self._known[key] = found
        return found

    def forget(self, group: SequenceGroup) -> None:
        """Drop the draws of a request that has ended."""
        self._known.pop(group.request.key, None)
