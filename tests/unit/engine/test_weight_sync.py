"""Weight transfer: order of the steps, names, the probe, and what is left after a failure."""

from collections.abc import Iterator

import pytest
import torch
from support.fakes import FakeEngine
from torch import Tensor

from rollverify.engine.engine import GenerationRequest
from rollverify.engine.weight_sync import WeightSync
from rollverify.errors import RolloutError, StaleWeightsError, WeightSyncError

NAN = float("nan")


class Parts:
    """A weight sync between a fake engine and a trainer of two parameters."""

    def __init__(
        self, *, parameters: tuple[str, ...] = ("a", "b"), tolerance: float = 1e-4
    ) -> None:
        self.events: list[str] = []
        self.engine = FakeEngine(events=self.events, parameters=parameters)
        self.weights = {name: torch.ones(2) for name in parameters}
        self.names = list(parameters)
        self.scores = [-0.5, -0.5]
        self.sync = WeightSync(
            engine=self.engine,
            parameters=self.stream,
            trainer_score=self.score,
            probe_ids=[3, 10, 17],
            parity_tolerance=tolerance,
        )

    def stream(self):
        for name in self.names:
            self.events.append(f"send {name}")
            yield name, self.weights.get(name, torch.zeros(1))

    def score(self, token_ids: list[int]) -> list[float]:
        assert token_ids == [3, 10, 17]
        self.events.append("trainer score")
        return self.scores


def test_weights_are_streamed_cache_cleared_and_then_probed():
    """WS09: loading is lazy, one parameter at a time, and the cache goes before the first probe."""
    parts = Parts()
    parts.sync.push(1)
    transfer = ["wake weights", "load", "send a", "send b", "wake kv_cache", "clear"]
    assert parts.events == [*transfer, "trainer score", "engine score"]
    assert torch.equal(parts.engine.weights["a"], torch.ones(2))
    assert parts.sync.policy_version == 1
    assert parts.sync.push_s > 0


def test_the_first_push_sets_the_tolerance(caplog):
    """Three times the first gap of 0.02 nats, at least 1e-4; half a nat is another model."""
    parts = Parts(tolerance=0.0)
    parts.scores = [-0.5, -0.48]
    with caplog.at_level("INFO"):
        parts.sync.push(0)
    assert parts.sync.parity_tolerance == pytest.approx(0.06)
    assert "differ by 0.02 nats at most; more than 0.06 will stop the run" in caplog.text
    parts.scores = [-0.5, -0.441]
    parts.sync.push(1)
    assert parts.sync.parity_tolerance == pytest.approx(0.06)
    parts.scores = [-0.5, -0.439]
    with pytest.raises(StaleWeightsError, match=r"0\.061 nats .*tolerance 0\.06\)"):
        parts.sync.push(2)
    equal, other = Parts(tolerance=0.0), Parts(tolerance=0.0)
    equal.sync.push(0)
    assert equal.sync.parity_tolerance == 1e-4
    other.scores = [-0.5, -1.01]
    with pytest.raises(StaleWeightsError, match=r"tolerance 0\.5\)"):
        other.sync.push(0)


def test_the_version_is_unknown_until_the_push_is_proved():
    parts = Parts()
    parts.sync.push(1)
    seen: list[int | None] = []
    parts.engine.score = lambda ids: seen.append(parts.sync.policy_version) or [-0.5, -0.5]
    parts.sync.push(2)
    assert seen == [None]
    assert parts.sync.policy_version == 2


def test_each_push_sends_the_weights_of_that_moment():
    parts = Parts()
    parts.sync.push(1)
    parts.weights["b"] = torch.full((2,), 7.0)
    parts.sync.push(2)
    assert parts.engine.weights["b"].tolist() == [7.0, 7.0]
    assert parts.engine.weights["a"].tolist() == [1.0, 1.0]


