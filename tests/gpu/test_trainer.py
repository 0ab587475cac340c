"""The trainer on a GPU: bfloat16 and float32 against transformers, packing, gradients, the head."""

import logging
import math
from pathlib import Path

import pytest
import torch
from support.bfloat16_pair import NOISE
from support.tiny_models import (
    full_gradients,
    packed_row,
    random_documents,
    tiny_folder,
    tiny_trainer,
)
from torch import Tensor

from torchtitan_ext.logprob_head import chunked_logprobs

pytestmark = pytest.mark.gpu

DOCUMENTS = random_documents([2, 40, 7, 7, 90, 23], seed=1)
FLOAT32 = 1e-4
"""Nats. A CPU shows 1e-6; a GPU sums in other orders, with no TF32 in the trainer. Not measured."""
BOUND = {"float32": FLOAT32, "bfloat16": NOISE}


def of_transformers(folder: Path, dtype: str, device: torch.device) -> Tensor:
    """[N] log-probs of all documents by transformers' own forward, each alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
    found = []
    with torch.no_grad():
        for ids in DOCUMENTS:
            logits = model(input_ids=torch.tensor([ids[:-1]], device=device)).logits[0].double()
            targets = torch.tensor(ids[1:], device=device)[:, None]
            found.append(logits.log_softmax(-1).gather(1, targets).squeeze(1))
    return torch.cat(found).cpu()


@pytest.mark.parametrize("dtype", list(BOUND))
def test_logprobs_equal_transformers_and_do_not_depend_on_the_row(
    tmp_path: Path, device: torch.device, dtype: str
) -> None:
    folder = tiny_folder(tmp_path / "model")
    trainer = tiny_trainer(folder, tmp_path / "run", dtype=dtype)
    assert trainer.device.type == device.type
    packed = trainer.score([packed_row(DOCUMENTS)])[0]
    alone = torch.cat([trainer.score([packed_row([ids])])[0] for ids in DOCUMENTS])
    assert (packed - alone).abs().max() <= BOUND[dtype]
    want = of_transformers(folder, dtype, device)
    assert (packed.double() - want).abs().max() <= BOUND[dtype]
    trainer.close()


@pytest.mark.parametrize("dtype", list(BOUND))
def test_gradients_are_finite_and_a_step_moves_the_policy(tmp_path: Path, dtype: str) -> None:
    trainer = tiny_trainer(tiny_folder(tmp_path / "model"), tmp_path / "run", dtype=dtype)
    before = trainer.score([packed_row(DOCUMENTS)])[0]
    trainer.forward_backward([packed_row(DOCUMENTS)], lambda _, logprobs, __: -logprobs.mean())
    assert all(bool(g.isfinite().all()) for g in dict(full_gradients(trainer)).values())
    norm, _ = trainer.optimizer_step()
    assert math.isfinite(norm) and norm > 0
    assert trainer.score([packed_row(DOCUMENTS)])[0].mean() > before.mean()
    trainer.close()


@pytest.mark.parametrize("dtype", list(BOUND))
def test_the_attention_in_use_is_the_one_that_is_named(
    tmp_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    """FlashAttention in bfloat16 on a GPU, torch's own attention in float32 and on CPUs."""
    from torchtitan.models.common.attention import current_flash_attention_impl

    with caplog.at_level(logging.INFO, logger="torchtitan_ext.flash_attention"):
        trainer = tiny_trainer(tiny_folder(tmp_path / "model"), tmp_path / "run", dtype=dtype)
    is_flash = device.type == "cuda" and dtype == "bfloat16"
    kinds = {type(module).__name__ for module in trainer.model.modules()}
    used = kinds & {"VarlenAttention", "PackedSDPA"}
    assert used == {"VarlenAttention" if is_flash else "PackedSDPA"}
    # torch says None for FA2, which is its own.
    named = f"attention of the trainer: {current_flash_attention_impl() or 'FA2'}"
    assert (named in caplog.messages) == is_flash
    trainer.close()


TOKENS, WORDS, WIDTH = 512, 32_000, 64


def head_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight with gradient, targets; logits of size about 1."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(WORDS, WIDTH, generator=generator) / WIDTH**0.5
    targets = torch.randint(0, WORDS, (TOKENS,), generator=generator).to(device)
    hidden, weight = (one.to(device, dtype).requires_grad_() for one in (hidden, weight))
    return hidden, weight, targets


# Products of bfloat16 values are exact in float32, so are log-probs; gradients are rounded to it.
GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Least relative error in norm. Those of tests/ext/test_logprob_head.py."""


@pytest.mark.parametrize("dtype", list(GRADIENT))
def test_the_chunked_head_equals_a_plain_one(device: torch.device, dtype: torch.dtype) -> None:
    hidden, weight, targets = head_inputs(device, dtype)
    got, entropy = chunked_logprobs(hidden, weight, targets, chunk=16)
    (got - 0.3 * entropy).mean().backward()
    own = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    full = (hidden.double() @ weight.double().T).log_softmax(-1)
    want = full.gather(1, targets[:, None]).squeeze(1)
    # Sums of 64 products of size 1 in float32, and a logsumexp of about 10: 1e-5.
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=0.0)
    (want + 0.3 * (full.exp() * full).sum(-1)).mean().backward()
    for one, other in zip(own, (hidden.grad, weight.grad), strict=True):
        assert one is not None and other is not None
        assert (one.double() - other.double()).norm() < GRADIENT[dtype] * other.double().norm()


@pytest.mark.parametrize("dtype", list(GRADIENT))
def test_the_chunked_head_never_holds_all_logits(device: torch.device, dtype: torch.dtype) -> None:
    """All logits are 63 MiB in float32; a chunk of 16 tokens is 2, the weight's gradient 8."""
    if device.type == "cpu":
        pytest.skip("the peak is that of a GPU's allocator")
    hidden, weight, targets = head_inputs(device, dtype)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, chunk=16)
    (logprobs - 0.3 * entropy).mean().backward()
    assert torch.cuda.max_memory_allocated() - start < 40 * 2**20
