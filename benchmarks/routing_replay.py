"""What routing replay costs: `python -m benchmarks.routing_replay`.

A random model with experts that never stops, in one process: training passes and scoring passes
with recorded experts and with the router's own, and an engine that records experts beside one that
does not. The two sides of each pair take turns. The recorded experts are the trainer's own choice,
so that both sides do the same matrix products. Decides nothing.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.folders import ENDLESS_CONFIG, num_parameters, write_endless_folder
from benchmarks.isolated import answer, child_task, measure, report
from benchmarks.loss_cost import LONGEST, base_trainer
from rollverify.config.environment import set_defaults

TARGET = 1.03
"""Wall time with replay over wall time without."""

PROMPT_TOKENS = 24
MOE_CONFIG: dict[str, Any] = ENDLESS_CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""The experts of train_configs/moe.toml."""


def alternate(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Any]:
    """Let two sides take turns, each going first as often as the other.

    Args:
        sides: what to run, by name; each once without being counted.
        repeats: counted runs of each.

    Returns:
        {name: {"wall_s", "cpu_s": one number per run}}; CPU time is that of all threads.
    """
    times: dict[str, Any] = {name: {"wall_s": [], "cpu_s": []} for name in sides}
    for run in sides.values():
        run()
    for repeat in range(repeats):
        for name in list(sides) if repeat % 2 == 0 else list(reversed(sides)):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            sides[name]()
            times[name]["wall_s"].append(time.perf_counter() - wall_s)
            times[name]["cpu_s"].append(time.process_time() - cpu_s)
    return times


def trajectories(number: int, response_tokens: int) -> list[Any]:
    """Finished responses of random tokens, in groups of 8."""
    import torch

    from rollverify.rollout.trajectory import Status, append_segment, new_trajectory, set_outcome

    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(number):
        size = PROMPT_TOKENS + response_tokens
        ids = torch.randint(2, MOE_CONFIG["vocab_size"], (size,), generator=generator).tolist()
        one = new_trajectory(
            prompt_ids=ids[:PROMPT_TOKENS],
            group_id=index // 8,
            prompt_index=index // 8,
            sample_index=index % 8,
        )
        response = ids[PROMPT_TOKENS:]
        append_segment(one, response, [-2.0] * len(response), policy_version=0, seed=0)
        set_outcome(one, Status.LENGTH, float(index % 2))
        made.append(one)
    return made


def measure_trainer(task: dict[str, Any], trainer: Any, batch: list[Any]) -> dict[str, Any]:
    """Time passes with and without gradient; the batch gets the trainer's experts.

    Raises:
        RuntimeError: if both sides do not give the same log-probs.
    """
    import torch

    from rollverify.engine.model_folder import RoutingShape
    from rollverify.ranks import Ranks
    from rollverify.rollout.trajectory import ROUTING
    from rollverify.training.packing import pack_trajectories
    from rollverify.training.scoring import TrajectoryScorer

    shape = RoutingShape(
        num_layers=MOE_CONFIG["num_hidden_layers"],
        experts_per_token=MOE_CONFIG["num_experts_per_tok"],
        num_experts=MOE_CONFIG["num_experts"],
    )
    common = {"trainer": trainer, "micro_batch_tokens": task["micro_batch_tokens"]}
    with_replay, without = (
        TrajectoryScorer(temperature=1.0, ranks=Ranks(), routing=routing, **common)
        for routing in (shape, None)
    )
    for one, ids in zip(batch, with_replay.score_and_route(batch)[1], strict=True):
        one[ROUTING] = ids.clone()
    gap = (with_replay.score(batch) - without.score(batch)).abs().max().item()
    if gap > 1e-6:
        raise RuntimeError(f"replay of the router's own choice changes log-probs by {gap:.1e}")

    def passes(is_replayed: bool) -> None:
        rows = pack_trajectories(
            batch, torch.ones(len(batch)), task["micro_batch_tokens"], with_routing=is_replayed
        )
        trainer.forward_backward(rows, lambda index, logprobs, entropy: -logprobs.mean())
        trainer.optimizers.zero_grad()

    repeats = task["repeats"]
    return {
        "forward and backward": alternate(
            {"with": lambda: passes(True), "without": lambda: passes(False)}, repeats
        ),
        "scoring": alternate(
            {"with": lambda: with_replay.score(batch), "without": lambda: without.score(batch)},
            repeats,
        ),
    }


