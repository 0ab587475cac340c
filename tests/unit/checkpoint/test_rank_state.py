"""A rank's part of a checkpoint: what was in flight comes back and goes on."""

from pathlib import Path

import pytest
from support.fakes import EOS, FakeEngine
from support.rollout_parts import names

from rollverify.checkpoint.rank_file import RankState
from rollverify.config.tables import DynamicSamplingConfig, RolloutConfig
from rollverify.data.loader import PromptLoader
from rollverify.data.prompts import Prompt
from rollverify.errors import CheckpointError
from rollverify.ranks import Ranks
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.inputs import encoded_batches
from rollverify.rollout.layout import flat, response_layout
from rollverify.rollout.ledger import PromptLedger
from rollverify.rollout.prompt_queue import EncodedPrompt, PromptQueue
from rollverify.rollout.requests import RequestLoop
from rollverify.rollout.rollouter import Rollouter
from rollverify.verification.filters import keep_by_staleness
from rollverify.verification.ops import trajectory_staleness

NUM_PROMPTS = 11
PROMPTS = [Prompt(prompt_id=f"q{i}", text=str(i), answer="a") for i in range(NUM_PROMPTS)]
ENCODED = [
    EncodedPrompt(token_ids=(i,), grade=lambda ids: float(len(ids)), prompt_index=i)
    for i in range(NUM_PROMPTS)
]
LENGTHS = {f"{g}/{s}": 3 + (5 * g + 7 * s) % 23 for g in range(100) for s in range(2)}

EVERY_GROUP = DynamicSamplingConfig()
SOME_GROUPS = DynamicSamplingConfig(enable=True, max_dropped_batches=49.5)
"""Gives up some of the groups."""


def make_state(
    rank: int = 0,
    world_size: int = 1,
    group_size: int = 2,
    max_response_tokens: int = 30,
    dynamic_sampling: DynamicSamplingConfig = EVERY_GROUP,
) -> RankState:
    """Partial rollouts of 2 groups of 2 per step with 6 requests in flight."""
    loader = PromptLoader(PROMPTS, batch_size=world_size, seed=4)
    buffer, ledger = TrajectoryBuffer(group_size=group_size), PromptLedger()
    queue = PromptQueue(
        batches=encoded_batches(loader, PROMPTS, ENCODED),
        prompts=ENCODED,
        ranks=Ranks(rank=rank, size=world_size),
    )
    rollout = RolloutConfig(
        prompts_per_step=2, max_response_tokens=max_response_tokens, temperature=1.0
    )
    loop = RequestLoop(
        engine=FakeEngine(stop_after=LENGTHS),
        buffer=buffer,
        prompts=ENCODED,
        rollout=rollout,
        stop_token_ids=(EOS,),
        run_seed=0,
    )
    rollouter = Rollouter(
        loop=loop,
        buffer=buffer,
        queue=queue,
        ledger=ledger,
        rollout=rollout,
        num_in_flight=6,
        max_num_seqs=6,
        is_on_policy=False,
        must_be_verified=False,
        ranks=Ranks(),  # Each rank runs its phases alone here.
        dynamic_sampling=dynamic_sampling,
        has_signal=lambda rewards: rewards.sum().item() % 4 != 1,
    )
    return RankState(
        loader=loader,
        buffer=buffer,
        ledger=ledger,
        queue=queue,
        rollouter=rollouter,
        rollout=rollout,
        ranks=queue.ranks,
    )


def collect(state: RankState, versions: range) -> list[object]:
    """What each phase trained on, token for token."""
    seen: list[object] = []
    for version in versions:
        finished, _ = state.rollouter.collect(version)
        state.rollouter.mark_trained()
        state.buffer.check()
        state.ledger.check()
        seen += [
            (*name, int(t["prompt_index"]), t["response_ids"].tolist(), int(t["seed"]))
            for name, t in zip(names(finished), finished, strict=True)
        ]
    return seen


