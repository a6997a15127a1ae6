"""The index finds the longest suffix that occurs earlier, whatever the text."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dflash2.copies import CopyIndex


def longest_match(text: list[int]) -> int:
    """The length of the longest suffix that also ends at an earlier place."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        if any(text[i : i + length] == suffix for i in range(len(text) - length)):
            return length
    return 0


texts = st.integers(1, 5).flatmap(lambda top: st.lists(st.integers(0, top), max_size=60))


@settings(deadline=None, max_examples=300)
@given(texts)
def test_the_longest_suffix_that_occurs_earlier(text):
    index = CopyIndex()
    for size, token in enumerate(text, start=1):
        index.append(token)
        assert len(index) == size and index.tokens == text[:size]
        assert index.match == longest_match(text[:size])
        if index.match:
            assert index.match <= index.source < size
            assert text[index.source - index.match : index.source] == text[:size][-index.match :]


@settings(deadline=None)
@given(texts.filter(bool), st.integers(0, 30))
def test_a_copy_goes_on_from_the_source_and_then_repeats_itself(text, position):
    index = CopyIndex(text)
    if index.match:
        longer = list(text)
        for _ in range(position + 1):
            longer.append(longer[len(longer) - len(text) + index.source])
        assert index.continuation(position) == longer[-1]


def test_the_latest_of_several_occurrences_is_copied():
    text = [7, 8, 9, 1, 7, 8, 9, 2, 7, 8, 9]
    assert CopyIndex(text).match == 3
    assert CopyIndex(text).continuation(0) == 2
    assert CopyIndex([*text, 3, 7, 8, 9]).continuation(0) == 3


@pytest.mark.parametrize("vocabulary", [2, 50, 50_000])
def test_the_time_of_a_token_does_not_grow_with_the_text(vocabulary):
    numbers = [(i * i * 7919 + i // 3) % 104_729 % vocabulary for i in range(60_000)]
    index, times = CopyIndex(), []
    for start in range(0, len(numbers), 20_000):
        begin = time.process_time()
        for token in numbers[start : start + 20_000]:
            index.append(token)
        times.append(time.process_time() - begin)
    assert times[-1] < 4 * times[0]
