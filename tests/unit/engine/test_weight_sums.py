"""The proof by sums of bits: what changes them, what does not, and which parameter is named."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollverify.engine import weight_sums
from rollverify.engine.weight_sums import WeightSums, bit_sum, engine_name
from rollverify.errors import WeightSyncError

EXPERTS = "model.layers.0.mlp.experts"
OWN = {
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    f"{EXPERTS}.routed_experts.w13_weight",
    f"{EXPERTS}.routed_experts.w2_weight",
}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"),
        (f"{EXPERTS}.7.gate_proj.weight", f"{EXPERTS}.routed_experts.w13_weight"),
        (f"{EXPERTS}.7.up_proj.weight", f"{EXPERTS}.routed_experts.w13_weight"),
        (f"{EXPERTS}.7.down_proj.weight", f"{EXPERTS}.routed_experts.w2_weight"),
        (f"{EXPERTS}.down_proj", f"{EXPERTS}.routed_experts.w2_weight"),
        ("lm_head.weight", None),
        (f"{EXPERTS}.7.other.weight", None),
    ],
)
def test_a_weight_is_found_in_the_parameter_that_holds_it(name: str, own: str | None) -> None:
    assert engine_name(name, OWN) == own


@given(st.integers(0, 4095), st.integers(0, 31), st.sampled_from(list(BITS)))
def test_one_flipped_bit_changes_the_sum(place: int, bit: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(place)
    tensor = torch.randn(64, 64, generator=generator).to(dtype)
    bit %= 8 * tensor.element_size()
    before = bit_sum(tensor)
    flat = tensor.view(BITS[dtype]).flatten()
    mask = torch.tensor(1, dtype=torch.int64) << bit
    flat[place] = (flat[place].to(torch.int64) ^ mask).to(BITS[dtype])
    assert bit_sum(tensor) != before


def test_order_parts_and_padding_with_zeros_do_not_change_it(monkeypatch) -> None:
    """Bits of 1.0 are 0x3f800000 = 1065353216, of -2.0 0xc0000000 = -1073741824 as int32."""
    tensor = torch.tensor([[1.0, -2.0], [0.0, 1.0]])
    assert bit_sum(tensor).item() == 2 * 1065353216 - 1073741824
    padded = torch.nn.functional.pad(tensor.T.contiguous(), (0, 3, 1, 0))
    assert bit_sum(padded) == bit_sum(tensor)
    assert bit_sum(tensor[:, ::2]) == 1065353216
    assert bit_sum(torch.zeros(0)) == 0
    monkeypatch.setattr(weight_sums, "CHUNK", 3)
    assert bit_sum(tensor).item() == 2 * 1065353216 - 1073741824


def fused_engine(dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights sent, parameters held): plain, fused and stacked, the experts two of each."""
    generator = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    layer = "model.layers.0."
    sent = {
        "model.embed_tokens.weight": weight(8, 4),
        **{f"{layer}self_attn.{name}_proj.weight": weight(4, 4) for name in "qkv"},
        **{
            f"{EXPERTS}.{expert}.{name}_proj.weight": weight(4, 4)
            for expert in range(2)
            for name in ("gate", "up", "down")
        },
    }
    cast = {name: tensor.to(dtype) for name, tensor in sent.items()}

    def of(*parts: str) -> Tensor:
        return torch.cat([cast[part] for part in parts])

    held = {
        "model.embed_tokens.weight": cast["model.embed_tokens.weight"].clone(),
        f"{layer}self_attn.qkv_proj.weight": of(
            *(f"{layer}self_attn.{n}_proj.weight" for n in "qkv")
        ),
        f"{EXPERTS}.routed_experts.w13_weight": torch.stack(
            [of(f"{EXPERTS}.{e}.gate_proj.weight", f"{EXPERTS}.{e}.up_proj.weight") for e in (0, 1)]
        ),
        f"{EXPERTS}.routed_experts.w2_weight": torch.stack(
            [cast[f"{EXPERTS}.{e}.down_proj.weight"] for e in (0, 1)]
        ),
    }
    return sent, held


def sums_of(sent: dict[str, Tensor], held: dict[str, Tensor]) -> WeightSums:
    sums = WeightSums(held)
    for name, tensor in sent.items():
        sums.add(name, tensor)
    return sums


@pytest.mark.parametrize("dtype", list(BITS))
def test_what_arrived_passes(dtype: torch.dtype) -> None:
    sent, held = fused_engine(dtype)
    sums = sums_of(sent, held)
    sums.check()
    assert sums.names == set(held)


@pytest.mark.parametrize("dtype", list(BITS))
def test_the_last_bit_of_one_value_is_found_in_every_parameter(dtype: torch.dtype) -> None:
    for name in fused_engine(dtype)[1]:
        sent, held = fused_engine(dtype)
        held[name].view(BITS[dtype]).flatten()[-1] ^= 1
        with pytest.raises(WeightSyncError, match="1 of 4 engine parameters") as caught:
            sums_of(sent, held).check()
        assert name in str(caught.value)


def test_a_part_that_was_not_sent_is_found() -> None:
    for lost in fused_engine(torch.float32)[0]:
        sent, held = fused_engine(torch.float32)
        del sent[lost]
        sums = sums_of(sent, held)
        if lost == "model.embed_tokens.weight":  # Its parameter has no other part.
            assert sums.names == held.keys() - {lost}
            continue
        with pytest.raises(WeightSyncError, match="a part of them was not sent"):
            sums.check()
