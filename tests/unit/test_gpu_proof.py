"""The proof's judgements, table and file: every check is run, what failed is said, all is kept."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "scripts" / "gpu_proof.py"


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, set for a GPU."""
    monkeypatch.delenv("ROLLVERIFY_DEVICE", raising=False)
    spec = importlib.util.spec_from_file_location("gpu_proof", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_failed_check_does_not_hide_the_others(proof, tmp_path, capsys) -> None:
    def fail():
        raise proof.CheckError("3 responses were cut", {"cuts": 3})

    output = tmp_path / "proof.json"
    checks = [("first", fail), ("broken", lambda: 1 // 0), ("last", lambda: {"share": 0.123456})]
    assert proof.prove(output, iter(checks)) == 1
    found = json.loads(output.read_text())
    assert found["first"]["ok"] is False and found["first"]["cuts"] == 3
    assert found["first"]["error"].endswith("3 responses were cut")
    assert found["broken"]["error"].startswith("ZeroDivisionError")
    assert found["last"]["ok"] is True and found["last"]["share"] == 0.123456
    *table, one, two, last = capsys.readouterr().out.splitlines()
    assert any("0.1235" in line for line in table)
    assert one == "FAILED first: CheckError: 3 responses were cut" and two.startswith("FAILED br")
    assert last == f"{output}: 1 of 3 checks passed"


def test_what_was_found_is_kept_when_the_next_check_is_interrupted(proof, tmp_path) -> None:
    def interrupt():
        raise KeyboardInterrupt

    output = tmp_path / "proof.json"
    with pytest.raises(KeyboardInterrupt):
        proof.prove(output, iter([("first", lambda: {"a": 1}), ("second", interrupt)]))
    assert json.loads(output.read_text())["first"]["a"] == 1


def test_all_checks_passed_is_exit_code_0(proof, tmp_path, capsys, monkeypatch) -> None:
    assert proof.prove(tmp_path / "proof.json", iter([("only", dict)])) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("1 of 1 checks passed")
    monkeypatch.setattr(proof, "ON_GPU", False)
    assert proof.prove(tmp_path / "proof.json", iter([("only", dict)])) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("nothing about a GPU")


def test_without_the_gpu_to_be_proved_nothing_else_is_tried(proof, tmp_path, monkeypatch) -> None:
    """A driver that is too old must not turn into a proof on the CPU."""
    monkeypatch.setattr(proof.torch.cuda, "is_available", lambda: False)
    assert [name for name, _ in proof.checks(tmp_path)] == ["machine"]
    monkeypatch.setattr(proof, "ON_GPU", False)
    assert len(list(proof.checks(tmp_path))) == 7


@pytest.mark.parametrize(
    ("driver", "error"), [("570.86.10", "driver 570.86.10, CUDA 13 needs"), ("580.65", "no GPU")]
)
def test_an_old_driver_is_named(proof, monkeypatch, driver: str, error: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    monkeypatch.setattr(proof, "run", lambda *_: f"{driver}\n")
    monkeypatch.setattr(proof.torch.cuda, "is_available", lambda: False)
    with pytest.raises(proof.CheckError, match=error) as raised:
        proof.machine()
    assert raised.value.found["driver"] == driver


def test_a_command_that_fails_gives_its_last_line(proof) -> None:
    with pytest.raises(proof.CheckError, match="ended with 3: the reason"):
        proof.run(["sh", "-c", "echo more; echo the reason; exit 3"], 10)


STILL = {
    "mismatch/ops_mean": 0.001,
    "mismatch/packing_ops_mean": 0.002,
    "mismatch/packing_ops_max": 0.03,
    "ops/unfinished_segment_max": 0.004,
    "sync/parity_abs_max": 0.1,
    "verification/tokens_checked": 50.0,
}


def test_a_cut_or_nothing_to_cut_at_learning_rate_0_is_a_failure(proof) -> None:
    rows = [STILL, STILL | {"mismatch/packing_ops_mean": 0.005}]
    found = proof.judged_still(rows, [])
    assert found["mismatch/packing_ops_mean"] == 0.005 and found["tokens_checked"] == 100.0
    with pytest.raises(proof.CheckError, match="1 responses were cut"):
        proof.judged_still(rows, ["{}"])
    with pytest.raises(proof.CheckError, match="nothing was verified"):
        proof.judged_still([STILL | {"verification/tokens_checked": 0.0}], [])


def row(step: int, **changes: float) -> dict[str, float]:
    fates = ("trained", "cut", "discarded", "filtered", "dropped", "held")
    tokens = {f"tokens/{fate}": 1.0 for fate in fates} | {"tokens/generated": 6.0}
    names = {"reward": "reward/mean", "rate": "train/tokens_per_s", "lost": "tokens/held"}
    known = {names[key]: value for key, value in changes.items()}
    return {"step": step, "reward/mean": 0.5, "train/tokens_per_s": 1.0, **tokens} | known


def test_a_resumed_run_must_be_the_run_that_was_not_killed(proof) -> None:
    whole = [row(1), row(2)]
    same = proof.judged_same(whole, [row(1), row(2, rate=7.0)], must_repeat=True)
    assert same["metrics_apart"] == [] and same["reward_apart"] == 0.0
    near, far = [row(1), row(2, reward=0.6)], [row(1), row(2, reward=0.71)]
    with pytest.raises(proof.CheckError, match=r"1 metrics differ, reward/mean among"):
        proof.judged_same(whole, near, must_repeat=True)
    assert proof.judged_same(whole, near, must_repeat=False)["metrics_apart"] == ["reward/mean"]
    with pytest.raises(proof.CheckError, match=r"rewards differ by 0\.21 > 0\.2"):
        proof.judged_same(whole, far, must_repeat=False)
    with pytest.raises(proof.CheckError, match=r"steps after the resume: \[1\]"):
        proof.judged_same(whole, [row(1)], must_repeat=False)
    with pytest.raises(proof.CheckError, match="step 2 lost tokens"):
        proof.judged_same(whole, [row(1), row(2, lost=0.0)], must_repeat=False)


def test_rates_by_hand(proof) -> None:
    """1000 weights of 2 bytes, 20 steps in 4 s: 10,000 bytes/s; 50 tokens scored twice in 5 s."""
    metrics = {
        "rollout/num_tokens": 400.0,
        "rollout/tokens_per_s": 100.0,
        "rollout/decode_steps": 20.0,
        "verification/tokens_checked": 50.0,
        "verification/scoring_s": 5.0,
        "train/tokens_per_s": 30.0,
    }
    found = proof.rates(metrics, 1000, (1e5, 1e6))
    assert found["decoding_bandwidth_frac"] == pytest.approx(0.1)
    assert found["scoring_tokens_per_s"] == pytest.approx(20.0)
    assert found["scoring_flops_frac"] == pytest.approx(2 * 1000 * 20 / 1e6)
    assert found["training_flops_frac"] == pytest.approx(6 * 1000 * 30 / 1e6)


@pytest.mark.parametrize("first", ["GiB", "GiB of 80.0"])
def test_the_plan_is_read_and_no_phase_may_take_more(proof, first: str) -> None:
    names = ("rollout", "weight sync", "training", "optimizer step")
    table = f"  {first:<20}" + "".join(f"{name:>16}" for name in names)
    table += f"\n  {'weights':<20}" + f"{1.0:16.2f}" * 4
    table += f"\n  {'in all':<20}" + "".join(f"{size:16.2f}" for size in (78.1, 3.0, 40.5, 9.0))
    planned = proof.planned_gib(f"1,000 parameters\n{table}\n")
    assert planned == dict(zip(names, (78.1, 3.0, 40.5, 9.0), strict=True))
    proof.check_memory({"rollout": 78.0, "train": 40.0, "sync": 70.0}, planned, {})
    with pytest.raises(proof.CheckError, match=r"verify took 41\.0 of 40\.5 GiB planned"):
        proof.check_memory({"verify": 41.0}, planned, {})