def measure_engines(task: dict[str, Any]) -> dict[str, Any]:
    """Time whole responses by two engines of this process.

    Raises:
        RuntimeError: if they sample different tokens, or fewer than asked for.
    """
    from rollverify.config.tables import EngineConfig
    from rollverify.engine.engine import GenerationRequest
    from rollverify.engine.generation import run_requests
    from rollverify.engine.vllm_engine import VllmEngine

    number, size = task["sequences"], task["response_tokens"]
    engines = {
        name: VllmEngine(
            task["folder"],
            EngineConfig(max_num_seqs=number, kv_cache_gib=0.5, gpu_memory_utilization=0.2),
            stop_token_ids=(MOE_CONFIG["eos_token_id"],),
            max_model_len=PROMPT_TOKENS + size,
            seed=0,
            record_routing=name == "with",
        )
        for name in ("with", "without")
    }
    requests = [
        GenerationRequest(
            request_id=str(index),
            token_ids=tuple(one["prompt_ids"].tolist()),
            max_tokens=size,
            seed=index,
            temperature=1.0,
        )
        for index, one in enumerate(trajectories(number, 1))
    ]
    sampled: dict[str, Any] = {}

    def decode(name: str) -> None:
        engines[name].reset_prefix_cache()
        done = run_requests(engines[name], requests)
        sampled[name] = [list(done[one.request_id].token_ids) for one in requests]

    times = alternate(
        {"with": lambda: decode("with"), "without": lambda: decode("without")}, task["repeats"]
    )
    if sampled["with"] != sampled["without"]:
        raise RuntimeError("the engine samples other tokens when it records experts")
    if any(len(ids) != size for ids in sampled["with"]):
        raise RuntimeError("a response stopped early, so the passes are not of equal length")
    return {"decode": times}


def measure_all(task: dict[str, Any]) -> dict[str, Any]:
    """Time every pair.

    Args:
        task: "folder", "scratch", "sequences", "response_tokens", "micro_batch_tokens", "repeats".

    Returns:
        "pairs": what `alternate` gives by name; bytes held per token, of experts and of the rest.
    """
    from rollverify.rollout.trajectory import ROUTING, num_tokens

    batch = trajectories(task["sequences"], task["response_tokens"])
    trainer = base_trainer(task["folder"], task["scratch"])
    pairs = measure_trainer(task, trainer, batch)
    pairs |= measure_engines(task)
    sizes = {
        key: sum(one[key].numel() * one[key].element_size() for one in batch)
        for key in batch[0].keys()  # noqa: SIM118 - a TensorDict iterates over its batch
    }
    tokens = sum(map(num_tokens, batch))
    routing = sizes.pop(ROUTING)
    return {
        "pairs": pairs,
        "tokens": tokens,
        "routing_bytes_per_token": routing / tokens,
        "other_bytes_per_token": sum(sizes.values()) / tokens,
    }


def table(pairs: dict[str, Any]) -> list[list[str]]:
    """Medians; the ratios are medians of the rounds' ratios."""
    rows = [["", "without", "with", "wall ratio", "highest", "CPU ratio"]]
    for name, sides in pairs.items():
        ratios = {
            clock: [
                with_s / without_s
                for with_s, without_s in zip(
                    sides["with"][clock], sides["without"][clock], strict=True
                )
            ]
            for clock in ("wall_s", "cpu_s")
        }
        rows.append(
            [
                name,
                *(f"{statistics.median(sides[s]['wall_s']):.3f} s" for s in ("without", "with")),
                f"{statistics.median(ratios['wall_s']):.3f}",
                f"{max(ratios['wall_s']):.3f}",
                f"{statistics.median(ratios['cpu_s']):.3f}",
            ]
        )
    return rows


def main() -> None:
    """Measure and print the table."""
    set_defaults()
    task = child_task()
    if task is not None:
        answer(measure_all(task))
    parser = argparse.ArgumentParser(description="What routing replay costs.")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    if arguments.response_tokens > LONGEST:
        parser.error(f"--response-tokens must be <= {LONGEST}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_endless_folder(Path(scratch) / "model", 1, MOE_CONFIG)
        print(f"{num_parameters(folder) / 1e6:.2f}M parameters, {arguments.sequences} responses")
        result = measure(
            "benchmarks.routing_replay",
            {
                "folder": str(folder),
                "scratch": scratch,
                "sequences": arguments.sequences,
                "response_tokens": arguments.response_tokens,
                "micro_batch_tokens": arguments.micro_batch_tokens,
                "repeats": arguments.repeats,
            },
        )
    held, rest = result["routing_bytes_per_token"], result["other_bytes_per_token"]
    print(f"held per token: {held:.1f} bytes of experts beside {rest:.1f} of everything else")
    print(f"target: wall ratio <= {TARGET}")
    report(table(result["pairs"]), result, arguments.output)


if __name__ == "__main__":
    main()
