"""How far float32 itself carries: `python -m benchmarks.rounding`.

Responses that a model samples on the built-in task, scored four times under the same weights: by
the engine when it sampled them, by the trainer (with the engine's experts, where there are any),
and by transformers in float32 and in float64. What float32 loses in one implementation is a bound
for what two of them can agree on. With experts only tokens are compared up to the first one in a
response that float64 routes elsewhere.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.folders import num_parameters, prepared_base
from benchmarks.isolated import answer, child_task, measure, report
from benchmarks.loss_cost import LONGEST, base_trainer
from rollverify.config.environment import set_defaults

BOUND = 1e-5
"""Nats; the parity that the tests ask for."""

GROUP_SIZE = 8
PAIRS = (
    ("engine", "trainer"),
    ("engine", "float64"),
    ("trainer", "float64"),
    ("transformers", "float64"),
    ("engine", "transformers"),
)


def sample(folder: str, num_prompts: int) -> tuple[Any, list[Any]]:
    """The model folder and a trajectory per response, with the engine's log-probs and experts."""
    from rollverify.config.tables import EngineConfig
    from rollverify.engine.engine import GenerationRequest
    from rollverify.engine.generation import run_requests
    from rollverify.engine.model_folder import read_model_folder
    from rollverify.engine.vllm_engine import VllmEngine
    from rollverify.rollout.trajectory import ROUTING, append_segment, new_trajectory
    from rollverify.toy.task import PermutationChain

    model = read_model_folder(Path(folder), LONGEST + 32)
    prompts = [
        model.tokenizer.encode(one.text).ids
        for one in PermutationChain().train_problems(num_prompts)
    ]
    requests = [
        GenerationRequest(
            request_id=f"{index}/{number}",
            token_ids=tuple(ids),
            max_tokens=LONGEST,
            seed=GROUP_SIZE * index + number,
            temperature=1.0,
        )
        for index, ids in enumerate(prompts)
        for number in range(GROUP_SIZE)
    ]
    engine = VllmEngine(
        folder,
        EngineConfig(max_num_seqs=len(requests), kv_cache_gib=0.5, gpu_memory_utilization=0.2),
        stop_token_ids=model.stop_token_ids,
        max_model_len=LONGEST + 32,
        seed=0,
        record_routing=model.routing is not None,
    )
    done = run_requests(engine, requests)
    made = []
    for request in requests:
        index, number = map(int, request.request_id.split("/"))
        one = new_trajectory(
            prompt_ids=list(request.token_ids),
            group_id=index,
            prompt_index=index,
            sample_index=number,
        )
        found = done[request.request_id]
        append_segment(one, found.token_ids, found.logprobs, policy_version=0, seed=0)
        if found.routed_experts is not None:
            one[ROUTING] = found.routed_experts
        made.append(one)
    return model, made


def score_with_transformers(folder: str, made: list[Any], dtype: str) -> tuple[Any, Any]:
    """Log-probs of the response tokens, float64, and which of them were routed as recorded."""
    import torch
    from transformers import AutoModelForCausalLM

    from rollverify.rollout.trajectory import ROUTING

    words = {"dtype": getattr(torch, dtype), "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **words).eval()
    scores, alike = [], []
    for one in made:
        ids = torch.cat([one["prompt_ids"], one["response_ids"]]).long()
        first = len(one["prompt_ids"]) - 1
        options = {"output_router_logits": True} if ROUTING in one else {}
        with torch.no_grad():
            found = model(input_ids=ids[None, :-1], **options)
        logprobs = found.logits[0].double().log_softmax(-1)
        scores.append(logprobs.gather(1, ids[1:, None]).squeeze(1)[first:])
        is_alike = torch.ones(len(ids) - 1, dtype=torch.bool)
        if options:
            recorded = one[ROUTING].long().sort(-1).values
            top = [layer.topk(recorded.shape[-1], -1).indices for layer in found.router_logits]
            chosen = torch.stack(top, 1).sort(-1).values
            is_alike = (chosen == recorded).flatten(1).all(1).cummin(0).values
        alike.append(is_alike[first:])
    return torch.cat(scores), torch.cat(alike)


def measure_all(task: dict[str, Any]) -> dict[str, Any]:
    """Score and compare.

    Args:
        task: "folder", "scratch" and "prompts".

    Returns:
        "tokens" sampled, "compared" of them; by "a - b" mean and largest gap in nats, how many are
        above `BOUND`.
    """
    import torch

    from rollverify.ranks import Ranks
    from rollverify.training.scoring import TrajectoryScorer

    folder = task["folder"]
    trainer = base_trainer(folder, task["scratch"])
    model, made = sample(folder, task["prompts"])
    scorer = TrajectoryScorer(
        trainer=trainer,
        micro_batch_tokens=8192,
        temperature=1.0,
        ranks=Ranks(),
        routing=model.routing,
    )
    scores = {
        "engine": torch.cat([one["behavior_logprobs"] for one in made]),
        "trainer": scorer.score(made),
    }
    scores["transformers"], _ = score_with_transformers(folder, made, "float32")
    scores["float64"], is_alike = score_with_transformers(folder, made, "float64")
    gaps = {}
    for a, b in PAIRS:
        gap = (scores[a].double() - scores[b].double()).abs()[is_alike]
        gaps[f"{a} - {b}"] = {
            "mean": gap.mean().item(),
            "max": gap.max().item(),
            "above": int((gap > BOUND).sum()),
        }
    return {"tokens": len(is_alike), "compared": int(is_alike.sum()), "gaps": gaps}


def main() -> None:
    """Measure and print the table."""
    set_defaults()
    task = child_task()
    if task is not None:
        answer(measure_all(task))
    parser = argparse.ArgumentParser(description="What float32 costs in log-probs.")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: the base model")
    parser.add_argument("--prompts", type=int, default=40, help="with 8 responses each")
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    folder = prepared_base(arguments.model)
    with tempfile.TemporaryDirectory() as scratch:
        task = {"folder": str(folder), "scratch": scratch, "prompts": arguments.prompts}
        result = measure("benchmarks.rounding", task)
    print(
        f"{num_parameters(folder):,} parameters, {result['tokens']} sampled tokens, "
        f"{result['compared']} compared"
    )
    rows = [["nats", "mean", "largest", f"above {BOUND:g}"]]
    for name, gap in result["gaps"].items():
        rows.append([name, f"{gap['mean']:.1e}", f"{gap['max']:.1e}", str(gap["above"])])
    report(rows, result, arguments.output)


if __name__ == "__main__":
    main()
