"""Supervised training of the tiny base model, from random weights, on one process."""

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from rollverify.toy.settings import MAX_POSITIONS, PrepareConfig, model_config
from rollverify.toy.tokenizer import EOS_ID, PAD_ID, build_tokenizer
from torchtitan_ext.hf_folder import write_hf_folder
from torchtitan_ext.packed_rows import PackedRow
from torchtitan_ext.policy_trainer import PolicyTrainer
from torchtitan_ext.trainer_config import TrainerSettings, build_policy_trainer

if TYPE_CHECKING:
    from rollverify.toy.task import PermutationChain

logger = logging.getLogger(__name__)

WARMUP_STEPS = 20


def pack_demonstrations(
    demonstrations: list[tuple[list[int], list[int]]],
) -> tuple[PackedRow, Tensor]:
    """(Row of T tokens; [T] bool, True where the target is a response token), laid end to end."""
    tokens, positions, targets, mask = [], [], [], []
    for prompt, response in demonstrations:
        ids = torch.tensor(prompt + response)
        tokens.append(ids[:-1])
        targets.append(ids[1:])
        positions.append(torch.arange(len(ids) - 1))
        mask.append(torch.arange(1, len(ids)) >= len(prompt))
    row = PackedRow(
        tokens=torch.cat(tokens), positions=torch.cat(positions), targets=torch.cat(targets)
    )
    return row, torch.cat(mask)


def train_base_model(
    task: "PermutationChain", prepare: PrepareConfig, folder: Path
) -> dict[str, Any]:
    """Train on demonstrations and add the weights to the folder, which holds the tokenizer.

    Returns a JSON-able report: parameters, steps, last losses in nats per response token.
    """
    tokenizer = build_tokenizer()
    config = model_config(prepare, tokenizer.get_vocab_size(), EOS_ID, PAD_ID)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    trainer = build_policy_trainer(_settings(prepare, folder))
    try:
        losses = _train(trainer, task, prepare)
        weights = folder.with_name(f"{folder.name}-weights")
        write_hf_folder(weights, trainer.hf_parameters(), source=folder, is_writer=True)
        (weights / "model.safetensors").rename(folder / "model.safetensors")
        for leftover in weights.iterdir():
            leftover.unlink()
        weights.rmdir()
        num_parameters = sum(p.numel() for p in trainer.model.parameters())
    finally:
        trainer.close()
    tail = losses[-20:]
    return {
        "parameters": num_parameters,
        "sft_steps": len(losses),
        "sft_loss_nats": round(sum(tail) / len(tail), 4),
    }


def _settings(prepare: PrepareConfig, folder: Path) -> TrainerSettings:
    return TrainerSettings(
        model_folder=str(folder),
        run_folder=str(folder),
        load_weights=False,
        steps=prepare.sft_steps,
        max_sequence_tokens=MAX_POSITIONS,
        lr=prepare.sft_lr,
        betas=(0.9, 0.98),
        warmup_steps=min(WARMUP_STEPS, prepare.sft_steps),
        lr_decay="cosine",
        seed=prepare.seed,
    )


def _train(trainer: PolicyTrainer, task: "PermutationChain", prepare: PrepareConfig) -> list[float]:
    """Loss of each step, nats per response token."""
    tokenizer = build_tokenizer()
    losses = []
    bar = tqdm(total=prepare.sft_steps, desc="base model", disable=not sys.stderr.isatty())
    with bar:
        for step in range(prepare.sft_steps):
            pairs = task.demonstrations(prepare.sft_batch_size, seed=step)
            row, mask = pack_demonstrations(
                [
                    (tokenizer.encode(prompt).ids, [*tokenizer.encode(response).ids, EOS_ID])
                    for prompt, response in pairs
                ]
            )

            def token_loss(
                index: int, logprobs: Tensor, entropy: Tensor, mask: Tensor = mask
            ) -> Tensor:
                return -(logprobs * mask).sum() / mask.sum()

            losses.append(trainer.forward_backward([row], token_loss).item())
            trainer.optimizer_step()
            bar.update()
            if (step + 1) % 100 == 0:
                logger.info(
                    "base model: step %d of %d, loss %.3f nats per token",
                    step + 1,
                    prepare.sft_steps,
                    sum(losses[-100:]) / 100,
                )
    return losses
