"""The prompt loader: order, epochs, and resume at any batch."""

import json
import subprocess
import sys

import pytest
import torch

from rollverify.data.loader import PromptLoader, epoch_order
from rollverify.data.prompts import Prompt
from rollverify.errors import CheckpointError, ConfigError


def make_loader(num_prompts=8, batch_size=2, seed=0, shuffle=True, answer="0a"):
    prompts = [Prompt(prompt_id=str(i), text=f"p{i}", answer=answer) for i in range(num_prompts)]
    return PromptLoader(prompts, batch_size=batch_size, seed=seed, shuffle=shuffle)


def draw(loader, num_batches):
    """Prompt numbers of the next batches."""
    return [[int(prompt.prompt_id) for prompt in next(loader)] for _ in range(num_batches)]


def flat(batches):
    return [number for batch in batches for number in batch]


def saved(loader):
    """A state after a trip through JSON, as a checkpoint stores it."""
    return json.loads(json.dumps(loader.state_dict()))


def test_each_epoch_holds_every_prompt_once_in_its_own_order():
    numbers = flat(draw(make_loader(), 8))
    assert sorted(numbers[:8]) == sorted(numbers[8:]) == list(range(8))
    assert numbers[:8] == epoch_order(8, seed=0, epoch=0, shuffle=True)
    assert numbers[8:] == epoch_order(8, seed=0, epoch=1, shuffle=True)
    assert numbers[:8] != numbers[8:]
    assert numbers != flat(draw(make_loader(seed=1), 8))


def test_order_is_recorded_for_every_machine():
    assert epoch_order(6, seed=0, epoch=0, shuffle=True) == RECORDED_ORDER


RECORDED_ORDER = [5, 1, 3, 4, 0, 2]


def test_without_shuffle_batches_cross_the_end_of_an_epoch():
    loader = make_loader(num_prompts=5, shuffle=False)
    assert draw(loader, 5) == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


def test_set_smaller_than_a_batch_repeats_in_order():
    assert draw(make_loader(3, 7, shuffle=False), 2) == [
        [0, 1, 2, 0, 1, 2, 0],
        [1, 2, 0, 1, 2, 0, 1],
    ]
    one = flat(draw(make_loader(3, 7), 3))
    assert all(sorted(one[i : i + 3]) == [0, 1, 2] for i in range(0, 21, 3))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8, 20])
def test_resume_at_each_position_equals_uninterrupted(batch_size):
    num_batches = -(-16 // batch_size) + 1  # two epochs of 8 and one batch more
    whole = draw(make_loader(batch_size=batch_size), num_batches)
    for stop in range(num_batches + 1):
        loader = make_loader(batch_size=batch_size)
        assert draw(loader, stop) == whole[:stop]
        state = saved(loader)
        resumed = make_loader(batch_size=batch_size)
        resumed.load_state_dict(state)
        assert resumed.num_drawn == stop * batch_size
        assert draw(resumed, num_batches - stop) == whole[stop:]
        # saving disturbed nothing: the first loader goes on as well
        assert draw(loader, num_batches - stop) == whole[stop:]


def test_resume_can_be_repeated_and_can_go_back():
    loader = make_loader()
    whole = draw(make_loader(), 12)
    for start in (3, 7, 0, 4):
        fresh = make_loader()
        draw(fresh, start)
        loader.load_state_dict(saved(fresh))
        assert draw(loader, 2) == whole[start : start + 2]
        second = make_loader()
        second.load_state_dict(saved(loader))
        assert draw(second, 2) == whole[start + 2 : start + 4]


def test_dc01_resume_at_the_end_of_an_epoch_runs_the_next_epoch():
    # 4 batches an epoch, 2 epochs, saved at step 4: steps 5..8 run, in the order of epoch 1
    loader = make_loader()
    steps = [(1 + i, batch) for i, batch in enumerate(draw(loader, 4))]
    resumed = make_loader()
    resumed.load_state_dict(saved(loader))
    assert divmod(resumed.num_drawn, 8) == (1, 0)
    steps += [(5 + i, batch) for i, batch in enumerate(draw(resumed, 4))]
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert flat(batch for _, batch in steps[4:]) == epoch_order(8, seed=0, epoch=1, shuffle=True)


def test_dc03_kill_after_the_first_pair_loses_and_repeats_nothing():
    # prompts 0..7, batches of 4 handed out, pairs trained; killed when (0, 1) is trained
    loader = make_loader(batch_size=4, shuffle=False)
    batch = draw(loader, 1)[0]
    trained = batch[:2]
    resumed = make_loader(batch_size=2, shuffle=False)
    resumed.load_state_dict(saved(loader))
    resumed.seek(2)
    trained += flat(draw(resumed, 3))
    assert trained == [0, 1, 2, 3, 4, 5, 6, 7]
    assert draw(loader, 1) == [[4, 5, 6, 7]]  # the running loader did not step back


def test_dc05_epoch_is_that_of_the_step_about_to_run():
    loader = make_loader(num_prompts=20)  # 10 steps of 2 an epoch
    about_to_run, logged = {}, {}
    for step in range(1, 22):
        about_to_run[step] = loader.num_drawn // 20
        next(loader)
        logged[step] = loader.last_batch_epoch
    assert [about_to_run[s] for s in (9, 10, 11, 20, 21)] == [0, 0, 1, 1, 2]
    assert logged == about_to_run
    assert loader.num_drawn == 42  # step 21 took the first two of epoch 2


def test_dc11_the_saved_batch_is_not_drawn_again():
    whole = draw(make_loader(num_prompts=12), 6)
    loader = make_loader(num_prompts=12)
    applied = draw(loader, 3)  # batches 0, 1, 2; saved once batch 2 is applied
    resumed = make_loader(num_prompts=12)
    resumed.load_state_dict(saved(loader))
    applied += draw(resumed, 3)
    assert applied == whole


@pytest.mark.parametrize("start", [0, 3, 8, 13, 30])
def test_seek_goes_on_at_any_place(start):
    whole = flat(draw(make_loader(batch_size=1), 40))
    loader = make_loader(batch_size=2)
    draw(loader, 5)
    loader.seek(start)
    assert flat(draw(loader, 4)) == whole[start : start + 8]
    assert loader.num_drawn == start + 8


def test_any_place_of_the_stream_can_be_looked_up():
    loader = make_loader(num_prompts=5)
    drawn = flat(draw(make_loader(num_prompts=5, batch_size=1), 12))
    assert [loader.index_at(position) for position in range(12)] == drawn
    assert loader.num_drawn == 0


def test_seek_before_the_start_is_refused():
    with pytest.raises(ValueError, match="num_drawn must be >= 0, got -1"):
        make_loader().seek(-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_prompts": 9}, "the number of prompts was 8 and is 9"),
        ({"answer": "0b"}, "the content of the prompt file"),
        ({"seed": 1}, "run.seed was 0 and is 1"),
        ({"shuffle": False}, "data.shuffle was True and is False"),
    ],
)
def test_state_of_another_run_is_refused(change, message):
    loader = make_loader()
    draw(loader, 3)
    other = make_loader(**change)
    expected = draw(make_loader(**change), 2)
    with pytest.raises(CheckpointError, match=message):
        other.load_state_dict(saved(loader))
    assert draw(other, 2) == expected