@pytest.mark.parametrize("dynamic_sampling", [EVERY_GROUP, SOME_GROUPS])
@pytest.mark.parametrize("saved_after", [0, 1, 3, 6])
def test_a_restored_rank_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, saved_after: int, dynamic_sampling: DynamicSamplingConfig
):
    """DC03, DC11: nothing is trained twice, skipped, or made with another seed."""
    whole = make_state(dynamic_sampling=dynamic_sampling)
    expected = collect(whole, range(9))
    first, second = (make_state(dynamic_sampling=dynamic_sampling) for _ in range(2))
    seen = collect(first, range(saved_after))
    first.save(tmp_path)
    second.load(tmp_path)
    seen += collect(second, range(saved_after, 9))
    assert seen == expected
    assert second.buffer.counts == whole.buffer.counts
    assert second.ledger.counts() == whole.ledger.counts()
    assert (whole.ledger.counts()["filtered"] > 0) == dynamic_sampling.enable


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 3)])
def test_another_number_of_ranks_takes_over_every_group(tmp_path: Path, before: int, after: int):
    """Every prompt of the stream is drawn once; every token is held by one rank."""
    old = [make_state(rank, before) for rank in range(before)]
    for rank, state in enumerate(old):
        collect(state, range(3 + rank))
        state.save(tmp_path)
    new = [make_state(rank, after) for rank in range(after)]
    for state in new:
        state.load(tmp_path)

    def total(states: list[RankState], what: str) -> int:
        return sum(getattr(state.buffer, what) for state in states)

    assert total(new, "num_tokens") == total(old, "num_tokens")
    held = sorted(g for state in new for g in state.buffer.group_ids())
    assert held == sorted(g for state in old for g in state.buffer.group_ids())
    drawn = [state.queue.draw().group_id for state in new for _ in range(12)]
    known = [*drawn, *held]
    assert len(known) == len(set(known)), "a group was drawn twice"
    trained = sum(state.ledger.counts()["trained"] for state in new)
    assert trained == sum(state.ledger.counts()["trained"] for state in old)
    for state in new:
        state.buffer.check()
        state.ledger.check()


def test_a_missing_or_damaged_part_is_refused_with_its_name(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"rollout-0\.safetensors is missing"):
        make_state().load(tmp_path)
    state = make_state()
    collect(state, range(2))
    state.save(tmp_path)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rollout-0\.safetensors is not as it was written"):
        make_state().load(tmp_path)


def test_another_group_size_is_refused(tmp_path: Path):
    state = make_state()
    collect(state, range(2))
    state.save(tmp_path)
    with pytest.raises(CheckpointError, match="resume with the same rollout"):
        make_state(group_size=3).load(tmp_path)


def test_the_files_of_all_ranks_lie_side_by_side(tmp_path: Path):
    for rank in range(2):
        make_state(rank, 2).save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "rollout-0.safetensors",
        "rollout-1.safetensors",
    ]


def test_a_limit_below_what_is_under_way_is_refused(tmp_path: Path):
    state = make_state()
    collect(state, range(3))
    sizes = [len(t["response_ids"]) for t in state.buffer.trajectories() if not int(t["status"])]
    state.save(tmp_path)
    make_state(max_response_tokens=max(sizes) + 1).load(tmp_path)
    with pytest.raises(CheckpointError, match=f"resume with at least {max(sizes) + 1}"):
        make_state(max_response_tokens=max(sizes)).load(tmp_path)


def test_another_temperature_is_refused(tmp_path: Path):
    make_state().save(tmp_path)
    other = make_state()
    other.rollout = RolloutConfig(temperature=0.3)
    with pytest.raises(CheckpointError, match=r"rollout\.temperature = 1\.0.*resume with the same"):
        other.load(tmp_path)


def test_the_staleness_limit_holds_after_a_resume(tmp_path: Path):
    """DC09: what a filter would keep does not depend on whether the run was stopped."""

    def kept(state: RankState, version: int) -> list[tuple[int, int]]:
        held = state.buffer.trajectories()
        versions = flat(held, "policy_version")
        ages = trajectory_staleness(versions, response_layout(held), version)
        names_kept = zip(names(held), keep_by_staleness(ages, 1).tolist(), strict=True)
        return [name for name, is_kept in names_kept if is_kept]

    state, resumed = make_state(), make_state()
    collect(state, range(5))
    state.save(tmp_path)
    resumed.load(tmp_path)
    expected = kept(state, 5)
    assert 0 < len(expected) < len(state.buffer.trajectories())
    assert kept(resumed, 5) == expected
    assert resumed.buffer.counts == state.buffer.counts
