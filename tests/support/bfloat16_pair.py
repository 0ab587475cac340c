"""Trainer and engine of a tiny model, both in bfloat16, as large models run."""

from pathlib import Path
from typing import Any

import torch
from support.engine_pair import MAX_MODEL_LEN, Pair, tiny_engine
from support.tiny_models import packed_row, tiny_trainer

from rollverify.engine.weight_sync import WeightSync

NOISE = 0.15
"""Nats between two bfloat16 forward passes of a tiny model whose logits reach 10, where a rounding
is 0.03; a few of them. Not measured on a GPU."""


def bfloat16_pair(folder: Path, run: Path, **engine: Any) -> Pair:
    """Both sides of a model folder; the tolerance comes from the first transfer."""
    trainer = tiny_trainer(folder, run, max_sequence_tokens=MAX_MODEL_LEN, dtype="bfloat16")
    made = tiny_engine(folder, dtype="bfloat16", **engine)
    sync = WeightSync(
        engine=made,
        parameters=lambda: trainer.hf_parameters(torch.bfloat16),
        trainer_score=lambda ids: trainer.score([packed_row([ids])])[0].tolist(),
        probe_ids=list(range(2, 62, 2)),  # within the smallest vocabulary
    )
    return Pair(folder=folder, trainer=trainer, engine=made, sync=sync)
