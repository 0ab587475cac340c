"""Tiny Qwen3 folders with experts, written by transformers, and its own routing and log-probs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EOS_ID = 1
VOCAB_SIZE = 64
NUM_EXPERTS = 8
TOP_K = 2
DENSE_LAYER = 1
NUM_LAYERS = 3


def moe_folder(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of about 150k parameters; the layer in the middle has no experts.

    The initial weights are wide (0.2), so that a wrong or old weight shows in the log-probs.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "mlp_only_layers": [DENSE_LAYER],
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": EOS_ID,
        "dtype": "float32",
    }
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(values | changes))).float()
    model.save_pretrained(folder)
    return folder


def folder_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of a folder, one at a time, as a trainer hands them over."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - the handle is not a dict
            yield name, tensors.get_tensor(name)


class MoeReference:
    """transformers' own float32 forward of a folder's weights."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen3MoeForCausalLM

        self.model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> Tensor:
        """[T - 1] float64 log-probs of ids 1.., softmax taken in float64."""
        logits = self.model(input_ids=torch.tensor([ids[:-1]])).logits[0].double()
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)

    @torch.no_grad()
    def experts(self, ids: list[int]) -> Tensor:
        """[T - 1, L, K] experts of all tokens but the last, ascending; 0 in dense layers."""
        out = self.model(input_ids=torch.tensor([ids[:-1]]), output_router_logits=True)
        chosen = torch.zeros(len(ids) - 1, NUM_LAYERS, TOP_K, dtype=torch.long)
        with_experts = [layer for layer in range(NUM_LAYERS) if layer != DENSE_LAYER]
        for layer, logits in zip(with_experts, out.router_logits, strict=True):
            chosen[:, layer] = logits.topk(TOP_K, dim=-1).indices.sort(-1).values
        return chosen
