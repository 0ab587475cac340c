"""An engine over two ranks gives what one rank's own engine gives, and finds a member that differs.

The sum of two halves rounds otherwise than the whole: log-probs may differ by float32's rounding.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.shared_engine_worker import PAUSE_AFTER, use
from support.engine_pair import PARITY_TOLERANCE, tiny_engine
from support.moe_models import moe_folder
from support.tiny_models import VOCAB_SIZE, tiny_folder

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]

NAMES = ("dense", "experts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_ranks: Callable[..., None]) -> Path:
    """Where both ranks left what they saw; the vocabulary of the dense model divides badly."""
    folder = tmp_path_factory.mktemp("shared")
    for seed, suffix in enumerate(("", "-2")):
        tiny_folder(folder / f"dense{suffix}", seed=seed, max_position_embeddings=512)
        moe_folder(folder / f"experts{suffix}", seed=seed, vocab_size=VOCAB_SIZE)
    for name in NAMES:
        run_ranks("shared_engine_worker.py", str(folder / name), timeout_s=120)
    return folder


def result(folder: Path, name: str, rank: int) -> dict[str, Any]:
    return torch.load(folder / f"{name}-{rank}.pt", weights_only=False)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_experts_are_those_of_one_rank(folder: Path, name: str) -> None:
    alone = tiny_engine(folder / name, record_routing=name == "experts")
    want = use(alone, folder / name)
    alone.close()
    for rank in range(2):
        for ours, theirs in zip(result(folder, name, rank)["use"], want, strict=True):
            assert ours["unwritten"] == theirs["unwritten"] == set()
            assert ours["score"] == pytest.approx(theirs["score"], abs=PARITY_TOLERANCE)
            assert ours["done"].keys() == theirs["done"].keys()
            for key, completion in theirs["done"].items():
                one = ours["done"][key]
                assert one.token_ids == completion.token_ids
                assert one.logprobs == pytest.approx(completion.logprobs, abs=PARITY_TOLERANCE)
                if name == "experts":
                    assert torch.equal(one.routed_experts, completion.routed_experts)


@pytest.mark.parametrize("name", NAMES)
def test_members_hold_the_same_bit_for_bit_and_pause_where_they_should(
    folder: Path, name: str
) -> None:
    first, second = (result(folder, name, rank)["use"] for rank in range(2))
    for ours, theirs in zip(first, second, strict=True):
        for key, one in ours["done"].items():
            assert one.logprobs == theirs["done"][key].logprobs
        paused = [len(c.token_ids) for key, c in ours["done"].items() if "paused" in key]
        assert max(paused) == PAUSE_AFTER
    # Other weights gave other tokens.
    assert first[0]["score"] != pytest.approx(first[1]["score"], abs=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_a_member_that_got_the_part_of_another_is_found_and_named(folder: Path, name: str) -> None:
    told = [result(folder, name, rank)["broken_load"] for rank in range(2)]
    assert told[0] == ""  # The first half is its own.
    assert "1 of " in told[1] and "model.layers.0.self_attn.o_proj.weight" in told[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_member_with_another_request_is_found_before_it_waits_for_good(
    folder: Path, name: str
) -> None:
    for rank in range(2):
        told = result(folder, name, rank)["other_request"]
        assert told.startswith("rank 1 (at step) went another way than rank 0 (at step)")
