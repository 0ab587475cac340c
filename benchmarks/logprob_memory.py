"""Memory of log-probs and entropy: `python -m benchmarks.logprob_memory`.

Forward and backward of the output head for T tokens (gradient through the log-probs; entropy is a
metric, as in training), once with [T, V] logits and once with `chunked_logprobs`, each in a fresh
process. Memory is the peak of the resident set minus the resident set before. Linux only (/proc).
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.isolated import answer, child_task, measure, report

VOCAB_SIZE = 151_936
WIDTH = 64
GIB = 2**30
FLOAT32_BYTES = 4
NAIVE_COPIES = 4
"""[T, V] tensors that the naive version holds at its peak, with one to spare."""


def status_bytes(key: str) -> int:
    """A value of /proc/self/status, e.g. VmRSS (resident now) or VmHWM (peak so far), bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def available_bytes() -> int:
    """Memory that can be taken without swapping, bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def naive(hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any]:
    """The textbook version: logits and log-softmax of all tokens at once."""
    import torch

    logprobs = torch.log_softmax(hidden @ weight.T, dim=-1)
    chosen = logprobs.gather(1, targets[:, None]).squeeze(1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return chosen, entropy


def chunked(hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any]:
    """The trainer's head, with the default chunk size."""
    from torchtitan_ext.logprob_head import chunk_tokens, chunked_logprobs

    return chunked_logprobs(hidden, weight, targets, chunk=chunk_tokens(VOCAB_SIZE, 64))


VERSIONS = {"naive": naive, "chunked": chunked}


def measure_version(task: dict[str, Any]) -> dict[str, Any]:
    """Run one version.

    Args:
        task: "version", "tokens".

    Returns:
        "peak_bytes", "seconds" and checksums "logprob", "entropy", "grad_hidden", "grad_weight".
    """
    import torch

    import torchtitan_ext.logprob_head  # noqa: F401 (its import is not what is measured)

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(task["tokens"], WIDTH, generator=generator, requires_grad=True)
    weight = (torch.randn(VOCAB_SIZE, WIDTH, generator=generator) * 0.1).requires_grad_()
    targets = torch.randint(VOCAB_SIZE, (task["tokens"],), generator=generator)
    version = VERSIONS[task["version"]]
    version(hidden[:2], weight, targets[:2])[0].sum().backward()  # threads and kernels are up
    hidden.grad = weight.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status_bytes("VmRSS")
    start_s = time.perf_counter()
    logprobs, entropy = version(hidden, weight, targets)
    logprobs.mean().backward()
    seconds = time.perf_counter() - start_s
    peak = status_bytes("VmHWM") - before
    return {
        "peak_bytes": peak,
        "seconds": seconds,
        "logprob": logprobs.mean().item(),
        "entropy": entropy.mean().item(),
        "grad_hidden": hidden.grad.abs().sum().item(),
        "grad_weight": weight.grad.abs().sum().item(),
    }


def check_agreement(results: dict[str, dict[str, Any]]) -> None:
    """Refuse a comparison of two versions that computed different things.

    Raises:
        RuntimeError: if a checksum differs by more than 1e-3, relative.
    """
    for key in ("logprob", "entropy", "grad_hidden", "grad_weight"):
        values = [result[key] for result in results.values()]
        if abs(values[0] - values[1]) > 1e-3 * abs(values[0]):
            raise RuntimeError(f"{key} differs: {values}")


def main() -> None:
    """Measure both versions and print the table."""
    task = child_task()
    if task is not None:
        answer(measure_version(task))
    parser = argparse.ArgumentParser(description="Memory of log-probs and entropy.")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    needed = NAIVE_COPIES * arguments.tokens * VOCAB_SIZE * FLOAT32_BYTES
    if available_bytes() < needed:
        sys.exit(
            f"error: the naive version needs about {needed / GIB:.0f} GiB for {arguments.tokens} "
            f"tokens, {available_bytes() / GIB:.1f} GiB are free; give fewer --tokens"
        )
    results = {
        name: measure("benchmarks.logprob_memory", {"version": name, "tokens": arguments.tokens})
        for name in VERSIONS
    }
    check_agreement(results)
    rows = [["version", "peak memory", "seconds"]]
    for name, result in results.items():
        size = f"{result['peak_bytes'] / GIB:.2f} GiB"
        rows.append([name, size, f"{result['seconds']:.1f}"])
    ratios = [results["naive"][key] / results["chunked"][key] for key in ("peak_bytes", "seconds")]
    rows.append(["naive / chunked", *(f"{ratio:.2f}" for ratio in ratios)])
    print(f"T = {arguments.tokens}, V = {VOCAB_SIZE}, D = {WIDTH}, float32; target: memory >= 5")
    report(rows, {"tokens": arguments.tokens, "results": results}, arguments.output)


if __name__ == "__main__":
    main()
