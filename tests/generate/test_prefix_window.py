"""What rows share with the rows before them, in a window of bounded size."""

from __future__ import annotations

import random

import pytest

from pagedcli.execution.interface import ExecutorLimits
from pagedcli.generate.prefix_window import PrefixWindow


def test_full_blocks_of_earlier_prompts_are_shared() -> None:
    window = PrefixWindow(4, 100)
    common, other = list(range(8)), list(range(20, 28))
    assert window.add([*common, 1]) == 0  # nobody came before
    assert window.add([*common, 7]) == 8
    assert window.add([*common[:6], 9, 9, 9]) == 4
    assert window.shared([*other, 3]) == 0 and window.shared([*other, 3]) == 0  # asking notes nothing
    assert window.add([*other, 3]) == 0 and window.shared([*other, 4]) == 8


def test_the_last_token_is_never_shared() -> None:
    window = PrefixWindow(4, 100)
    window.add([1, 2, 3, 4, 5, 6, 7, 8])
    assert window.shared([1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert window.shared([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert window.shared([1]) == 0


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    window = PrefixWindow(2, 100)
    window.add([1, 1, 2, 2, 3])
    assert window.shared([5, 5, 2, 2, 3]) == 0 and window.shared([2, 2, 3]) == 0


def test_a_kept_prefix_is_there_for_ever() -> None:
    window = PrefixWindow(2, 4, kept=[1, 1, 2, 2, 3])
    for number in range(50):
        assert window.add([1, 1, 2, 2, 100 + number, 0, 0]) == 4


def test_only_what_was_used_lately_is_there_and_no_more_is_held() -> None:
    """Against a list of all blocks ever used: the last `half` distinct ones surely, at most two halves."""
    dice = random.Random(3)
    half, window = 40, PrefixWindow(1, 40)
    used: list[tuple[int, ...]] = []
    hits = misses = 0
    for _ in range(4000):
        prompt = (dice.randrange(30), *(dice.randrange(3) for _ in range(dice.randrange(4))))
        blocks = [prompt[:end + 1] for end in range(len(prompt))]
        latest: dict[tuple[int, ...], None] = {}
        for block in reversed(used):
            latest[block] = None
            if len(latest) == 2 * half + 4:
                break
        order = list(latest)
        found = window.add([*prompt])
        sure = next((n for n, block in enumerate(blocks[:-1]) if block not in order[:half]), len(blocks) - 1)
        most = next((n for n, block in enumerate(blocks[:-1]) if block not in order), len(blocks) - 1)
        assert sure <= found <= most and len(window) <= 2 * half + 4
        hits, misses = hits + (found > 0), misses + (found == 0)
        used += blocks
    assert hits > 500 and misses > 500


@pytest.mark.parametrize(("blocks", "half"), [(1, 1), (40, 16), (20_921, 8192), (21_279, 8192), (10**7, 65_536)])
def test_pools_of_nearly_one_size_have_one_window(blocks: int, half: int) -> None:
    window = PrefixWindow.of_pool(ExecutorLimits(blocks, 0, 1, 100, 100, 1))
    for token in range(half):
        assert window.shared([token, 0]) == 0
        window.add([token])
    assert window.shared([0, 0]) == 1 and len(window) == half
    for token in range(half, 2 * half):
        window.add([token])
    assert window.shared([0, 0]) == 0 and len(window) == half
