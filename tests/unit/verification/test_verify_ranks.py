"""The verify phase on two ranks is that of one rank: metrics, percentiles, cuts, audit log."""

import json

import pytest
from unit.verification import verify_worker
from unit.verification.verify_worker import verify

from rollverify.metrics.json_lines import CUTS_FILE
from rollverify.metrics.names import is_declared


@pytest.mark.distributed
def test_two_ranks_verify_as_one_does(run_gloo_workers, tmp_path):
    folder = run_gloo_workers(verify_worker.main, 2)
    alone = verify(0, 1, None, tmp_path)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    assert ranks[0]["metrics"] == pytest.approx(alone["metrics"], abs=1e-6)
    assert ranks[0]["left"] | ranks[1]["left"] == alone["left"]
    assert ranks[0]["num_rows"] == ranks[1]["num_rows"]
    assert (folder / CUTS_FILE).read_text() == (tmp_path / CUTS_FILE).read_text()


def test_the_case_exercises_every_stage(tmp_path):
    """Else the comparison above would compare nothing."""
    metrics = verify(0, 1, None, tmp_path)["metrics"]
    assert all(is_declared(key) for key in metrics)
    for key in ("filter/groups_discarded", "verification/cuts_segment", "verification/cuts_token"):
        assert metrics[key] >= 1, key
    assert 0.2 < metrics["verification/acceptance_rate"] < 0.9
    assert metrics["ops/unfinished_token_p95"] < metrics["ops/unfinished_token_max"]
    assert len({value for key, value in metrics.items() if "_age_" in key}) >= 8
