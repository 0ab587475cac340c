"""Fixtures of the torchtitan tests: no engine is started here."""

import os
from collections.abc import Iterator

import pytest

# The trainer loads vLLM's kernels; its own logging would stay on for all tests that follow.
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")


@pytest.fixture(scope="session", autouse=True)
def _leave_no_process_group() -> Iterator[None]:
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
