"""Signs of life: who was waited for, and a signal that reached another rank."""

import json

import pytest
from unit.launch import pulse_worker


@pytest.mark.distributed
def test_a_silent_rank_is_named_with_its_phase_and_a_signal_reaches_all(run_gloo_workers):
    folder = run_gloo_workers(pulse_worker.main, 2)
    (told, own), (_, other) = (json.loads((folder / f"{r}.json").read_text()) for r in range(2))
    assert told == (
        "the others have waited too long (parallelism.timeout_s) for 1 of 2 ranks: "
        "rank 1 is in verify of step 3"
    )
    assert own == other == 15
