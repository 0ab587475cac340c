"""GPUs that cannot be used: one line with the cure, before anything is loaded. Faked devices."""

from pathlib import Path

import pytest
import torch

from rollverify.config.tables import Config, EngineConfig, RunConfig
from rollverify.errors import ConfigError
from rollverify.launch.devices import check_devices, listed_driver

GIB = 2**30


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLVERIFY_DEVICE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def fake_gpus(
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    free_gib: float = 79.0,
    capability: tuple[int, int] = (9, 0),
) -> list[int]:
    """Pretend that torch sees so many GPUs of 80 GiB; returns those whose memory was asked for."""
    asked: list[int] = []

    def memory(device: int) -> tuple[int, int]:
        asked.append(device)
        return int(free_gib * GIB), 80 * GIB

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    return asked


def fake_nvidia_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin")


def test_a_machine_without_gpus_passes(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    check_devices(Config())
    fake_nvidia_smi(monkeypatch, tmp_path, "echo 'No devices were found'; exit 6")
    check_devices(Config())


def test_a_driver_that_torch_cannot_use_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    fake_nvidia_smi(monkeypatch, tmp_path, "echo 550.54.14; echo 550.54.14")
    assert listed_driver() == "550.54.14"
    with pytest.raises(ConfigError, match=r"driver 550\.54\.14.*CUDA 13\.0.*580.*=cpu"):
        check_devices(Config())
    monkeypatch.setenv("ROLLVERIFY_DEVICE", "cpu")
    check_devices(Config())


def test_a_cpu_build_of_torch_is_meant(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    fake_nvidia_smi(monkeypatch, tmp_path, "echo 550.54.14")
    check_devices(Config())


def test_more_ranks_than_gpus_are_refused(monkeypatch) -> None:
    asked = fake_gpus(monkeypatch, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "3")
    check_devices(Config())
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(ConfigError, match=r"8 ranks were started and torch sees 4 GPUs.*NGPU=4"):
        check_devices(Config())
    assert asked == [3]


def test_a_rank_that_is_shown_its_own_gpu_alone_passes(monkeypatch) -> None:
    asked = fake_gpus(monkeypatch, 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="NGPU=1"):
        check_devices(Config())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    check_devices(Config())
    assert asked == [0]


def test_a_gpu_that_others_use_is_refused_unless_a_share_is_asked_for(monkeypatch) -> None:
    """90 % of 80 GiB are 72."""
    fake_gpus(monkeypatch, 1, free_gib=72.5)
    check_devices(Config())
    fake_gpus(monkeypatch, 1, free_gib=71.5)
    with pytest.raises(ConfigError, match=r"GPU 0 has 71\.5 of 80\.0 GiB free.*VISIBLE_DEVICES"):
        check_devices(Config())
    check_devices(Config(engine=EngineConfig(gpu_memory_utilization=0.3)))


def test_deterministic_kernels_need_hopper(monkeypatch) -> None:
    config = Config(run=RunConfig(deterministic=True))
    fake_gpus(monkeypatch, 1, capability=(9, 0))
    check_devices(config)
    fake_gpus(monkeypatch, 1, capability=(8, 0))
    with pytest.raises(ConfigError, match=r"run\.deterministic needs .* has 8\.0"):
        check_devices(config)
