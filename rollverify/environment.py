"""Environment variables that the libraries read once, when they are loaded.

Call `set_defaults` before torch or vLLM are imported. What the user has set is left alone.
"""

import os

DEFAULTS = {
    # How long a waiting OpenMP thread spins before it sleeps. Long spinning starves other threads
    # as soon as anything else runs on the cores (decoding fell from 19k to 1.4k tokens/s);
    # sleeping at once costs more than a small kernel takes (6 ms per decode step became 13).
    "GOMP_SPINCOUNT": "1000",
    # The engine lives in this process, so weights are handed over in memory.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Several ranks share the cores; vLLM would pin each of them to all.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # torch's C++ warnings (NUMA binding and the like) are of no use on the console.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def set_defaults() -> None:
    """Set each variable of `DEFAULTS` that is not set."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
