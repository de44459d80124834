"""The counter-based generator against the published known answers, and what a stream may depend on."""

import numpy as np
import pytest

from pagedcli.engine.streams import philox, stream_key, uniforms


@pytest.mark.parametrize(("counter", "key", "answer"), [
    # Known-answer vectors of Random123 (Salmon et al. 2011), philox4x32 with 10 rounds.
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_philox_gives_the_published_answers(counter, key, answer):
    words = philox(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert words[:, 0].tolist() == list(answer)


def test_a_draw_does_not_depend_on_its_neighbours():
    keys = [stream_key(seed, f"row-{row}") for seed in range(3) for row in range(20)]
    samples, positions = list(range(60)), [7 * i % 31 for i in range(60)]
    together = uniforms(keys, samples, positions)
    alone = [uniforms([k], [s], [p])[0] for k, s, p in zip(keys, samples, positions, strict=True)]
    assert together.tolist() == alone


def test_streams_differ_by_each_part_of_their_name():
    base = (stream_key(1, "a"), 0, 0)
    others = [(stream_key(2, "a"), 0, 0), (stream_key(1, "b"), 0, 0), (stream_key(1, "a"), 1, 0),
              (stream_key(1, "a"), 0, 1), (stream_key(-1, "a"), 0, 0), (stream_key(2**70, "a"), 0, 0)]
    numbers = uniforms(*zip(base, *others, strict=True))
    assert len(set(numbers.tolist())) == len(others) + 1
    # Neither seed + 1 nor sample + 1 is another's next position.
    assert not set(uniforms([base[0]] * 50, [0] * 50, range(50))) & set(uniforms([base[0]] * 50, [1] * 50, range(50)))


def test_numbers_are_uniform():
    count = 20_000
    numbers = uniforms([stream_key(0, "k")] * count, [0] * count, range(count))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    cells = np.histogram(numbers, bins=50, range=(0, 1))[0]
    chi_square = ((cells - count / 50) ** 2 / (count / 50)).sum()
    assert chi_square < 85.4  # 49 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_no_rows():
    assert uniforms([], [], []).shape == (0,)
