"""Growing and cutting a trajectory: all arrays per token together, versions and segments right."""

import pytest
import torch
from support.fakes import EOS, trajectory
from tensordict import TensorDict

from rollverify.errors import RolloutError
from rollverify.rollout.trajectory import (
    FIELDS,
    RESPONSE_KEYS,
    Status,
    append_segment,
    new_trajectory,
    set_outcome,
    status_after,
    truncate,
    validate_trajectory,
)


def fresh(group: int = 0, sample: int = 0) -> TensorDict:
    return new_trajectory(prompt_ids=[7, 8], group_id=group, prompt_index=3, sample_index=sample)


def grown(*segments: tuple[int, list[int]], mask_older: bool = False) -> TensorDict:
    """A trajectory from (version, ids); the log-prob of an id is -id / 100 nats."""
    made = fresh()
    for seed, (version, ids) in enumerate(segments):
        append_segment(
            made,
            ids,
            [-token / 100 for token in ids],
            policy_version=version,
            seed=seed,
            mask_older=mask_older,
        )
    validate_trajectory(made)
    return made


def values(made: TensorDict, *keys: str) -> list[list]:
    return [made[key].tolist() for key in keys]


def test_a_resumed_response_goes_on_where_it_stopped():
    """PR11: what is appended is new, never the whole response again."""
    made = grown((0, [5, 6]), (1, [7, 8, 9]))
    assert made["response_ids"].tolist() == [5, 6, 7, 8, 9]
    expected = torch.tensor([-0.05, -0.06, -0.07, -0.08, -0.09])
    assert torch.equal(made["behavior_logprobs"], expected)


def test_one_token_at_a_time_gives_the_same_as_all_at_once():
    """PR11: the delta stream [7], [8], [9]; only the number of requests tells them apart."""
    at_once, streamed = grown((0, [5, 6]), (1, [7, 8, 9])), fresh()
    for seed, (version, token) in enumerate([(0, 5), (0, 6), (1, 7), (1, 8), (1, 9)]):
        append_segment(streamed, [token], [-token / 100], policy_version=version, seed=seed)
    keys = [key for key in RESPONSE_KEYS if key not in ("anchor_logprobs", "is_reprefilled")]
    assert values(streamed, *keys) == values(at_once, *keys)
    assert [int(one["num_requests"]) for one in (at_once, streamed)] == [2, 5]


def test_every_token_keeps_the_version_that_sampled_it():
    """PR17: 4 tokens under version 3, 2 under version 4."""
    made = grown((3, [1, 2, 3, 4]), (4, [5, 6]))
    assert made["policy_version"].tolist() == [3, 3, 3, 3, 4, 4]
    assert made["segment_ids"].tolist() == [0, 0, 0, 0, 1, 1]


def test_a_late_answer_belongs_to_the_version_of_its_request():
    """PR17: version 4 has answered nothing yet when the tokens of version 3 arrive."""
    made = grown((3, [1, 2, 3, 4]))
    assert made["policy_version"].tolist() == [3, 3, 3, 3]


def test_versions_may_be_skipped_and_segments_count_on():
    assert grown((0, [1]), (5, [2]))["segment_ids"].tolist() == [0, 1]


def test_a_second_request_under_the_same_version_stays_in_its_segment():
    made = grown((2, [1, 2]), (2, [3]))
    assert made["segment_ids"].tolist() == [0, 0, 0]


def test_tokens_after_the_first_request_have_rebuilt_keys_and_values():
    made = grown((2, [1, 2]), (2, [3]), (3, [4]))
    assert made["is_reprefilled"].tolist() == [False, False, True, True]


def test_new_tokens_have_no_anchor_and_the_old_keep_theirs():
    made = grown((0, [1]))
    made["anchor_logprobs"] = torch.tensor([-0.25])
    append_segment(made, [2], [-1.0], policy_version=1, seed=1)
    assert made["anchor_logprobs"][0] == -0.25 and made["anchor_logprobs"].isnan()[1]


