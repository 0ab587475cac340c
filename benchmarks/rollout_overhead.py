"""Rollout phase against the bare engine: `python -m benchmarks.rollout_overhead`.

One vLLM engine per model and process. The rollout phase (`OnPolicyRollouter.collect`: requests,
engine loop, rewards, trajectories) and a bare `add_request` / `step` loop over the same engine take
turns, with the same prompts, seeds and sampling settings; both must sample the same tokens.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.folders import num_parameters, prepared_base, write_endless_folder
from benchmarks.isolated import answer, child_task, measure, report
from rollverify.config.environment import set_defaults

GROUP_SIZE = 8
MAX_PROMPT_TOKENS = 32
TEMPERATURE = 1.0
TARGET = 0.9


def build(task: dict[str, Any]) -> tuple[Any, Any, list[Any]]:
    """Load model, prompts and engine of a task.

    Returns:
        (model folder, engine, encoded prompts).
    """
    from rollverify.config.tables import EngineConfig
    from rollverify.engine.model_folder import read_model_folder
    from rollverify.engine.vllm_engine import VllmEngine
    from rollverify.rewards import exact_answer
    from rollverify.rollout.inputs import load_encoded

    context = MAX_PROMPT_TOKENS + task["max_response_tokens"]
    model = read_model_folder(Path(task["folder"]), context)
    train_file = model.path / "train.jsonl"
    _, prompts = load_encoded(train_file, model, MAX_PROMPT_TOKENS, exact_answer)
    engine = VllmEngine(
        str(model.path),
        EngineConfig(max_num_seqs=max(task["sequences"])),
        stop_token_ids=model.stop_token_ids,
        max_model_len=context,
        seed=0,
    )
    return model, engine, prompts


def make_rollouter(
    engine: Any, prompts: list[Any], task: dict[str, Any], stop_token_ids: tuple[int, ...]
) -> Any:
    """On-policy phases of all prompts."""
    from rollverify.config.tables import DynamicSamplingConfig, RolloutConfig
    from rollverify.losses.advantages import has_signal
    from rollverify.ranks import Ranks
    from rollverify.rollout.buffer import TrajectoryBuffer
    from rollverify.rollout.ledger import PromptLedger
    from rollverify.rollout.prompt_queue import PromptQueue
    from rollverify.rollout.requests import RequestLoop
    from rollverify.rollout.rollouter import Rollouter

    rollout = RolloutConfig(
        prompts_per_step=len(prompts),
        max_response_tokens=task["max_response_tokens"],
        temperature=TEMPERATURE,
    )
    buffer = TrajectoryBuffer(group_size=GROUP_SIZE)
    stream = ([prompt] for prompt in itertools.cycle(prompts))
    by_index = {prompt.prompt_index: prompt for prompt in prompts}
    loop = RequestLoop(
        engine=engine,
        buffer=buffer,
        prompts=by_index,  # type: ignore[arg-type]  # looked up by index only
        rollout=rollout,
        stop_token_ids=stop_token_ids,
        run_seed=0,
    )
    return Rollouter(
        loop=loop,
        buffer=buffer,
        queue=PromptQueue(batches=stream, prompts=prompts, ranks=Ranks()),
        ledger=PromptLedger(),
        rollout=rollout,
        num_in_flight=1,
        max_num_seqs=max(task["sequences"]),
        is_on_policy=True,
        must_be_verified=False,
        ranks=Ranks(),
        dynamic_sampling=DynamicSamplingConfig(),
        has_signal=has_signal,
    )


def time_rollout(
    engine: Any, prompts: list[Any], task: dict[str, Any], stop_token_ids: tuple[int, ...]
) -> tuple[float, list[list[int]]]:
    """One rollout phase from group 0.

    Returns:
        (seconds, sampled ids by group and sample).
    """
    rollouter = make_rollouter(engine, prompts, task, stop_token_ids)
    engine.reset_prefix_cache()
    start_s = time.perf_counter()
    finished, _ = rollouter.collect(0)
    seconds = time.perf_counter() - start_s
    return seconds, [trajectory["response_ids"].tolist() for trajectory in finished]


def time_bare(
    engine: Any, prompts: list[Any], task: dict[str, Any], stop_token_ids: tuple[int, ...]
) -> tuple[float, list[list[int]]]:
    """The same work by the engine alone; requests and settings are made outside the timer.

    Returns:
        (seconds, sampled ids by group and sample).
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from rollverify.engine.generation import request_seed

    llm = engine._engine
    requests = [
        (
            f"{group}/{sample}",
            {"prompt_token_ids": list(prompt.token_ids)},
            SamplingParams(
                temperature=TEMPERATURE,
                max_tokens=task["max_response_tokens"],
                seed=request_seed(0, group, sample, 0),
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                stop_token_ids=list(stop_token_ids),
                output_kind=RequestOutputKind.FINAL_ONLY,
                watermarking=False,
            ),
        )
        for group, prompt in enumerate(prompts)
        for sample in range(GROUP_SIZE)
    ]
    engine.reset_prefix_cache()
    outputs = []
    start_s = time.perf_counter()
    for request in requests:
        llm.add_request(*request)
    engine._threads.add(sum(len(prompt["prompt_token_ids"]) for _, prompt, _ in requests))
    while llm.has_unfinished_requests():
        with engine._threads.of_step(engine.num_unfinished):
            outputs += llm.step()
    seconds = time.perf_counter() - start_s
    ids = {out.request_id: list(out.outputs[0].token_ids) for out in outputs if out.finished}
    return seconds, [ids[name] for name, _, _ in requests]


