"""What a layer keeps for its backward pass, counted on torch's own graph, against the plan.

Layers of the paper's models run on meta tensors, which have sizes but no contents. Kernels of GPUs
stand in by what they save and allocate: flash attention its inputs, output and, for the backward
pass, float32 sums and one key and value per head; the fused norm its input.
"""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollverify.dry_run.check import sizes_of
from rollverify.dry_run.memory import layer_values
from torchtitan_ext.models.hf_config import read_hf_config
from torchtitan_ext.models.specs import model_spec_from_hf

MODELS = Path(__file__).resolve().parents[2] / "train_configs" / "models"
TOKENS = 4095
"""No dimension of a weight, so that gradients of weights can be told from activations."""


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *_ = ctx.saved_tensors
        found = tuple(torch.empty_like(one) for one in (q, k, v))
        work = [torch.empty_like(q, dtype=torch.float32), torch.empty_like(q), torch.empty_like(q)]
        del work
        return found


class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class LiveBytes(TorchDispatchMode):
    """Counts storages that operations make, until they are freed."""

    def __init__(self, weights: list[Tensor], given: list[Tensor]) -> None:
        """Neither `given` are counted nor what has the shape of a weight, such as its gradient."""
        super().__init__()
        self._shapes = {tuple(one.shape) for one in weights}
        self._shapes |= {shape[:-2] + shape[:-3:-1] for shape in self._shapes}
        self._live = {one.untyped_storage()._cdata: 0 for one in [*weights, *given]}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tuple(tensor.shape) not in self._shapes:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._live[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, key: int) -> None:
        self.now -= self._live.pop(key)


def use_stand_ins(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    norm, attention = type(layer.attention_norm), type(layer.attention.inner_attention)
    monkeypatch.setattr(norm, "forward", lambda self, x: FusedNorm.apply(x, self.weight))
    monkeypatch.setattr(attention, "forward", lambda self, *qkv, **_: Flash.apply(*qkv))
    autocast = torch.autocast  # which does not know meta tensors
    monkeypatch.setattr(torch, "autocast", lambda **_: autocast("cpu", enabled=False))


@pytest.mark.parametrize("name", ["qwen3_4b_base", "qwen3_8b_base", "qwen3_30b_a3b_base"])
def test_a_layer_keeps_and_adds_what_the_plan_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1.5 %: rotary tables, scores of the router and sums per token are left out."""
    (tmp_path / "config.json").write_text((MODELS / f"{name}.json").read_text())
    config = read_hf_config(tmp_path)
    with torch.device("meta"):
        layer = model_spec_from_hf(tmp_path).model.layers[0].build().to(torch.bfloat16)
        x = torch.zeros(1, TOKENS, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        positions = torch.zeros(1, TOKENS, dtype=torch.int64)
    use_stand_ins(layer, monkeypatch)
    # The layer's input is left out, but its output, the next one's, is counted.
    live = LiveBytes([*layer.parameters(), *layer.buffers()], given=[x, positions])
    kept, added = layer_values(sizes_of(config), 1)
    with live:
        out = layer(x, None, positions)
        assert live.now / TOKENS / 2 == pytest.approx(kept, rel=0.015)
        live.peak = live.now
        torch.autograd.backward(out, torch.empty_like(out))
    assert live.peak / TOKENS / 2 == pytest.approx(kept + added, rel=0.015)
