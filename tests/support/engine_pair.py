"""Builders of tiny engines and weight transfers. Every test below starts a real vLLM engine.

`install_cpu_backend` runs before vllm is imported, as in the program.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.tiny_models import EOS_ID, packed_row, tiny_folder, tiny_trainer

from rollverify.config.tables import EngineConfig
from rollverify.engine.engine import Completion, GenerationRequest
from rollverify.engine.generation import run_requests
from rollverify.engine.weight_sync import WeightSync
from torchtitan_ext.policy_trainer import PolicyTrainer

MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 16
PARITY_TOLERANCE = 1e-5
"""float32 on both sides, two layers, log-probs down to -8 (float32 step 5e-7). Measured: 2e-6."""


def tiny_engine(folder: Path, **changes: Any) -> Any:
    """A started `VllmEngine`."""
    from rollverify.engine.vllm_engine import VllmEngine

    settings: dict[str, Any] = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_MODEL_LEN,
        "gpu_memory_utilization": 0.2,
    }
    settings |= {key: changes.pop(key) for key in [*changes] if key in EngineConfig.model_fields}
    values = {"stop_token_ids": (EOS_ID,), "max_model_len": MAX_MODEL_LEN, "seed": 0} | changes
    return VllmEngine(str(folder), EngineConfig(**settings), **values)


def request(name: str, ids: list[int], **changes: Any) -> GenerationRequest:
    """A request of 12 tokens at temperature 1 whose seed follows from its name."""
    values = {"max_tokens": 12, "seed": sum(name.encode()), "temperature": 1.0}
    return GenerationRequest(request_id=name, token_ids=tuple(ids), **(values | changes))


def generate(engine: Any, requests: list[GenerationRequest]) -> dict[str, Completion]:
    """Completions by request id."""
    return run_requests(engine, requests)


def make_sync(trainer: PolicyTrainer, engine: Any) -> WeightSync:
    """The transfer of a trainer's weights, with a probe of 48 tokens."""
    return WeightSync(
        engine=engine,
        parameters=trainer.hf_parameters,
        trainer_score=lambda ids: trainer.score([packed_row([ids])])[0].tolist(),
        probe_ids=list(range(2, 98, 2)),
        parity_tolerance=PARITY_TOLERANCE,
    )


@dataclass(kw_only=True)
class Pair:
    """Trainer and engine of one model, and the transfer between them."""

    folder: Path
    trainer: PolicyTrainer
    engine: Any
    sync: WeightSync

    def trainer_score(self, ids: list[int]) -> list[float]:
        """Log-probs of ids 1.. at temperature 1."""
        return self.trainer.score([packed_row([ids])])[0].tolist()


def make_pair(root: Path, *, tied: bool) -> Pair:
    """Both sides of one random model."""
    folder = tiny_folder(
        root / "model", tie_word_embeddings=tied, max_position_embeddings=MAX_MODEL_LEN
    )
    return pair_of(folder, root / "run")


def pair_of(folder: Path, run_folder: Path, **changes: Any) -> Pair:
    """Both sides of a model folder; `changes` are the engine's."""
    trainer = tiny_trainer(folder, run_folder, max_sequence_tokens=MAX_MODEL_LEN)
    engine = tiny_engine(folder, **changes)
    return Pair(folder=folder, trainer=trainer, engine=engine, sync=make_sync(trainer, engine))
