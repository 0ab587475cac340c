"""Items in rows: limits, no item lost, equal rows for threads."""

import random

import pytest
import torch

from rollverify.training.packing import assign_rows, even_row_tokens


def test_rows_are_filled_longest_first_into_the_tightest_gap():
    # Limit 7: 5 opens row 0 (2 left), 4 opens row 1 (3 left), 3 fits row 1 only, 2 fits row 0.
    assert assign_rows([5, 3, 4, 2], 7) == [[0, 3], [1, 2]]
    # 1 fits both rows (2 and 1 left) and takes the tighter one.
    assert assign_rows([6, 5, 1], 7) == [[0, 2], [1]]


def test_assignment_holds_every_item_once_within_the_limit():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(1, 40, (30,), generator=generator).tolist()
        rows = assign_rows(lengths, 40)
        assert sorted(item for row in rows for item in row) == list(range(30))
        assert all(sum(lengths[item] for item in row) <= 40 for row in rows)
        assert all(row == sorted(row) for row in rows)


def test_an_item_longer_than_the_limit_gets_a_row_of_its_own():
    assert assign_rows([3, 12, 2], 8) == [[1], [0, 2]]
    assert assign_rows([], 8) == []


def test_rows_are_those_of_a_search_through_all_of_them():
    """Best fit, longest first, the first of equally full rows: written as its definition."""
    generator = random.Random(4)
    for _ in range(200):
        lengths = [generator.randint(0, 30) for _ in range(generator.randint(0, 60))]
        rows: list[list[int]] = []
        for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            room = [40 - sum(lengths[i] for i in row) for row in rows]
            fits = [r for r in range(len(rows)) if room[r] >= lengths[item]]
            if fits:
                rows[min(fits, key=lambda r: room[r])].append(item)
            else:
                rows.append([item])
        assert assign_rows(lengths, 40) == [sorted(row) for row in rows]


@pytest.mark.parametrize(
    ("total", "rows_at_once", "limit"),
    [
        (31_000, 1, 7_789),  # 4 rows of 7,750 and half a percent of it, 38.75, rounded up
        (31_000, 2, 3_895),  # 8 rows of 3,875 and 19.4
        (33_000, 2, 3_317),  # 8 rows would exceed the limit of 4,096: 10 of 3,300 and 16.5
        (8_192, 2, 4_096),  # more than the equal share would be more than the limit
        (0, 2, 4_096),
        (5, 8, 1),
    ],
)
def test_rows_side_by_side_are_equally_long(total, rows_at_once, limit):
    assert even_row_tokens(total, 8_192, rows_at_once) == limit


def test_every_thread_gets_as_many_rows():
    generator = random.Random(5)
    lengths = [min(352, int(generator.expovariate(1 / 80)) + 8) for _ in range(400)]
    for rows_at_once in (2, 3, 4):
        limit = even_row_tokens(sum(lengths), 8_192, rows_at_once)
        sizes = [sum(lengths[i] for i in row) for row in assign_rows(lengths, limit)]
        assert len(sizes) % rows_at_once == 0
        assert min(sizes) > 0.9 * max(sizes)