def test_weights_are_not_loaded_into_a_running_engine():
    """WS09: an update during a running step is an error."""
    parts = Parts()
    parts.engine.add_request(
        GenerationRequest(request_id="r", token_ids=(1,), max_tokens=2, seed=0, temperature=1.0)
    )
    with pytest.raises(RolloutError, match="while requests are running"):
        parts.sync.push(1)
    assert parts.events == ["wake weights"]


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], ["a", "c"]])
def test_a_changed_set_of_names_is_refused_and_the_difference_named(names):
    parts = Parts()
    parts.sync.push(1)
    parts.names = names
    with pytest.raises(WeightSyncError, match="changed between transfers") as caught:
        parts.sync.push(2)
    difference = sorted({"a", "b"} ^ set(names))
    assert str(caught.value).endswith(", ".join(difference))


def test_a_name_sent_twice_is_refused():
    parts = Parts()
    parts.names = ["a", "b", "a"]
    with pytest.raises(WeightSyncError, match=r"sent twice: a$"):
        parts.sync.push(0)


def test_an_engine_parameter_that_got_no_weight_is_named():
    """WS07: an engine parameter that no name reaches would keep its old values."""
    parts = Parts(parameters=("a", "b", "lm_head"))
    parts.names = ["a", "b"]
    with pytest.raises(WeightSyncError, match=r"1 engine parameters got no weight: lm_head;"):
        parts.sync.push(0)


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_nan_on_either_side_of_the_probe_is_stale(side):
    parts = Parts()
    parts.engine.score = lambda ids: [-0.5, NAN if side == "engine" else -0.5]
    parts.scores = [-0.5, NAN if side == "trainer" else -0.5]
    with pytest.raises(StaleWeightsError, match="nan nats at probe token 2"):
        parts.sync.push(5)
    assert parts.sync.policy_version is None


@pytest.mark.parametrize(("gap", "is_stale"), [(0.25, False), (0.2500001, True), (-0.3, True)])
def test_the_tolerance_is_inclusive(gap, is_stale):
    parts = Parts(tolerance=0.25)
    parts.scores = [-0.5, -0.5 + gap]
    if is_stale:
        with pytest.raises(StaleWeightsError, match=r"policy 4 .* at probe token 2 \(tolerance"):
            parts.sync.push(4)
    else:
        parts.sync.push(4)
    assert parts.sync.parity_abs_max == abs((-0.5 + gap) + 0.5)


def test_a_failed_push_leaves_no_version_and_the_next_one_heals_it():
    """WS11: after an error nothing claims to hold a version, and nothing stays blocked."""
    parts = Parts()
    parts.sync.push(1)
    parts.scores = [-0.5, -9.0]
    with pytest.raises(StaleWeightsError):
        parts.sync.push(2)
    assert parts.sync.policy_version is None
    parts.scores = [-0.5, -0.5]
    parts.sync.push(2)
    assert parts.sync.policy_version == 2


def test_an_error_inside_the_transfer_leaves_no_version():
    """WS11: the trainer's stream breaks half way."""

    def broken():
        yield "a", torch.ones(2)
        raise RuntimeError("gather failed")

    parts = Parts()
    parts.sync.push(1)
    parts.sync.parameters = broken
    with pytest.raises(RuntimeError, match="gather failed"):
        parts.sync.push(2)
    assert parts.sync.policy_version is None
    assert parts.events.count("clear") == 1  # The second push never got that far.


def test_a_weight_that_the_engine_refuses_is_named():
    """WS07: an unknown name, or a shape that does not fit."""

    def refuse(named: Iterator[tuple[str, Tensor]]) -> set[str]:
        for name, _ in named:
            if name == "b":
                raise KeyError("no parameter of that name\nand more")
        return set()

    parts = Parts()
    parts.engine.load_weights = refuse
    with pytest.raises(WeightSyncError, match="weight 'b' could not be loaded") as caught:
        parts.sync.push(0)
    assert "\n" not in str(caught.value)
    assert parts.sync.policy_version is None


def test_a_probe_needs_a_token_to_score():
    def nothing() -> "list[tuple[str, Tensor]]":
        return []

    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        WeightSync(
            engine=FakeEngine(),
            parameters=lambda: iter(nothing()),
            trainer_score=lambda ids: [],
            probe_ids=[1],
            parity_tolerance=1.0,
        )
