"""Trainer and engine of a tiny model, both in bfloat16, as large models run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support.engine_pair import MAX_MODEL_LEN, Pair, tiny_engine
from support.tiny_models import tiny_trainer

from rollverify.engine.weight_sync import WeightSync

NOISE = 0.15
"""Nats between two bfloat16 forward passes of a tiny model whose logits reach 10, where a rounding
is 0.03; a few of them. Not measured on a GPU."""

GPU_SHARE = 0.1
"""Of a GPU's memory for one engine: those of all modules fit even if none is given back."""


@contextmanager
def bfloat16_pair(folder: Path, run: Path, **engine: Any) -> Iterator[Pair]:
    """Both sides of a model folder under policy 0; the tolerance comes from that transfer.

    On a GPU only one engine of a process may sleep (vLLM's allocator is one for all), so engines
    do not unless they are told to.
    """
    settings = {"dtype": "bfloat16", "sleep": False, "gpu_memory_utilization": GPU_SHARE} | engine
    trainer = tiny_trainer(folder, run, max_sequence_tokens=MAX_MODEL_LEN, dtype="bfloat16")
    pair = Pair(folder=folder, trainer=trainer, engine=tiny_engine(folder, **settings), sync=None)  # type: ignore[arg-type]
    pair.sync = WeightSync(
        engine=pair.engine,
        parameters=lambda: trainer.hf_parameters(torch.bfloat16),
        trainer_score=pair.trainer_score,
        probe_ids=list(range(2, 62, 2)),  # within the smallest vocabulary
    )
    pair.sync.push(0)
    try:
        yield pair
    finally:
        pair.engine.close()
        trainer.close()
        pair.engine = pair.trainer = pair.sync = trainer = None  # type: ignore[assignment]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
