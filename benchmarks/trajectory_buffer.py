"""Memory and speed of the trajectory buffer, no engine: `python -m benchmarks.trajectory_buffer`.

Memory: a buffer with two segments per response against the bytes of its arrays, once as what the
allocator has handed out (Python objects included: the child runs with PYTHONMALLOC=malloc) and once
as growth of the resident set, which also holds gaps that later allocations fill. Each in a fresh
process. Speed: the requests' side of a pause and a resume, on an engine that answers at once, and
the rank file; one thread, so that processor time means something on busy cores. glibc only.
"""

import argparse
import ctypes
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.isolated import answer, child_task, measure, report
from benchmarks.logprob_memory import status_bytes

GROUP_SIZE = 8
PROMPT_TOKENS = 32
LIMIT = 1_000_000
STOP_TOKEN_ID = 1
MEMORY_TARGET, PAUSE_TARGET_S = 1.5, 0.5
MIB = 2**20


class _HeapInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _names_ = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names_.split()]


def allocated_bytes() -> int:
    """Bytes that malloc has handed out and not taken back."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = _HeapInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def filled_buffer(num_trajectories: int, response_tokens: int) -> Any:
    """A buffer whose responses have two segments of equal length."""
    from rollverify.rollout.buffer import TrajectoryBuffer
    from rollverify.rollout.trajectory import new_trajectory

    buffer = TrajectoryBuffer(group_size=GROUP_SIZE)
    for group_id in range(num_trajectories // GROUP_SIZE):
        buffer.add_group(
            [
                new_trajectory(
                    prompt_ids=range(PROMPT_TOKENS),
                    group_id=group_id,
                    prompt_index=group_id,
                    sample_index=index,
                )
                for index in range(GROUP_SIZE)
            ]
        )
    size = response_tokens // 2
    for version in range(2):
        for one in buffer.trajectories():
            buffer.append(
                one, list(range(size)), [-0.5] * size, policy_version=version, seed=version
            )
    return buffer


def measure_memory(task: dict[str, Any]) -> dict[str, Any]:
    """Build a buffer and compare.

    Args:
        task: "num_trajectories", "response_tokens".

    Returns:
        "raw_bytes" of the arrays, "storage_bytes" behind them, "allocated_bytes",
        "resident_bytes", "num_tokens".
    """
    filled_buffer(GROUP_SIZE, task["response_tokens"])  # libraries have set up what they keep
    gc.collect()
    before = (allocated_bytes(), status_bytes("VmRSS"))
    buffer = filled_buffer(task["num_trajectories"], task["response_tokens"])
    gc.collect()
    after = (allocated_bytes(), status_bytes("VmRSS"))
    arrays = [array for one in buffer.trajectories() for array in one.values()]
    return {
        "raw_bytes": sum(array.numel() * array.itemsize for array in arrays),
        "storage_bytes": sum(array.untyped_storage().nbytes() for array in arrays),
        "allocated_bytes": after[0] - before[0],
        "resident_bytes": after[1] - before[1],
        "num_tokens": buffer.num_tokens,
    }


class InstantEngine:
    """Gives every request the same new tokens when it is paused."""

    num_unfinished = 0

    def __init__(self, new_tokens: int) -> None:
        self._ids = [7] * new_tokens
        self._logprobs = [-0.5] * new_tokens
        self._requests: list[Any] = []

    def add_request(self, request: Any) -> None:
        """Keep it."""
        self._requests.append(request)

    def pause(self) -> list[Any]:
        """Answer all."""
        from rollverify.engine.engine import Completion

        requests, self._requests = self._requests, []
        return [
            Completion(
                request_id=request.request_id,
                token_ids=list(self._ids),
                logprobs=list(self._logprobs),
                finish_reason="paused",
            )
            for request in requests
        ]


def seconds_of(run: Callable[[], object]) -> tuple[float, float]:
    """(seconds, seconds of processor time) of one call."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start_s, time.process_time() - start_cpu_s