@pytest.mark.parametrize(
    ("mask_older", "expected"), [(True, [0, 0, 0, 1, 1]), (False, [1, 1, 1, 1, 1])]
)
def test_older_tokens_leave_the_loss_only_where_that_is_asked(mask_older, expected):
    """PR05: 3 tokens of version 0 and 2 of version 1; all arrays stay 5 long."""
    made = grown((0, [1, 2, 3]), (1, [4, 5]), mask_older=mask_older)
    assert made["loss_mask"].int().tolist() == expected
    assert {len(made[key]) for key in RESPONSE_KEYS} == {5}


def test_a_request_without_tokens_changes_only_its_seed():
    """PR15: paused in the queue; no segment, and the next token is at position 0 of version 1."""
    made = grown((0, []))
    assert made["segment_ids"].tolist() == [] and int(made["status"]) == Status.UNFINISHED
    assert int(made["num_requests"]) == 1
    append_segment(made, [100], [-0.2], policy_version=1, seed=1)
    assert values(made, "response_ids", "policy_version") == [[100], [1]]
    assert values(made, "segment_ids", "is_reprefilled") == [[0], [False]]


def test_a_resumed_request_without_tokens_keeps_the_response():
    """PR15: the empty answer neither masks nor begins a segment."""
    made = grown((0, [5, 6]), (1, []), mask_older=True)
    assert values(made, "response_ids", "segment_ids") == [[5, 6], [0, 0]]
    assert made["loss_mask"].tolist() == [True, True]
    assert int(made["num_requests"]) == 2


def test_the_seed_is_that_of_the_newest_stream():
    made = grown((0, [1]), (0, [2]), (1, [3]))
    assert [int(made["seed"]), int(made["num_requests"])] == [2, 3]


def test_ids_and_log_probs_must_be_equal_in_number():
    """LP07: 2 ids with 3 log-probs, as after tokenising the text again."""
    with pytest.raises(RolloutError, match="group 4 sample 1: 2 new tokens with 3 log-probs"):
        append_segment(fresh(4, 1), [0, 1], [-1.0, -2.0, -3.0], policy_version=0, seed=0)


def test_sampled_ids_are_the_truth():
    """LP07: ids [0, 1] spell the text of id 2 and are still two tokens with two log-probs."""
    made = fresh()
    append_segment(made, [0, 1], [-1.0, -2.0], policy_version=0, seed=0)
    assert values(made, "response_ids", "behavior_logprobs") == [[0, 1], [-1.0, -2.0]]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_a_log_prob_that_is_not_finite_is_refused(value):
    with pytest.raises(RolloutError, match="group 0 sample 0: the engine gave a log-prob"):
        append_segment(fresh(), [1, 2], [-1.0, value], policy_version=0, seed=0)


def test_an_older_version_cannot_follow_a_newer_one():
    with pytest.raises(RolloutError, match=r"holds tokens of version 2 .* under version 1"):
        grown((2, [1]), (1, [2]))


def test_a_cut_shortens_every_array_per_token():
    """VF03: 5 tokens cut at 3; with max_tokens 10 the next request may have 10 - 3 = 7."""
    made = grown((0, [1, 2]), (1, [3, 4, 5]))
    truncate(made, 3)
    assert {key: len(made[key]) for key in RESPONSE_KEYS} == dict.fromkeys(RESPONSE_KEYS, 3)
    assert values(made, "response_ids", "policy_version") == [[1, 2, 3], [0, 0, 1]]
    assert values(made, "segment_ids", "prompt_ids") == [[0, 0, 1], [7, 8]]
    validate_trajectory(made)


def test_a_cut_response_can_go_on_in_the_next_segment():
    made = grown((0, [1, 2]), (1, [3, 4]), (2, [5]))
    truncate(made, 1)
    append_segment(made, [6, 7], [-1.0, -1.0], policy_version=3, seed=3)
    assert values(made, "response_ids", "policy_version") == [[1, 6, 7], [0, 3, 3]]
    assert values(made, "segment_ids", "is_reprefilled") == [[0, 1, 1], [False, True, True]]
    validate_trajectory(made)


