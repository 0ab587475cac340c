"""Parameters of experts count as written only if every expert came."""

from rollverify.engine.weight_sync import fully_written

LAYER = "model.layers.0.mlp.experts"
W13, W2 = f"{LAYER}.routed_experts.w13_weight", f"{LAYER}.routed_experts.w2_weight"
SIZES = {W13: 3, W2: 3, "model.norm.weight": 64}
REPORTED = {f"{LAYER}.w13_weight", f"{LAYER}.w2_weight", "model.norm.weight"}
"""As the engine's loader names them."""


def sent(experts: range, *projections: str) -> list[str]:
    return [f"{LAYER}.{i}.{projection}.weight" for i in experts for projection in projections]


ALL = [*sent(range(3), "gate_proj", "up_proj", "down_proj"), "model.norm.weight"]


def test_names_are_the_engines_own() -> None:
    assert fully_written(REPORTED, ALL, SIZES) == set(SIZES)


def test_a_missing_expert_leaves_its_parameter_out() -> None:
    """Expert 2 of 3 comes without its down projection."""
    some = [name for name in ALL if name != f"{LAYER}.2.down_proj.weight"]
    assert fully_written(REPORTED, some, SIZES) == {W13, "model.norm.weight"}


def test_gate_without_up_is_not_written_in_full() -> None:
    some = sent(range(3), "gate_proj", "down_proj")
    assert fully_written(REPORTED, some, SIZES) == {W2, "model.norm.weight"}


def test_experts_in_one_tensor_are_written_in_full() -> None:
    fused = [f"{LAYER}.gate_up_proj", f"{LAYER}.down_proj"]
    assert fully_written(REPORTED, fused, SIZES) == set(SIZES)


def test_other_parameters_are_passed_on() -> None:
    assert fully_written({"a", "b"}, ["a", "b"], {"a": 1, "b": 2}) == {"a", "b"}
