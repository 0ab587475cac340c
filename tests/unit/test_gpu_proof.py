"""The proof's table and file: every check is run, what failed is said, what was found is kept."""

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "scripts" / "gpu_proof.py"


@pytest.fixture(scope="module")
def proof():
    spec = importlib.util.spec_from_file_location("gpu_proof", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_failed_check_does_not_hide_the_others(proof, tmp_path, capsys) -> None:
    def fail():
        raise proof.CheckError("3 responses were cut")

    output = tmp_path / "proof.json"
    checks = [("first", fail), ("second", lambda: {"share": 0.123456})]
    assert proof.prove(output, iter(checks)) == 1
    found = json.loads(output.read_text())
    assert found["first"]["ok"] is False and found["first"]["error"].endswith(
        "3 responses were cut"
    )
    assert found["second"]["ok"] is True and found["second"]["share"] == 0.123456
    out = capsys.readouterr().out
    assert "0.1235" in out and out.splitlines()[-1] == f"{output}: first failed"


def test_all_checks_passed_is_exit_code_0(proof, tmp_path, capsys) -> None:
    assert proof.prove(tmp_path / "proof.json", iter([("only", dict)])) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("every check passed")


def test_a_command_that_fails_gives_its_last_line(proof) -> None:
    with pytest.raises(proof.CheckError, match="ended with 3: the reason"):
        proof.run(["sh", "-c", "echo more; echo the reason; exit 3"], 10)
