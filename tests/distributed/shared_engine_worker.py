"""One engine over two ranks: `shared_engine_worker.py MODEL`; there is another folder MODEL-2.

Each rank writes MODEL-RANK.pt: what `use` gives, and what is said of a member that differs.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from support.engine_pair import request, tiny_engine
from support.moe_models import folder_weights
from support.tiny_models import random_documents

from rollverify.engine.engine import RolloutEngine
from rollverify.engine.generation import run_requests
from rollverify.engine.shared import SharedEngine
from rollverify.errors import TwinsError, WeightSyncError
from torchtitan_ext.process_group import init_process_group

PROMPTS = random_documents([4, 40, 90], seed=0)
PAUSE_AFTER = 5


def use(engine: RolloutEngine, folder: Path) -> list[dict[str, Any]]:
    """What requests give under two models' weights, paused after some steps and to their end."""
    given = []
    for path in (folder, folder.with_name(f"{folder.name}-2")):
        engine.sleep()
        engine.wake("weights")
        written = engine.load_weights(folder_weights(path))
        engine.wake("kv_cache")
        engine.reset_prefix_cache()
        for number, ids in enumerate(PROMPTS):
            engine.add_request(request(f"{number}", ids))
        for _ in range(PAUSE_AFTER):
            engine.step()
        done = {f"paused {one.request_id}": one for one in engine.pause()}
        whole = [request(f"{number}", ids) for number, ids in enumerate(PROMPTS)]
        done |= run_requests(engine, whole)
        given.append({"done": done, "unwritten": engine.parameter_names() - written})
        given[-1]["score"] = engine.score(PROMPTS[2])
    return given


def broken_load(engine: Any, folder: Path, parameter: str, part: int) -> str:
    """What a member is told whose loader gave it the first half of one weight."""
    model = engine.engine._model()
    load = model.load_weights

    def load_wrongly(weights: Any) -> None:
        load(weights)
        own = model.get_parameter(parameter)
        whole = dict(folder_weights(folder))[parameter]
        own.data.copy_(whole.split(own.shape[part], dim=part)[0])

    model.load_weights = load_wrongly
    try:
        engine.load_weights(folder_weights(folder))
    except WeightSyncError as error:
        return str(error)
    finally:
        del model.load_weights
    return ""


def other_request(engine: RolloutEngine, rank: int) -> str:
    """What members are told of which one is given another seed."""
    engine.add_request(request("other", [3, 4, 5], seed=rank))
    try:
        engine.step()
    except TwinsError as error:
        return str(error)
    return ""


def main(model: Path) -> None:
    rank, _ = init_process_group(60.0)
    from rollverify.engine.vllm_shared import engine_ranks

    engine = tiny_engine(model, tensor_parallel=2, record_routing=model.name == "experts")
    shared = SharedEngine(engine=engine, members=engine_ranks())
    result: dict[str, Any] = {"use": use(shared, model)}
    layer = "model.layers.0.self_attn.o_proj.weight"
    result["broken_load"] = broken_load(shared, model, layer, part=1)
    result["other_request"] = other_request(shared, rank)
    torch.save(result, model.with_name(f"{model.name}-{rank}.pt"))
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
