"""Llama in the trainer against transformers: both rotary embeddings, weights out and in again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import (
    Reference,
    export,
    full_gradients,
    packed_row,
    random_documents,
    take_steps,
    tiny_llama_folder,
    tiny_trainer,
)

DOCUMENTS = random_documents([2, 40, 7, 7, 90, 23], seed=1)
# Two float32 forward passes of two layers in different orders of summation; log-probs of size 10
# carry steps of 1e-6 and a handful of roundings.
PARITY = 1e-5

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Wave lengths of 32 dimensions go from 6 to 35,000: kept, blended and divided ones.
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "as_many_key_heads": {"num_key_value_heads": 3},
    "old_spelling": {"rope_parameters": None, "rope_theta": 5000.0, "head_dim": None},
}


def variant(changes: dict[str, Any]) -> dict[str, Any]:
    """Without a head size transformers takes 96 / 3; a wider model needs smaller weights."""
    wider = {"hidden_size": 96, "initializer_range": 0.12}
    return changes | (wider if "head_dim" in changes else {})


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logprobs_equal_transformers_after_training(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """WS01 on the trainer's side, through an exported folder."""
    folder = tiny_llama_folder(tmp_path / "model", **variant(changes))
    trainer = tiny_trainer(folder, tmp_path / "run")
    before = trainer.score([packed_row(DOCUMENTS)])[0]
    take_steps(trainer, 3)
    reference = Reference(export(trainer, tmp_path / "exported", folder))
    assert type(reference.model).__name__ == "LlamaForCausalLM"
    want = torch.cat([reference.logprobs(ids, 0.7) for ids in DOCUMENTS])
    got = trainer.score([packed_row(DOCUMENTS)], temperature=0.7)[0]
    torch.testing.assert_close(got.double(), want, atol=PARITY, rtol=0.0)
    assert (trainer.score([packed_row(DOCUMENTS)])[0] - before).abs().max() > 0.1
    trainer.close()


def test_scaling_of_llama3_moves_the_logprobs(tmp_path: Path) -> None:
    """So that the comparison above would notice a scaling that is not applied."""
    scores = []
    for name in ("tied", "llama3_rope"):
        trainer = tiny_trainer(tiny_llama_folder(tmp_path / name, **VARIANTS[name]), tmp_path / "r")
        scores.append(trainer.score([packed_row(DOCUMENTS)])[0])
        trainer.close()
    assert (scores[0] - scores[1]).abs().max() > 100 * PARITY


def test_gradients_of_query_and_key_equal_transformers(tmp_path: Path) -> None:
    """Row by row, in Hugging Face's order."""
    folder = tiny_llama_folder(tmp_path / "model")
    trainer = tiny_trainer(folder, tmp_path / "run")
    trainer.forward_backward([packed_row(DOCUMENTS)], lambda _, logprobs, __: -logprobs.mean())
    gradients = dict(full_gradients(trainer))
    trainer.close()
    model = Reference(folder).model
    losses = []
    for ids in DOCUMENTS:
        logprobs = model(input_ids=torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        losses.append(-logprobs.gather(1, torch.tensor(ids[1:])[:, None]))
    torch.cat(losses).mean().backward()
    attention = model.model.layers[1].self_attn
    for name, want in (("wq", attention.q_proj), ("wk", attention.k_proj)):
        gradient = gradients[f"layers.1.attention.qkv_linear.{name}.weight"]
        assert want.weight.grad.abs().max() > 1e-3
        # Sums of 163 tokens in float32, gradients of size 0.1.
        torch.testing.assert_close(gradient, want.weight.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_folder_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    folder = tiny_llama_folder(tmp_path / "model", **VARIANTS[name])
    trainer = tiny_trainer(folder, tmp_path / "run")
    want = load_file(folder / "model.safetensors")
    got = load_file(export(trainer, tmp_path / "exported", folder) / "model.safetensors")
    trainer.close()
    assert got.keys() == want.keys()
    assert ("lm_head.weight" in got) == (name == "untied")
    assert all(torch.equal(got[key], tensor) for key, tensor in want.items())
