"""Tests of what only a GPU can show; they skip where torch sees none.

ROLLVERIFY_GPU_TESTS=cpu runs their bodies on the CPU instead, but for what is about the memory of a
GPU, so that none is misspelt. Bounds marked "not measured" wait for the first run on a GPU.
"""

import os

import pytest
import torch

HERE = os.path.dirname(__file__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_cpu = os.environ.get("ROLLVERIFY_GPU_TESTS") == "cpu"
    number = torch.cuda.device_count()
    for item in items:
        if not str(item.path).startswith(HERE):
            continue
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if number < needed and not on_cpu:
            reason = f"needs {needed} CUDA device(s), torch sees {number}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where trainer and engine live."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
