"""Ranks that hold the same trajectories: who they are, and how they share training and scoring."""

import json
from typing import Any

import pytest
from unit.training import twins_worker
from unit.training.twins_worker import BATCH, LAYOUTS, scored

from rollverify.ranks import Ranks
from rollverify.rollout.twins import Twins, deal_out


@pytest.fixture(scope="module")
def four_ranks(run_gloo_workers) -> list[dict[tuple[int, int], Any]]:
    """What each of four ranks saw, by layout."""
    folder = run_gloo_workers(twins_worker.main, 4)
    texts = [(folder / f"{rank}.json").read_text() for rank in range(4)]
    return [dict(zip(LAYOUTS, json.loads(text), strict=True)) for text in texts]


def test_the_largest_goes_first_to_the_part_that_has_least():
    """9; then 5 and 4 to the other, which both hold 9 then; the 2 goes to the lower part."""
    assert deal_out({7: 5, 1: 9, 3: 4, 8: 2}, 2) == [[1, 8], [3, 7]]
    assert deal_out({}, 3) == [[], [], []]


@pytest.mark.distributed
def test_twins_follow_each_other_and_others_stand_in_the_same_place(four_ranks):
    expected = {
        (1, 1): ([0, 1, 2, 3], [0]),
        (2, 1): ([1, 3], [0, 1]),
        (4, 2): ([1], [0, 1, 2, 3]),
        (2, 2): ([1, 3], [0, 1]),
        (1, 4): ([1], [0, 1, 2, 3]),
        (4, 1): ([1], [0, 1, 2, 3]),
    }
    for layout, (ranks, twins) in expected.items():
        assert four_ranks[1][layout]["ranks"] == ranks, layout
        assert four_ranks[1][layout]["twins"] == (twins if layout != (1, 1) else [0]), layout


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_data_rank_trains_on_its_part_of_whole_groups(four_ranks, layout):
    engine, tensor = layout
    parts = [rank[layout]["own"] for rank in four_ranks[: max(layout)]]
    assert all(parts[i] == parts[i // tensor * tensor] for i in range(len(parts)))
    mine = [tuple(one) for part in parts[::tensor] for one in part]
    assert sorted(mine) == [(int(t["group_id"]), int(t["sample_index"])) for t in BATCH]
    groups = [{group for group, _ in part} for part in parts[::tensor]]
    assert sum(map(len, groups)) == 3 and len(groups) == max(engine // tensor, 1)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_twins_get_every_score_and_every_expert(four_ranks, layout):
    """As one rank alone, though each data rank is fed its part only."""
    alone = scored(Twins(), Ranks(), BATCH)
    fed = [rank[layout]["batch"].pop("fed") for rank in four_ranks]
    assert sum(fed) == alone.pop("fed") * 4 // max(1, layout[0] // layout[1])
    for rank in four_ranks:
        assert rank[layout]["batch"] == alone
        nothing = rank[layout]["nothing"]
        assert (nothing["scores"], nothing["routes"]) == ([], [None])
