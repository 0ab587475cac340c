"""Weights of a model sharded over two ranks arrive in each rank's own engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.engine_pair import PARITY_TOLERANCE
from support.tiny_models import Reference, tiny_folder

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]


def test_each_rank_s_engine_equals_transformers_after_each_sync(
    tmp_path: Path, run_ranks: Callable[..., None]
) -> None:
    """WS01, WS05 on two ranks, tied head; the ranks sample different prompts."""
    tiny_folder(tmp_path / "model")
    run_ranks("sync_worker.py", str(tmp_path), timeout_s=150)
    ranks = [torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(2)]
    assert ranks[0][0]["prompts"] != ranks[1][0]["prompts"]
    for version in range(3):
        reference = Reference(tmp_path / f"version_{version}")
        for result in (rank[version] for rank in ranks):
            assert result["policy_version"] == version
            assert result["parity_abs_max"] <= PARITY_TOLERANCE
            rows = zip(result["prompts"], result["tokens"], result["logprobs"], strict=True)
            for prompt, tokens, logprobs in rows:
                want = reference.logprobs(prompt + tokens)[-len(tokens) :]
                got = torch.tensor(logprobs, dtype=torch.float64)
                torch.testing.assert_close(got, want, atol=PARITY_TOLERANCE, rtol=0.0)
    first, last = (Reference(tmp_path / f"version_{v}").model.state_dict() for v in (0, 2))
    moved = [(first[name] - last[name]).abs().max().item() for name in first]
    assert min(moved) > 1e-3  # every weight had really changed