def measure_speed(task: dict[str, Any]) -> dict[str, Any]:
    """Repeat resume, pause, cut and the rank file.

    Args:
        task: "num_trajectories", "response_tokens", "new_tokens", "repeats".

    Returns:
        (seconds, processor seconds) of each repeat: "resume_s" (requests made), "pause_s" (segments
        appended), "cut_s" (half of what is new is cut again), "save_s", "load_s"; and "file_bytes".
    """
    import torch

    from rollverify.checkpoint.rank_file import load_rank_file, save_rank_file
    from rollverify.config.tables import RolloutConfig
    from rollverify.rollout.requests import RequestLoop

    torch.set_num_threads(1)
    buffer = filled_buffer(task["num_trajectories"], task["response_tokens"])
    trajectories = buffer.trajectories()
    loop = RequestLoop(
        engine=InstantEngine(task["new_tokens"]),  # type: ignore[arg-type]  # no weights, no steps
        buffer=buffer,
        prompts=[],
        rollout=RolloutConfig(max_response_tokens=LIMIT),
        stop_token_ids=(STOP_TOKEN_ID,),
        run_seed=0,
    )
    kept = task["response_tokens"] + task["new_tokens"] // 2
    times: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-0.safetensors"
        phases = {
            "resume_s": lambda: [loop.start(one) for one in trajectories],
            "pause_s": loop.pause,
            "cut_s": lambda: [buffer.truncate(one, kept) for one in trajectories],
            "save_s": lambda: save_rank_file(path, trajectories, buffer.state_dict()),
            "load_s": lambda: load_rank_file(path),
            "restore_s": lambda: [
                buffer.truncate(one, task["response_tokens"]) for one in trajectories
            ],
        }
        for repeat in range(task["repeats"]):
            loop.begin(2 + repeat, len(trajectories))
            for name, run in phases.items():
                times.setdefault(name, []).append(seconds_of(run))
        file_bytes = path.stat().st_size
    buffer.check()
    return {**times, "file_bytes": file_bytes}


def memory_rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """One row per response length."""
    rows = [
        ["response tokens", "arrays", "allocated / arrays", "resident / arrays", "per trajectory"]
    ]
    for name, result in results.items():
        raw, allocated = result["raw_bytes"], result["allocated_bytes"]
        overhead = (allocated - raw) / result["num_trajectories"]
        rows.append(
            [
                name,
                f"{raw / MIB:.1f} MiB",
                f"{allocated / raw:.2f}",
                f"{result['resident_bytes'] / raw:.2f}",
                f"{overhead / 1000:.1f} kB",
            ]
        )
    return rows


def speed_rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """One row per response length, medians."""
    names = ["resume_s", "pause_s", "cut_s", "save_s", "load_s"]
    titles = [name.removesuffix("_s") for name in names]
    rows = [["response tokens", *titles, "pause + resume", "processor time of it"]]
    for length, result in results.items():
        medians = [
            [statistics.median(pair[clock] for pair in result[name]) for name in names]
            for clock in range(2)
        ]
        sums = [sum(clock[:3]) for clock in medians]
        rows.append([length, *(f"{1e3 * value:.0f} ms" for value in [*medians[0], *sums])])
    return rows


def main() -> None:
    """Measure and print both tables."""
    task = child_task()
    if task is not None:
        answer(measure_speed(task) if "new_tokens" in task else measure_memory(task))
    parser = argparse.ArgumentParser(description="Memory and speed of the trajectory buffer.")
    parser.add_argument("--tokens", type=int, default=100_000, help="response tokens held")
    parser.add_argument("--trajectories", type=int, default=1000, help="paused and resumed")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1000, 60])
    parser.add_argument("--new-tokens", type=int, default=100, help="of each resumed segment")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    memory, speed = {}, {}
    for length in arguments.lengths:
        count = max(arguments.tokens // length // GROUP_SIZE, 1) * GROUP_SIZE
        held = {"num_trajectories": count, "response_tokens": length}
        exact = measure("benchmarks.trajectory_buffer", held, PYTHONMALLOC="malloc")
        usual = measure("benchmarks.trajectory_buffer", held)
        memory[str(length)] = {**held, **exact, "resident_bytes": usual["resident_bytes"]}
        moved = {
            "num_trajectories": arguments.trajectories,
            "response_tokens": length,
            "new_tokens": arguments.new_tokens,
            "repeats": arguments.repeats,
        }
        speed[str(length)] = {**moved, **measure("benchmarks.trajectory_buffer", moved)}
    print(f"{arguments.tokens} response tokens; target: at 1000 a trajectory <= {MEMORY_TARGET}")
    report(memory_rows(memory), {"memory": memory, "speed": speed}, arguments.output)
    print(
        f"{arguments.trajectories} trajectories, {arguments.new_tokens} new tokens each, half cut; "
        f"target: pause + resume < {PAUSE_TARGET_S} s"
    )
    report(speed_rows(speed), {}, None)


if __name__ == "__main__":
    main()
