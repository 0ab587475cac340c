"""Routers that replay ids, on their own: worked values, gradients, and what is refused.

Scores are exp of the logits; the gate of the router under test is the identity, so that its input
is its logits.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchtitan.config.override import derive
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from torchtitan_ext.routing_replay import (
    ReplayRouter,
    RoutingReplay,
    RoutingReplayError,
)

LOGITS = [2.0, 1.9, 0.5, -1.0]
NUM_EXPERTS = len(LOGITS)
# exp of the logits: 7.389056, 6.685894, 1.648721, 0.367879; their sum is 16.091551.


def spread_ids(num_rows: int, num_layers: int, top_k: int, num_experts: int) -> torch.Tensor:
    """[T, L, K] uint8: tokens go round the experts."""
    ids = torch.arange(num_rows * top_k).view(num_rows, 1, top_k) % num_experts
    return ids.byte().repeat(1, num_layers, 1)


def settings(num_experts: int = NUM_EXPERTS, **changes: Any) -> TokenChoiceTopKRouter.Config:
    values = {"top_k": 2, "score_func": "softmax", "route_norm": True} | changes
    gate = Linear.Config(in_features=num_experts, out_features=num_experts)
    return TokenChoiceTopKRouter.Config(num_experts=num_experts, gate=gate, **values)


def with_identity(router: Any) -> Any:
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(router.num_experts))
    return router


def replay_router_of(**changes: Any) -> ReplayRouter:
    return with_identity(derive(settings(**changes), ReplayRouter.Config).build())


class Model(nn.Module):
    """Three layers, the first one dense; the others' routers see the input itself."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Identity()})
        for name in ("2", "1"):  # Found by their index, whatever their order.
            self.layers[name] = nn.ModuleDict({"router": replay_router_of(**changes)})

    def forward(self, logits: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [self.layers[name]["router"](logits[None]) for name in ("1", "2")]


def routing(*rows: list[list[int]]) -> Tensor:
    """[T, 3, 2] with 9, which is no expert, in the dense layer."""
    return torch.tensor([[[9, 9], *layers] for layers in rows], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "ids", "want"),
    [
        # 7.389056 / (7.389056 + 6.685894)
        ({}, None, (0.524979, 0.475021)),
        # 7.389056 / (7.389056 + 1.648721)
        ({}, [0, 2], (0.817574, 0.182426)),
        # 7.389056 / 16.091551, 1.648721 / 16.091551
        ({"route_norm": False}, [0, 2], (0.459189, 0.102459)),
        # 1 / (1 + exp(-2)) = 0.880797, 1 / (1 + exp(-0.5)) = 0.622459, of their sum 1.503256
        ({"score_func": "sigmoid"}, [0, 2], (0.585926, 0.414074)),
        # The order is that of the ids, the scale comes last: 2.5 x the second case.
        ({"route_scale": 2.5}, [2, 0], (0.456065, 2.043935)),
    ],
)
def test_replayed_weights_have_the_worked_values(
    changes: dict[str, Any], ids: list[int] | None, want: tuple[float, float]
) -> None:
    router = replay_router_of(**changes)
    router.replayed_ids = None if ids is None else torch.tensor([[ids]])
    weights, used, scores = router(torch.tensor([[LOGITS]]))
    assert used.tolist() == [[ids or [0, 1]]] and scores.shape == (1, 1, NUM_EXPERTS)
    # The values are written with 6 digits.
    torch.testing.assert_close(weights[0, 0], torch.tensor(want), atol=2e-6, rtol=0.0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"route_norm": False}, {"score_func": "sigmoid", "route_scale": 2.5, "top_k": 3}],
)
def test_without_ids_no_bit_differs_from_torchtitan(changes: dict[str, Any]) -> None:
    x = torch.randn(1, 50, 8, generator=torch.Generator().manual_seed(0))
    bias = torch.linspace(0, 0.3, 8)
    theirs = with_identity(settings(num_experts=8, **changes).build())
    ours = replay_router_of(num_experts=8, **changes)
    for one, other in zip(ours(x, bias), theirs(x, bias), strict=True):
        assert torch.equal(one, other)
    ours.replayed_ids = theirs(x, bias)[1]
    for one, other in zip(ours(x, bias), theirs(x, bias), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("route_norm", [True, False])
def test_gate_gradient_equals_finite_differences(route_norm: bool) -> None:
    """In float64; ids that the router would not choose."""
    router = replay_router_of(route_norm=route_norm).double()
    router.replayed_ids = torch.tensor([[[0, 2], [3, 1]]])
    x = torch.tensor([[LOGITS, [0.3, -0.2, 0.9, 0.1]]], dtype=torch.float64)

    def weights(gate: Tensor) -> Tensor:
        return torch.func.functional_call(router, {"gate.weight": gate}, (x,))[0]

    gate = torch.eye(NUM_EXPERTS, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(weights, (gate,))
    (gradient,) = torch.autograd.grad(weights(gate)[0, 0, 0], gate)
    # Without renormalisation every expert's logit is in the denominator.
    assert (gradient.abs().sum(1) > 1e-3).tolist() == [True, not route_norm, True, not route_norm]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (spread_ids(6, 3, 2, 4), "row has 7 tokens and 6 rows of routing"),
        (spread_ids(8, 3, 2, 4), "row has 7 tokens and 8 rows of routing"),
        (spread_ids(7, 2, 2, 4), "routing has 2 layers with 2 experts per token, the model 3 with"),
        (spread_ids(7, 3, 3, 4), "routing has 3 layers with 3 experts per token, the model 3 with"),
        (spread_ids(7, 3, 2, 4).float(), r"must be uint8 or int16 .* got torch.float32 \[7, 3, 2"),
        (routing(*[[[0, 1], [2, 3]]] * 6, [[0, 1], [4, 0]]), "layer 2, token 6 names expert 4;"),
        (routing(*[[[0, 1], [2, 3]]] * 7).short() - 1, "layer 1, token 0 names expert -1; the mod"),
        (routing(*[[[0, 1], [2, 3]]] * 6, [[1, 1], [2, 3]]), "layer 1, token 6 names expert 1 twi"),
    ],
)
def test_routing_that_does_not_fit_is_refused(ids: Tensor, message: str) -> None:
    """RR01: a missing or misaligned row is an error, never a default expert."""
    model = Model()
    replay = RoutingReplay(model, "cpu")
    with pytest.raises(RoutingReplayError, match=message), replay.replayed(ids, 7, watched=False):
        pass
    assert all(router.replayed_ids is None for router in replay.routers.values())


