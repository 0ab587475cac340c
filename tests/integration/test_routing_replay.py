"""Routing replay with a real engine and trainer: through training, sync, pause, cut and resume."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_pair import MAX_MODEL_LEN, PARITY_TOLERANCE, Pair, pair_of
from moe_models import NUM_EXPERTS, NUM_LAYERS, TOP_K, MoeReference, moe_folder
from tensordict import TensorDict
from verified_run import ZERO_AGE_LIMIT, Run, update

from rollverify.rollout.routing import is_routed
from rollverify.rollout.schema import ROUTING
from rollverify.state import StepState
from rollverify.training.routing import RoutingShape
from torchtitan_ext.hf_folder import write_hf_folder

pytestmark = pytest.mark.vllm

SHAPE = RoutingShape(num_layers=NUM_LAYERS, experts_per_token=TOP_K, num_experts=NUM_EXPERTS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("replay")
    folder = moe_folder(root / "model", max_position_embeddings=MAX_MODEL_LEN)
    made = pair_of(folder, root / "run", record_routing=True)
    made.sync.push(0)
    yield made
    made.engine.close()


def exported(pair: Pair, folder: Path) -> MoeReference:
    """transformers with the trainer's weights now."""
    write_hf_folder(folder, pair.trainer.hf_parameters(), source=pair.folder, is_writer=True)
    return MoeReference(folder)


@pytest.fixture(scope="module")
def steps(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[StepState], list[MoeReference], Run]:
    """Two phases with a large update, verification and a sync between them."""
    root = tmp_path_factory.mktemp("steps")
    run, trainer = Run(pair, root, routing=SHAPE), update(pair, SHAPE)
    references = [exported(pair, root / "0")]
    first = run.step(0, train=lambda finished: trainer.train_step(finished, 0))
    pair.sync.push(1)
    references.append(exported(pair, root / "1"))
    second = run.step(1, train=lambda finished: None)
    return [first, second], references, run


def ids_of(one: TensorDict) -> list[int]:
    return torch.cat([one["prompt_ids"], one["response_ids"]]).tolist()


def held(state: StepState) -> list[TensorDict]:
    return [one for one in [*state.finished, *state.unfinished] if len(one["response_ids"])]


@pytest.mark.parametrize("reference", ["anchor", "behavior"])
def test_nothing_of_zero_age_is_cut_under_replay(
    pair: Pair, tmp_path: Path, reference: str
) -> None:
    """Paused and scored before any update, with the engine's experts on both sides."""
    run = Run(pair, tmp_path, reference, routing=SHAPE)
    state = run.step(0, train=lambda finished: None)
    tokens = torch.cat(run.scoring.token_ops)
    assert len(tokens) > 100 and tokens.max() <= ZERO_AGE_LIMIT
    assert state.metrics["verification/acceptance_rate"] == 1.0


def test_engine_and_trainer_agree_on_every_token_after_training_and_sync(steps, pair) -> None:
    """float32: the engine's log-probs at sampling against the trainer's with the same experts."""
    _, second = steps[0]
    anchors = [one["anchor_logprobs"] for one in second.unfinished]
    gaps = [
        (anchor - one["behavior_logprobs"])[one["policy_version"] == 1].abs()
        for anchor, one in zip(anchors, second.unfinished, strict=True)
    ]
    assert len(torch.cat(gaps)) > 100
    assert torch.cat(gaps).max() <= PARITY_TOLERANCE


def test_rows_stay_one_less_than_tokens_through_pause_cut_and_resume(steps) -> None:
    (first, second), _, run = steps
    assert run.buffer.counts.cut > 0
    assert any(one["segment_ids"][-1] > 0 for one in held(second))  # Some were resumed.
    for one in [*held(first), *held(second)]:
        assert len(one[ROUTING]) == len(ids_of(one)) - 1
        assert is_routed(one)


def test_every_row_is_what_the_model_that_fed_the_token_chose(steps) -> None:
    """RR03, RR07: row j was fed when token j + 1 was drawn, under that token's version.

    Checked against transformers with the weights of each version, dense layer (0) included.
    """
    (_, second), references, _ = steps
    versions_seen = set()
    for one in held(second):
        rows = one[ROUTING].long().sort(-1).values
        fed_under = torch.cat(
            [
                one["policy_version"][:1].expand(len(one["prompt_ids"]) - 1),
                one["policy_version"],
            ]
        )
        for version, reference in enumerate(references):
            expected = reference.experts(ids_of(one))
            is_its = fed_under == version
            assert torch.equal(rows[is_its], expected[is_its])
            versions_seen |= {version} if bool(is_its.any()) else set()
    assert versions_seen == {0, 1}
