"""Starts the engine of a run; vLLM takes seconds to import, so it is imported only then."""

from rollverify.config.tables import EngineConfig
from rollverify.engine.engine import RolloutEngine
from rollverify.engine.model_folder import ModelFolder
from rollverify.engine.shared import SharedEngine


def start_engine(
    model: ModelFolder,
    settings: EngineConfig,
    *,
    max_sequence_tokens: int,
    seed: int,
    record_routing: bool = False,
    reserved_bytes: int = 0,
) -> RolloutEngine:
    """VLLM with the model folder's weights, see `VllmEngine`; vLLM is imported only now.

    Collective over the world where an engine spans ranks.
    """
    from rollverify.engine.vllm_engine import VllmEngine

    engine = VllmEngine(
        str(model.path),
        settings,
        stop_token_ids=model.stop_token_ids,
        max_model_len=max_sequence_tokens,
        seed=seed,
        record_routing=record_routing,
        reserved_bytes=reserved_bytes,
    )
    if settings.tensor_parallel == 1:
        return engine
    from rollverify.engine.vllm_shared import engine_ranks

    return SharedEngine(engine=engine, members=engine_ranks())