def test_a_model_without_routers_takes_no_routing() -> None:
    dense = nn.ModuleDict({"layers": nn.ModuleList([nn.Identity()])})
    replay = RoutingReplay(dense, "cpu")
    ids = spread_ids(7, 1, 2, 4)
    message = "the model has no mixture-of-experts layers"
    with pytest.raises(RoutingReplayError, match=message), replay.replayed(ids, 7, watched=True):
        pass
    with replay.replayed(None, 7, watched=True):
        replay.count()
        with pytest.raises(RoutingReplayError, match=message):
            replay.own_choice()
    assert replay.layers == () and replay.take_stats() is None


def test_each_layer_is_given_its_own_ids_until_the_end() -> None:
    model = Model()
    replay = RoutingReplay(model, "cpu")
    ids = routing([[0, 2], [1, 3]], [[3, 0], [2, 1]])
    x = torch.tensor([LOGITS, LOGITS])
    assert replay.layers == (1, 2)
    with replay.replayed(ids, 2, watched=False):
        used = [one[1][0].tolist() for one in model(x)]
    assert used == [[[0, 2], [3, 0]], [[1, 3], [2, 1]]]
    with pytest.raises(ZeroDivisionError), replay.replayed(ids, 2, watched=True):
        model(x)
        raise ZeroDivisionError
    assert [one[1][0].tolist() for one in model(x)] == [[[0, 1], [0, 1]]] * 2
    for router in replay.routers.values():
        assert router.replayed_ids is None and router.own_ids is None and not router.keeps_own_ids


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_expert_300_stays_300(dtype: torch.dtype) -> None:
    """RR09: 300 in uint8 would be 44."""
    model = Model(num_experts=512)
    ids = torch.tensor([[[0, 0], [300, 7], [44, 511]]], dtype=dtype)
    with RoutingReplay(model, "cpu").replayed(ids, 1, watched=False):
        used = [one[1][0].tolist() for one in model(torch.zeros(1, 512))]
    assert used == [[[300, 7]], [[44, 511]]]


def test_small_ids_fit_a_model_with_many_experts() -> None:
    """A comparison of uint8 with 300 must not become one with 44."""
    model = Model(num_experts=300)
    ids = torch.tensor([[[0, 0], [45, 200], [44, 255]]], dtype=torch.uint8)
    with RoutingReplay(model, "cpu").replayed(ids, 1, watched=False):
        assert model(torch.zeros(1, 300))[0][1][0].tolist() == [[45, 200]]


def test_own_choice_and_stats_have_the_worked_values() -> None:
    """Own choices {0, 1} and {2, 3}. Layer 1 changes the second token only, layer 2 both."""
    model = Model()
    replay = RoutingReplay(model, "cpu")
    x = torch.tensor([LOGITS, [0.0, -1.0, 3.0, 2.0]])
    with replay.replayed(routing([[1, 0], [0, 2]], [[2, 1], [1, 0]]), 2, watched=True):
        model(x)
        own = replay.own_choice()
        replay.count()
    with replay.replayed(None, 2, watched=True):
        model(x)
        replay.count()
    assert own.dtype == torch.int16
    assert own.sort(-1).values.tolist() == [[[0, 0], [0, 1], [0, 1]], [[0, 0], [2, 3], [2, 3]]]
    stats = replay.take_stats()
    assert (stats.num_tokens, stats.layers, stats.changed_L.tolist()) == (4, (1, 2), [1, 2])
    # Replayed 0, 1, 1, 2 and 0, 0, 1, 2, and each time the own choice, one token per expert.
    assert stats.load_LE.tolist() == [[2, 3, 2, 1], [3, 2, 2, 1]]
    again = replay.take_stats()
    assert again.num_tokens == 0 and not again.load_LE.any() and not again.changed_L.any()