@pytest.mark.parametrize("count", [None, -4, "4", 2.0])
def test_damaged_state_is_refused_and_changes_nothing(count):
    loader, whole = make_loader(), draw(make_loader(), 4)
    state = saved(loader) | {"num_drawn": count}
    draw(loader, 2)
    with pytest.raises(CheckpointError, match="saved prompt position is damaged"):
        loader.load_state_dict(state)
    del state["num_drawn"]
    with pytest.raises(CheckpointError, match=r"damaged \(None prompts drawn\)"):
        loader.load_state_dict(state)
    assert draw(loader, 2) == whole[2:]


def test_a_state_says_nothing_but_which_stream_it_is_and_how_far():
    loader = make_loader()
    draw(loader, 3)
    assert saved(loader) == {
        "format": 1,
        "num_prompts": 8,
        "prompts_hash": "ea17e27f0581e859",
        "seed": 0,
        "shuffle": True,
        "num_drawn": 6,
    }


def test_what_an_earlier_version_saved_beside_it_is_no_obstacle():
    loader, whole = make_loader(), draw(make_loader(), 5)
    state = saved(loader) | {"num_drawn": 6, "loader": {"_index_sampler_state": {"num_drawn": 6}}}
    loader.load_state_dict(state)
    assert draw(loader, 2) == whole[3:]


def test_the_row_of_a_prompt_is_not_part_of_its_identity():
    prompts = [
        Prompt(prompt_id="a", text="x", answer="y", columns={"level": level}) for level in "12"
    ]
    first, second = (PromptLoader([prompt], batch_size=1, seed=0) for prompt in prompts)
    assert prompts[0] == prompts[1] and len(set(prompts)) == 1
    second.load_state_dict(saved(first))


def test_empty_set_and_empty_batch_are_refused():
    with pytest.raises(ConfigError, match="the prompt set is empty"):
        make_loader(num_prompts=0)
    with pytest.raises(ConfigError, match="a batch needs at least 1 prompt, got 0"):
        make_loader(batch_size=0)


def test_global_random_state_is_left_alone():
    before = torch.random.get_rng_state()
    loader = make_loader()
    draw(loader, 5)
    loader.load_state_dict(saved(loader))
    draw(loader, 1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_loader_imports_neither_engine_nor_trainer():
    code = (
        "import sys; import rollverify.data.loader; "
        "bad = {'torchtitan', 'vllm', 'tensordict'} & set(sys.modules); "
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
