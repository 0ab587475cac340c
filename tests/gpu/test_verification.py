"""Whether verification works in bfloat16: a policy that has not moved must lose nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.bfloat16_pair import bfloat16_pair
from support.engine_pair import MAX_MODEL_LEN, Pair
from support.tiny_models import tiny_folder
from support.verified_run import Run, scorer_of

from rollverify.config.tables import VerificationConfig
from rollverify.hooks import StepState
from rollverify.ranks import Ranks
from rollverify.verification.packing_noise import PackingNoise

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("verification")
    folder = tiny_folder(root / "model", max_position_embeddings=MAX_MODEL_LEN)
    with bfloat16_pair(folder, root / "run") as made:
        yield made


def test_nothing_is_cut_when_nothing_was_learned(pair: Pair, tmp_path: Path) -> None:
    """The one number that decides whether verification works in bfloat16."""
    run = Run(pair, tmp_path)
    state = run.step(0, train=lambda finished: None)
    assert len(torch.cat(run.token_ops)) > 100
    assert state.metrics["verification/acceptance_rate"] == 1.0
    assert (tmp_path / "cuts.jsonl").read_text() == ""


def test_packing_alone_stays_below_the_segment_threshold(pair: Pair, tmp_path: Path) -> None:
    run = Run(pair, tmp_path)
    state = StepState(step=1, policy_version=0)
    state.finished, _ = run.rollouter.collect(0)
    settings = VerificationConfig()
    PackingNoise(scorer=scorer_of(pair), settings=settings, ranks=Ranks())(state)
    assert 0.0 <= state.metrics["mismatch/packing_ops_mean"] < settings.segment_threshold
