"""Experts in float32 against a loop over tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_ext.cpu.experts import Float32Experts

DIM, HIDDEN = 8, 6
COUNTS = [3, 0, 4]  # expert 1 gets nothing
NUM_PADDING = 2
# Products of 8 terms of size 1 in float32; bfloat16 would be off by 4e-3.
TOLERANCE = {"atol": 2e-6, "rtol": 1e-5}


def experts() -> Float32Experts:
    module = Float32Experts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=len(COUNTS)).build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def rows() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(COUNTS) + NUM_PADDING, DIM, generator=generator).requires_grad_()


def token_loop(module: Float32Experts, x: Tensor) -> Tensor:
    """w2 (silu(w1 x) * w3 x), one token at a time, in float64."""
    owners = [expert for expert, count in enumerate(COUNTS) for _ in range(count)]
    outputs = []
    for row, expert in zip(x.double(), owners, strict=False):
        w1, w2, w3 = (w[expert].double() for w in (module.w1_EFD, module.w2_EDF, module.w3_EFD))
        outputs.append(w2 @ (F.silu(w1 @ row) * (w3 @ row)))
    return torch.cat([torch.stack(outputs), torch.zeros(NUM_PADDING, DIM, dtype=torch.float64)])


def test_rows_equal_a_loop_over_tokens_forward_and_backward() -> None:
    ours, literal = experts(), experts()
    x, y = rows(), rows()
    got, want = ours(x, torch.tensor(COUNTS)), token_loop(literal, y)
    torch.testing.assert_close(got, want.float(), **TOLERANCE)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(2))
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, **TOLERANCE)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, literal.get_parameter(name).grad, **TOLERANCE)
        assert not parameter.grad[1].any()
        assert parameter.grad[0].any() and parameter.grad[2].any()


def test_padding_rows_are_zero() -> None:
    assert not experts()(rows(), torch.tensor(COUNTS))[-NUM_PADDING:].any()


def test_bfloat16_parameters_stay_bfloat16_and_rows_keep_their_type() -> None:
    module = experts().to(torch.bfloat16)
    got = module(rows(), torch.tensor(COUNTS))
    assert got.dtype == torch.float32
    want = token_loop(module, rows().to(torch.bfloat16))
    # Three roundings to 8 bits on values up to about 20: 20 * 2**-8 = 0.08 each.
    torch.testing.assert_close(got, want.float(), atol=0.3, rtol=0.05)


def test_names_and_settings_are_torchtitans() -> None:
    module = experts()
    assert isinstance(module, Float32Experts)
    names = [name for name, _ in module.named_parameters()]
    assert names == ["w1_EFD", "w2_EDF", "w3_EFD"]
    assert module.w1_EFD.shape == (len(COUNTS), HIDDEN, DIM)
