"""Mixture-of-experts Qwen3 in the trainer against transformers, and its weights out and in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import (
    Reference,
    export,
    full_gradients,
    full_parameters,
    packed_row,
    random_documents,
    take_steps,
    tiny_moe_folder,
    tiny_trainer,
)

from torchtitan_ext.policy_trainer import PolicyTrainer

DOCUMENTS = random_documents([2, 40, 7, 7, 90, 23], seed=1)
# Two float32 forward passes of two layers in different orders of summation; log-probs of size 10
# carry steps of 1e-6 and a handful of roundings. Measured: 2.3e-6.
PARITY = 1e-5

VARIANTS: dict[str, dict[str, Any]] = {
    "all_layers": {},
    "one_dense_layer": {"mlp_only_layers": [0], "num_hidden_layers": 3},
    "weights_not_normed": {"norm_topk_prob": False},
    "untied_top_3": {"tie_word_embeddings": False, "num_experts_per_tok": 3},
}


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[PolicyTrainer]:
    trainer = tiny_trainer(tiny_moe_folder(tmp_path / "model"), tmp_path / "run")
    yield trainer
    trainer.close()


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logprobs_equal_transformers_after_training(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """WS01 on the trainer's side, through an exported folder."""
    folder = tiny_moe_folder(tmp_path / "model", **changes)
    trainer = tiny_trainer(folder, tmp_path / "run")
    before = trainer.score([packed_row(DOCUMENTS)])[0]
    take_steps(trainer, 3)
    reference = Reference(export(trainer, tmp_path / "exported", folder))
    assert type(reference.model).__name__ == "Qwen3MoeForCausalLM"
    want = torch.cat([reference.logprobs(ids, 0.7) for ids in DOCUMENTS])
    got = trainer.score([packed_row(DOCUMENTS)], temperature=0.7)[0]
    torch.testing.assert_close(got.double(), want, atol=PARITY, rtol=0.0)
    assert (trainer.score([packed_row(DOCUMENTS)])[0] - before).abs().max() > 0.1
    trainer.close()


def test_training_gradient_equals_transformers(trainer: PolicyTrainer, tmp_path: Path) -> None:
    trainer.forward_backward([packed_row(DOCUMENTS)], lambda _, logprobs, __: -logprobs.mean())
    gradients = dict(full_gradients(trainer))
    model = Reference(tmp_path / "model").model
    losses = []
    for ids in DOCUMENTS:
        logprobs = model(input_ids=torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        losses.append(-logprobs.gather(1, torch.tensor(ids[1:])[:, None]))
    torch.cat(losses).mean().backward()
    mlp = model.model.layers[0].mlp
    moe = "layers.0.moe."
    gate_up = mlp.experts.gate_up_proj.grad  # transformers stacks [w1; w3], [E, 2F, D]
    pairs = [
        (moe + "router.gate.weight", mlp.gate.weight.grad),
        (moe + "routed_experts.inner_experts.w1_EFD", gate_up[:, :32]),
        (moe + "routed_experts.inner_experts.w3_EFD", gate_up[:, 32:]),
        (moe + "routed_experts.inner_experts.w2_EDF", mlp.experts.down_proj.grad),
    ]
    for name, want in pairs:
        assert want.abs().max() > 1e-3, name
        # Sums of 163 tokens in float32, gradients of size 0.1.
        torch.testing.assert_close(gradients[name], want, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_folder_comes_back_bit_for_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tiny_moe_folder(tmp_path / "model", **changes)
    trainer = tiny_trainer(folder, tmp_path / "run")
    want = load_file(folder / "model.safetensors")
    got = load_file(export(trainer, tmp_path / "exported", folder) / "model.safetensors")
    trainer.close()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    num_expert_weights = sum("mlp.experts." in name for name in got)
    assert num_expert_weights == (2 * 8 * 3)  # layers with experts, experts, matrices


def test_kept_expert_does_not_keep_its_layer(trainer: PolicyTrainer) -> None:
    """A consumer may hold the last tensor while the next layer is gathered."""
    experts = [(n, t) for n, t in trainer.hf_parameters() if "mlp.experts." in n]
    assert all(t.untyped_storage().nbytes() == 32 * 48 * 4 for _, t in experts)
    live = trainer.model.get_parameter("layers.0.moe.routed_experts.inner_experts.w1_EFD")
    name, first = experts[0]
    assert name == "model.layers.0.mlp.experts.0.gate_proj.weight"
    assert torch.equal(first, live.full_tensor()[0])  # pyright: ignore[reportCallIssue]


def test_checkpoint_restores_experts_and_their_moments(tmp_path: Path) -> None:
    """DC07: the step after a save and a load equals the one without, bit for bit."""
    folder = tiny_moe_folder(tmp_path / "model")
    trainer = tiny_trainer(folder, tmp_path / "run")
    take_steps(trainer, 2)
    trainer.checkpointer.save(2)
    again = tiny_trainer(folder, tmp_path / "run")
    again.checkpointer.load(2)
    take_steps(trainer, 1, seed=5)
    take_steps(again, 1, seed=5)
    want, got = full_parameters(trainer), full_parameters(again)
    trainer.close()
    again.close()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
