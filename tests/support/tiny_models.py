"""Tiny Qwen3 and Llama folders, trainers and packed rows, and an independent transformers forward.

Dimension letters: T tokens. Imports torchtitan, never vllm.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_ext.hf_folder import write_hf_folder, write_random_hf_folder
from torchtitan_ext.packed_rows import PackedRow
from torchtitan_ext.policy_trainer import PolicyTrainer
from torchtitan_ext.trainer_config import TrainerSettings, build_policy_trainer

VOCAB_SIZE = 101
EOS_ID = 1
MAX_TOKENS = 128


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Contents of config.json of a 2-layer model of about 70k parameters.

    The initial weights are wide (0.15), so that the distributions are far from uniform and a wrong
    or old weight shows in the log-probs.
    """
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        # At 0.3 transformers' own float32 is up to 7e-5 from its float64; wrong weights still show.
        "initializer_range": 0.15,
        "use_sliding_window": False,
        "eos_token_id": EOS_ID,
        "dtype": "float32",
    } | changes


def tiny_moe_config(**changes: Any) -> dict[str, Any]:
    """The same with 8 experts in both layers, of which 2 compute a token."""
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return tiny_config(**experts) | changes


def tiny_llama_config(**changes: Any) -> dict[str, Any]:
    """A Llama with 3 query heads and one key head: two ranks cannot divide them."""
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "mlp_bias": False,
    }
    return tiny_config(**llama) | changes


def tiny_llama_folder(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random Llama model and return its folder."""
    write_random_hf_folder(folder, tiny_llama_config(**changes), seed=seed)
    return folder


def tiny_folder(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random model and return its folder."""
    write_random_hf_folder(folder, tiny_config(**changes), seed=seed)
    return folder


def tiny_moe_folder(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random mixture-of-experts model and return its folder."""
    write_random_hf_folder(folder, tiny_moe_config(**changes), seed=seed)
    return folder


def tiny_trainer(model_folder: Path, run_folder: Path, **changes: Any) -> PolicyTrainer:
    """A trainer that holds the folder's weights. Collective: yes, over the world."""
    values: dict[str, Any] = {
        "steps": 20,
        "max_sequence_tokens": MAX_TOKENS,
        "lr": 1e-2,
        "betas": (0.9, 0.95),
        "logprob_chunk_mib": 1,
        "collective_timeout_s": 60,
    }
    settings = TrainerSettings(
        model_folder=str(model_folder), run_folder=str(run_folder), **(values | changes)
    )
    trainer = build_policy_trainer(settings)
    trainer.checkpointer.load()
    return trainer


def random_documents(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random token ids, one list per length."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]


def packed_row(documents: list[list[int]]) -> PackedRow:
    """Documents laid end to end."""
    ids = [torch.tensor(document) for document in documents]
    return PackedRow(
        tokens=torch.cat([i[:-1] for i in ids]),
        positions=torch.cat([torch.arange(len(i) - 1) for i in ids]),
        targets=torch.cat([i[1:] for i in ids]),
    )


def take_steps(trainer: PolicyTrainer, num_steps: int, *, seed: int = 0) -> list[float]:
    """Train on random documents (mean negative log-prob); returns each step's learning rate.

    Collective: yes, over the world. With several data ranks every rank trains on the same row, so
    this is for tests that only need changed weights.
    """
    rates = []
    for step in range(num_steps):
        row = packed_row(random_documents([9, 20, 5], seed=1000 * seed + step))

        def token_loss(index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
            return -logprobs.mean() / trainer.data_world_size

        trainer.forward_backward([row], token_loss)
        rates.append(trainer.optimizer_step()[1])
    return rates


def export(trainer: PolicyTrainer, folder: Path, source: Path, *, is_writer: bool = True) -> Path:
    """Write the trainer's weights as a Hugging Face folder. Collective: yes, over the world."""
    write_hf_folder(folder, trainer.hf_parameters(), source=source, is_writer=is_writer)
    return folder


def full_parameters(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """Copies of all weights by Hugging Face name. Collective: yes, over the world."""
    return {name: tensor.clone() for name, tensor in trainer.hf_parameters()}


def full_gradients(trainer: PolicyTrainer) -> Iterator[tuple[str, Tensor]]:
    """(parameter name, full gradient). Collective: yes, over the world."""
    for name, parameter in trainer.model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        yield name, full.clone()


class Reference:
    """transformers' own float32 forward of a folder's weights."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, ids: list[int], temperature: float = 1.0) -> Tensor:
        """[T - 1] float64 log-probs of ids 1.., softmax taken in float64."""
        logits = self.model(input_ids=torch.tensor([ids[:-1]])).logits[0].double() / temperature
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