def test_a_cut_to_nothing_is_the_bare_prompt_again():
    made = trajectory([7], [5, 6], reward=1.0)
    truncate(made, 0)
    append_segment(made, [8], [-1.0], policy_version=4, seed=1)
    assert values(made, "response_ids", "segment_ids", "is_reprefilled") == [[8], [0], [False]]


def test_a_response_that_loses_a_token_is_unfinished_and_has_no_reward():
    made = trajectory([7], [5, 6, EOS], reward=1.0)
    truncate(made, 2)
    assert int(made["status"]) == Status.UNFINISHED and float(made["reward"]) == 0.0
    validate_trajectory(made)


def test_keeping_all_tokens_keeps_the_outcome():
    made = trajectory([7], [5, 6, EOS], reward=1.0)
    truncate(made, 3)
    assert int(made["status"]) == Status.STOP and float(made["reward"]) == 1.0


@pytest.mark.parametrize("num_kept", [-1, 3])
def test_a_cut_out_of_range_is_refused(num_kept):
    with pytest.raises(ValueError, match=f"group 0 sample 0: cannot keep {num_kept} of 2 tokens"):
        truncate(trajectory([7], [5, 6]), num_kept)


def test_a_cut_frees_the_memory_of_the_tokens_that_are_gone():
    made = grown((0, list(range(1000))))
    truncate(made, 1)
    sizes = {key: made[key].untyped_storage().nbytes() for key in RESPONSE_KEYS}
    assert sizes == {key: FIELDS[key].dtype.itemsize for key in RESPONSE_KEYS}


@pytest.mark.parametrize(
    ("response", "limit", "status"),
    [
        ([11, 12, EOS], 10, Status.STOP),  # the engine had said "paused" or "stop": both the same
        ([11, 12, EOS], 3, Status.STOP),
        ([11, 12, 13], 3, Status.LENGTH),
        ([11, EOS, 13], 10, Status.UNFINISHED),  # cannot come from an engine; the end decides
        ([], 10, Status.UNFINISHED),
    ],
)
def test_the_tokens_alone_decide_how_far_a_response_is(response, limit, status):
    """PR13: a stop token that fell on the pause ends the response.

    PR03: so does the limit. PR15: nothing generated is unfinished.
    """
    assert status_after(response, stop_token_ids=(EOS,), max_tokens=limit) is status


def test_the_budget_of_the_next_request_is_what_is_left_of_the_response():
    """PR01: 7 of 10 tokens leave 3, whatever the prompt; 10 of 10 is no request at all (PR03)."""
    made = grown((0, [1, 2, 3, 4, 5, 6, 7]))
    budget = 10 - len(made["response_ids"])
    assert budget == 3
    append_segment(made, [20] * budget, [-1.0] * budget, policy_version=1, seed=1)
    status = status_after(made["response_ids"].tolist(), stop_token_ids=(EOS,), max_tokens=10)
    assert status is Status.LENGTH


def test_a_response_above_the_limit_is_refused():
    """PR01: the full budget asked for again would give 7 + 10 = 17 tokens."""
    with pytest.raises(RolloutError, match="17 tokens is above the limit of 10"):
        status_after([1] * 17, stop_token_ids=(EOS,), max_tokens=10)


def test_an_outcome_is_stored_with_its_reward():
    made = grown((0, [1]))
    set_outcome(made, Status.LENGTH, 0.5)
    assert int(made["status"]) == Status.LENGTH and float(made["reward"]) == 0.5


def test_types_do_not_depend_on_the_default_of_torch():
    torch.set_default_dtype(torch.float64)
    try:
        made = grown((0, [1, 2]), (1, [3]))
        set_outcome(made, Status.LENGTH, 1.0)
        truncate(made, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    validate_trajectory(made)
