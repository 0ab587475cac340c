"""Environment variables that libraries read when they are loaded; what the user has set stays.

Call `set_defaults` before torch or vLLM are imported. The launcher also starts its processes with
them: the C library reads its own at the very start.
"""

import os

DEFAULTS = {
    # How long a waiting OpenMP thread spins before it sleeps. Long spinning starves other threads
    # as soon as anything else runs on the cores (decoding fell from 19k to 1.4k tokens/s);
    # sleeping at once costs more than a small kernel takes (6 ms per decode step became 13).
    "GOMP_SPINCOUNT": "1000",
    # The C library keeps freed memory for the next forward pass, instead of giving it back and
    # having it cleared page by page again: 40k page faults and a fifth of a pass's processor time.
    "MALLOC_MMAP_THRESHOLD_": str(256 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
    # The engine lives in this process, so weights are handed over in memory.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Several ranks share the cores; vLLM would pin each of them to all.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Rows of other lengths in every step would leave holes in the memory of a GPU.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # torch's C++ warnings (NUMA binding and the like) are of no use on the console.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


DETERMINISTIC = {
    # vLLM's kernels that give a token the same log-prob whatever else is in the batch.
    "VLLM_BATCH_INVARIANT": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""For run.deterministic; CPUs repeat a run without them."""


def set_defaults(*, deterministic: bool = False) -> None:
    """Set each variable of `DEFAULTS` that is not set, and those that make GPUs repeat a run."""
    for name, value in (DEFAULTS | (DETERMINISTIC if deterministic else {})).items():
        os.environ.setdefault(name, value)
