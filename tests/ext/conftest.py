"""Fixtures of the torchtitan tests: no engine is started here and vllm is not imported."""

from collections.abc import Iterator

import pytest

from torchtitan_ext.cpu_backend import install_cpu_backend

install_cpu_backend()


@pytest.fixture(scope="session", autouse=True)
def _leave_no_process_group() -> Iterator[None]:
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
