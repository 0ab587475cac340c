"""The trajectory's keys, types and lengths, and the messages that name what is wrong."""

import pytest
import torch
from fakes import trajectory

from rollverify.rollout.schema import (
    FIELDS,
    Status,
    make_trajectory,
    num_tokens,
    stacked,
    validate_trajectory,
)


def test_a_new_trajectory_has_one_segment_and_trains_on_every_response_token():
    made = make_trajectory(
        prompt_ids=[7, 8],
        response_ids=[5, 6, 1],
        behavior_logprobs=[-0.5, -1.0, -0.25],
        policy_version=4,
        status=Status.STOP,
        reward=1.0,
        group_id=3,
        sample_index=2,
        seed=11,
    )
    assert set(made.keys()) == set(FIELDS)
    assert made["prompt_ids"].tolist() == [7, 8]
    assert made["response_ids"].tolist() == [5, 6, 1]
    assert made["behavior_logprobs"].tolist() == [-0.5, -1.0, -0.25]
    assert made["policy_version"].tolist() == [4, 4, 4]
    assert made["segment_ids"].tolist() == [0, 0, 0]
    assert made["loss_mask"].tolist() == [True, True, True]
    assert [int(made[key]) for key in ("status", "group_id", "sample_index", "seed")] == [
        1,
        3,
        2,
        11,
    ]


@pytest.mark.parametrize("key", list(FIELDS))
def test_a_missing_key_is_named(key):
    broken = trajectory([1], [2])
    del broken[key]
    with pytest.raises(ValueError, match=rf"lacks \['{key}'\]"):
        validate_trajectory(broken)


def test_an_unknown_key_is_named():
    broken = trajectory([1], [2]).set("other_logprobs", torch.zeros(1))
    with pytest.raises(ValueError, match="unknown \\['other_logprobs'\\]"):
        validate_trajectory(broken)


@pytest.mark.parametrize("key", list(FIELDS))
def test_a_wrong_type_is_named_with_group_and_sample(key):
    broken = trajectory([1], [2], group=5, sample=3)
    broken[key] = broken[key].to(torch.float64)
    with pytest.raises(ValueError, match=rf"group 5 sample 3: {key} must be torch\.\w+, got"):
        validate_trajectory(broken)


@pytest.mark.parametrize("key", [key for key, field in FIELDS.items() if field.per == "response"])
def test_per_token_values_must_be_as_long_as_the_response(key):
    """LP07: ids and log-probs of different lengths are refused, not shifted."""
    broken = trajectory([1], [2, 3])
    longer = torch.cat([broken[key], broken[key][:1]])
    broken[key] = longer
    with pytest.raises(ValueError, match="has shape"):
        validate_trajectory(broken)


def test_engine_log_probs_of_another_length_are_refused():
    """LP07: 2 ids and 3 log-probs, as after tokenising the text again."""
    with pytest.raises(ValueError, match=r"behavior_logprobs has shape \[3\], expected \[2\]"):
        trajectory([1], [0, 1], logprobs=[-1.0, -2.0, -3.0])


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_log_probs_must_be_finite(value):
    with pytest.raises(ValueError, match=r"group 2 sample 0: behavior_logprobs.*not finite"):
        trajectory([1], [2, 3], logprobs=[-1.0, value], group=2)


def test_an_empty_prompt_is_refused_and_an_empty_response_is_not():
    with pytest.raises(ValueError, match="the prompt is empty"):
        trajectory([], [2])
    assert num_tokens(trajectory([1, 2], [])) == 2


@pytest.mark.parametrize("lengths", [[5], [5, 5], [5, 3]])
def test_trajectories_keep_their_own_lengths_whatever_the_others_have(lengths):
    """TD01: nothing is padded and nothing depends on all shapes being equal."""
    made = [trajectory([1], list(range(size))) for size in lengths]
    assert [len(one["response_ids"]) for one in made] == lengths
    assert [num_tokens(one) for one in made] == [size + 1 for size in lengths]
    assert {type(one["response_ids"]) for one in made} == {torch.Tensor}


def test_stacked_keeps_order_and_type():
    made = [trajectory([1], [2], reward=reward, group=7) for reward in (0.5, 0.0, 1.0)]
    assert torch.equal(stacked(made, "reward"), torch.tensor([0.5, 0.0, 1.0]))
    assert torch.equal(stacked(made, "group_id"), torch.tensor([7, 7, 7]))
    assert stacked([], "group_id").dtype == torch.int64
    with pytest.raises(ValueError, match="one value per token"):
        stacked(made, "loss_mask")
