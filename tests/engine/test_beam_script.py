"""Beam parents without scores: the stated model and recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedcli.core.errors import UsageError
from pagedcli.core.request import Request, SamplingParams
from pagedcli.core.sequence import Sequence, SequenceGroup
from pagedcli.engine.beam_script import NEVER, BeamScript, KeepBeams, RecordedBeams, ReplacingBeams


def _group(width: int, output: int, index: int = 0) -> SequenceGroup:
    params = SamplingParams(use_beam_search=True, beam_width=width, max_tokens=None)
    group = SequenceGroup(Request(index, str(index), (1,), params, 0.0, output), index)
    group.live = [Sequence(place, group, [1], 1, place) for place in range(width)]
    return group


def _changes(script: BeamScript, group: SequenceGroup, upto: int) -> list[int]:
    """By asking for the parents of every step."""
    same = list(range(len(group.live)))
    return [made for made in range(upto) if script.parents(group, made) != same]


def test_a_share_of_steps_replaces_one_beam() -> None:
    script, group = ReplacingBeams(0.3), _group(4, 4000)
    changes = _changes(script, group, 4000)
    assert len(changes) / 4000 == pytest.approx(0.3, abs=0.03)
    for made in changes[:50]:
        assert sum(a != b for a, b in enumerate(script.parents(group, made))) == 1


def test_one_object_serves_requests_of_other_lengths() -> None:
    script = ReplacingBeams(0.5)
    assert _changes(script, _group(2, 10), 10)
    assert max(_changes(script, _group(2, 500), 500)) > 400


@pytest.mark.parametrize("script", [
    ReplacingBeams(0.2), KeepBeams(),
    RecordedBeams([[[0, 1, 2], [0, 0, 1], [0, 1, 2], [0, 1, 2]], [[0, 1, 2]]], 3),
    RecordedBeams([[[0, 0, 1], [0, 1, 2], [0, 1, 2], [0, 0, 1], [0, 1, 2]], [[0, 0, 1]]], 3)])
def test_the_next_change_is_the_next_parents_that_differ(script: BeamScript) -> None:
    for index in (0, 1):
        group = _group(3, 60, index)
        changes = _changes(script, group, 60)
        for made in range(60):
            following = script.next_change(group, made)
            expected = next((change for change in changes if change >= made), None)
            assert following == expected if expected is not None else following >= 60


def test_recordings_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "beams.json"
    path.write_text('{"widths": {"2": [[[0, 0], [0, 1]]]}}', "utf-8")
    script, group = RecordedBeams.read(path, 2), _group(2, 9)
    # The second half comes again.
    assert [script.parents(group, made) for made in range(4)] == [[0, 0], [0, 1], [0, 1], [0, 1]]
    path.write_text('{"widths": {"2": ["00 01"]}}', "utf-8")
    assert [RecordedBeams.read(path, 2).parents(group, made) for made in range(2)] == [[0, 0], [0, 1]]
    with pytest.raises(UsageError, match="no recorded beams of width 4"):
        RecordedBeams.read(path, 4)
    with pytest.raises(UsageError, match=r"step 0 has parents \[0, 2\]"):
        RecordedBeams([[[0, 2]]], 2)
    assert RecordedBeams([[[0, 1]]], 2).next_change(_group(2, 9), 0) == NEVER
