"""Several machines must see one run folder and have the same settings."""

import json

import pytest
from unit.checkpoint import shared_folder_worker


@pytest.mark.distributed
def test_a_folder_that_a_machine_does_not_see_and_other_settings_are_refused(run_gloo_workers):
    folder = run_gloo_workers(shared_folder_worker.main, 2)
    for rank in range(2):
        seen, left = json.loads((folder / f"{rank}.json").read_text())
        assert seen["one machine"] == ["", "", ""]
        shared, apart, other = seen["two machines"]
        assert shared == "" and left == []
        assert apart.startswith("rank 1 on ") and "does not see" in apart
        assert "--run.output-dir" in apart and "\n" not in apart
        assert "was started with other settings than rank 0" in other and "(run.seed)" in other