def measure_model(task: dict[str, Any]) -> dict[str, Any]:
    """Alternate both loops at each size, each going first as often as the other.

    Args:
        task: "folder", "sequences" (list), "max_response_tokens", "repeats".

    Returns:
        {sequences: {"tokens", "rollout_s" and "bare_s" (lists)}}.

    Raises:
        RuntimeError: if the two loops sampled different tokens.
    """
    model, engine, prompts = build(task)
    loops = {
        "rollout_s": lambda part: time_rollout(engine, part, task, model.stop_token_ids),
        "bare_s": lambda part: time_bare(engine, part, task, model.stop_token_ids),
    }
    results: dict[str, Any] = {}
    for size in task["sequences"]:
        part = prompts[: size // GROUP_SIZE]
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        expected = loops["bare_s"](part)[1]  # a first pass, not counted
        for repeat in range(task["repeats"]):
            order = list(loops) if repeat % 2 == 0 else list(reversed(loops))
            for name in order:
                elapsed_s, ids = loops[name](part)
                seconds[name].append(elapsed_s)
                if ids != expected:
                    raise RuntimeError(f"{name} sampled other tokens than the first pass")
        results[str(size)] = {"tokens": sum(map(len, expected)), **seconds}
    return results


def table(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Medians by model and size; the share is the median of the pairs' ratios."""
    rows = [["model", "sequences", "tokens", "bare tok/s", "rollout tok/s", "share", "lowest"]]
    for name, sizes in results.items():
        for size, values in sizes.items():
            pairs = zip(values["bare_s"], values["rollout_s"], strict=True)
            shares = [bare / rollout for bare, rollout in pairs]
            speeds = [
                f"{values['tokens'] / statistics.median(values[key]):.0f}"
                for key in ("bare_s", "rollout_s")
            ]
            share = f"{100 * statistics.median(shares):.1f} %"
            lowest = f"{100 * min(shares):.1f} %"
            rows.append([name, size, str(values["tokens"]), *speeds, share, lowest])
    return rows


def main() -> None:
    """Measure both models and print the table."""
    set_defaults()
    task = child_task()
    if task is not None:
        answer(measure_model(task))
    parser = argparse.ArgumentParser(description="Rollout phase against the bare engine.")
    parser.add_argument("--base", type=Path, help="prepared base model; default: make or reuse it")
    parser.add_argument("--models", nargs="+", default=["base", "random"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[64, 256, 512])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--random-tokens", type=int, default=128, help="length with the random one")
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.models:
            if name == "base":
                folder, max_tokens = prepared_base(arguments.base), 352
            else:
                folder = write_endless_folder(Path(scratch) / "random", 256)
                max_tokens = arguments.random_tokens
            task = {
                "folder": str(folder.resolve()),
                "sequences": arguments.sequences,
                "max_response_tokens": max_tokens,
                "repeats": arguments.repeats,
            }
            label = f"{name} ({num_parameters(folder) / 1e6:.2f}M)"
            results[label] = measure("benchmarks.rollout_overhead", task)
    print(f"target: share >= {100 * TARGET:.0f} %")
    report(table(results), {"results": results}, arguments.output)


if __name__ == "__main__":
    main()
