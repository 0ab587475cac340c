"""Replays recorded expert ids in a mixture-of-experts model, and counts what the routers would do.

Weights come from the router's current scores, so the gate keeps its gradient. Dimensions: T tokens
of a row, L layers, K experts per token, E experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.models.common.moe import TokenChoiceTopKRouter

_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)
_NO_ROUTERS = "the model has no mixture-of-experts layers"


class RoutingReplayError(ValueError):
    """Recorded expert ids that do not fit the row or the model."""


class ReplayRouter(TokenChoiceTopKRouter):
    """torchtitan's router; while it is given ids, tokens go to these instead of its own choice."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """The settings of `TokenChoiceTopKRouter`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.replayed_ids: Tensor | None = None
        """[1, T, K] int64; None leaves the choice to the router."""

        self.keeps_own_ids = False
        self.own_ids: Tensor | None = None
        """[1, T, K] int64 of the last forward pass while `keeps_own_ids`."""

    def forward(
        self, x_BLD: Tensor, expert_bias_E: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weights [1, T, K] float32, ids [1, T, K], scores [1, T, E] of x, [1, T, D].

        With ids, g_k = s_k / sum of s over the replayed ids; the bias moves the own choice only.
        """
        # The same operations with and without ids: recomputation in backward repeats them too.
        weights_BLK, own_ids_BLK, scores_BLE = super().forward(x_BLD, expert_bias_E)
        if self.keeps_own_ids:
            self.own_ids = own_ids_BLK
        if self.replayed_ids is None:
            return weights_BLK, own_ids_BLK, scores_BLE
        ids_BLK = self.replayed_ids
        if isinstance(scores_BLE, DTensor):  # Tensor parallel: every rank has the row's ids.
            mesh, placements = scores_BLE.device_mesh, scores_BLE.placements
            ids_BLK = distribute_tensor(ids_BLK, mesh, placements, src_data_rank=None)
        weights_BLK = scores_BLE.gather(dim=-1, index=ids_BLK)
        if self.route_norm:
            weights_BLK = weights_BLK / (weights_BLK.sum(dim=-1, keepdim=True) + 1e-20)
        return weights_BLK * self.route_scale, ids_BLK, scores_BLE


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingStats:
    """What this rank's routers did in the forward passes with gradient, filler tokens included."""

    num_tokens: int

    layers: tuple[int, ...]  # absolute indices of the L layers with a router
    changed_L: Tensor  # int64 tokens whose own set of experts is not the replayed one
    load_LE: Tensor  # int64 tokens given to each expert; a row adds up to K * num_tokens


class RoutingReplay:
    """Gives ids to the routers of one model for one forward pass and its backward."""

    def __init__(self, model: torch.nn.Module, device: torch.device | str) -> None:
        """Find the routers of a model, which may be sharded and wrapped, by their layer's index."""
        self._device = device
        self._num_layers = len(list(model.get_submodule("layers").children()))
        routers = {}
        for name, layer in model.get_submodule("layers").named_children():
            for module in layer.modules():
                if isinstance(module, ReplayRouter):
                    routers[int(name)] = module
        self.routers: dict[int, ReplayRouter] = dict(sorted(routers.items()))
        """By absolute index of their layer, in order."""

        first = next(iter(self.routers.values()), None)
        self._num_experts, self._top_k = (first.num_experts, first.top_k) if first else (0, 0)
        self._clear_stats()

    @property
    def layers(self) -> tuple[int, ...]:
        """Absolute indices of the layers with a router, in order."""
        return tuple(self.routers)

    @contextmanager
    def replayed(self, ids: Tensor | None, num_tokens: int, *, watched: bool) -> Iterator[None]:
        """Inside, tokens go to these experts, [T, num_layers, K] ids; so does the backward pass.

        Layers without a router are not read; None is the routers' choice. `watched` keeps their own
        choice for `count` or `own_choice`. RoutingReplayError if ids do not fit row or model.
        """
        if ids is not None:
            ids_LTK = self._checked(ids, num_tokens).long()
            for layer_ids, router in zip(ids_LTK, self.routers.values(), strict=True):
                router.replayed_ids = layer_ids[None]
        self._watch(watched)
        try:
            yield
        finally:
            self._watch(False)
            for router in self.routers.values():
                router.replayed_ids = None

    def own_choice(self) -> Tensor:
        """The routers' own choice, [T, num_layers, K] int16 on the CPU; 0 without a router."""
        if not self.routers:
            raise RoutingReplayError(f"no routing to record: {_NO_ROUTERS}")
        own = {layer: _own_ids(router).short() for layer, router in self.routers.items()}
        none = torch.zeros_like(next(iter(own.values())))
        return torch.stack([own.get(i, none) for i in range(self._num_layers)], dim=1).cpu()

    @torch.no_grad()
    def count(self) -> None:
        """Add this `replayed(...)` forward pass to the stats; call it before the backward."""
        for index, router in enumerate(self.routers.values()):
            own_TK = _own_ids(router)
            used_TK = own_TK
            if router.replayed_ids is not None:
                used_TK = router.replayed_ids[0]
                is_kept_TK = (own_TK[:, :, None] == used_TK[:, None, :]).any(-1)
                self._changed_L[index] += (~is_kept_TK.all(-1)).sum()
            used = used_TK.flatten()
            self._load_LE[index].scatter_add_(0, used, torch.ones_like(used))
            self._num_tokens += len(used_TK) if index == 0 else 0
        self._watch(False)

    def take_stats(self) -> RoutingStats | None:
        """Stats since the last call, and start anew. None for a model without routers."""
        if not self.routers:
            return None
        stats = RoutingStats(
            num_tokens=self._num_tokens,
            layers=self.layers,
            changed_L=self._changed_L.cpu(),
            load_LE=self._load_LE.cpu(),
        )
        self._clear_stats()
        return stats

    def _clear_stats(self) -> None:
        num_layers = len(self.routers)
        self._num_tokens = 0
        self._changed_L = torch.zeros(num_layers, dtype=torch.int64, device=self._device)
        self._load_LE = torch.zeros(
            num_layers, self._num_experts, dtype=torch.int64, device=self._device
        )

    def _watch(self, watched: bool) -> None:
        for router in self.routers.values():
            router.keeps_own_ids = watched
            router.own_ids = None

    def _checked(self, ids: Tensor, num_tokens: int) -> Tensor:
        """[L, T, K]: the ids of the layers with a router, once they have been found sound."""
        if not self.routers:
            raise RoutingReplayError(f"row has routing, but {_NO_ROUTERS}; set its ids to None")
        if ids.dtype not in _DTYPES or ids.dim() != 3:
            raise RoutingReplayError(
                "routing must be uint8 or int16 [tokens, layers, experts per token], got "
                f"{ids.dtype} {list(ids.shape)}"
            )
        rows, num_layers, top_k = ids.shape
        if rows != num_tokens:
            raise RoutingReplayError(f"row has {num_tokens} tokens and {rows} rows of routing")
        if num_layers != self._num_layers or top_k != self._top_k:
            raise RoutingReplayError(
                f"routing has {num_layers} layers with {top_k} experts per token, the model "
                f"{self._num_layers} with {self._top_k}"
            )
        picked = ids if num_layers == len(self.routers) else ids[:, list(self.routers)]
        ids_LTK = picked.to(self._device).transpose(0, 1).contiguous()  # checked where it is fast
        self._check_values(ids_LTK)
        return ids_LTK

    def _check_values(self, ids_LTK: Tensor) -> None:
        # As Python numbers: a comparison in uint8 would take 300 for 44.
        lowest, highest = (int(value) for value in torch.aminmax(ids_LTK))
        if lowest < 0 or highest >= self._num_experts:
            is_bad = (ids_LTK < 0) | (ids_LTK.int() >= self._num_experts)
            layer, token, k = is_bad.nonzero()[0].tolist()
            raise RoutingReplayError(
                f"routing of layer {self.layers[layer]}, token {token} names expert "
                f"{ids_LTK[layer, token, k]}; the model has {self._num_experts}"
            )
        for distance in range(1, self._top_k):
            is_same = ids_LTK[:, :, distance:] == ids_LTK[:, :, :-distance]
            if is_same.any():
                layer, token, k = is_same.nonzero()[0].tolist()
                raise RoutingReplayError(
                    f"routing of layer {self.layers[layer]}, token {token} names expert "
                    f"{ids_LTK[layer, token, k]} twice"
                )


def _own_ids(router: ReplayRouter) -> Tensor:
    """[T, K] int64 of the forward pass just done."""
    own = router.own_ids
    assert own is not None, "no forward pass inside a watched replayed(...)"
    return (own.full_tensor() if isinstance(own, DTensor) else own)[0]
