"""Engine arguments, device and memory on GPUs, with faked ones."""

from types import SimpleNamespace

import pytest
import torch
from support.tiny_models import tiny_folder

from rollverify.config.tables import EngineConfig
from rollverify.engine.memory import engine_share
from rollverify.engine.vllm_engine import VllmEngine
from rollverify.engine.vllm_gpu import (
    TrainerDeviceExecutor,
    check_device,
    gpu_arguments,
    weight_bytes,
)
from rollverify.errors import ConfigError

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Set the current GPU and its free and total memory, GiB."""

    def become(device: int, free: float, total: float = 80.0) -> None:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda *_: (int(free * GIB), int(total * GIB))
        )

    return become


def test_the_engine_runs_on_the_trainers_gpu(gpu) -> None:
    """Rank 3 of a machine: vLLM by itself would take GPU 0."""
    gpu(3, 80)
    executor = object.__new__(TrainerDeviceExecutor)
    executor.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device="cuda"))
    method, rank, local_rank = executor._distributed_args()
    assert (rank, local_rank) == (0, 3) and method.startswith("file://")
    arguments = gpu_arguments("", EngineConfig(), has_experts=False)
    assert arguments["distributed_executor_backend"] is TrainerDeviceExecutor


def test_vllm_takes_the_executor(gpu) -> None:
    from vllm.v1.executor.abstract import Executor

    parallel = SimpleNamespace(distributed_executor_backend=TrainerDeviceExecutor)
    assert Executor.get_class(SimpleNamespace(parallel_config=parallel)) is TrainerDeviceExecutor


def test_an_engine_elsewhere_is_refused(gpu) -> None:
    gpu(1, 80)
    model = SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device("cuda:0"))] * 2)
    with pytest.raises(ConfigError, match=r"trainer is on GPU 3, .* are on \[0\] and GPU 1"):
        check_device(model, 3)
    with pytest.raises(ConfigError):
        check_device(model, 0)  # Another GPU was made current.
    gpu(0, 80)
    check_device(model, 0)


def test_with_sleep_the_engine_gets_what_is_free_but_a_margin() -> None:
    """80 GiB, 60 free: (60 - 1) / 80 - 0.06 = 0.6775; without sleep a fixed share."""
    assert engine_share(60 * GIB, 80 * GIB, True) == pytest.approx(0.6775)
    assert engine_share(60 * GIB, 80 * GIB, False) == 0.4
    assert engine_share(GIB // 2, 80 * GIB, True) == 0.0


def test_defaults_by_device(gpu) -> None:
    gpu(0, 60)
    arguments = gpu_arguments("", EngineConfig(), has_experts=True)
    assert arguments["gpu_memory_utilization"] == pytest.approx(0.6775)
    assert arguments["enable_sleep_mode"] is True
    assert arguments["moe_backend"] == "triton"
    assert arguments["hf_overrides"] == {"head_dtype": "float32"}
    given = gpu_arguments(
        "", EngineConfig(gpu_memory_utilization=0.2, sleep=False), has_experts=False
    )
    assert given["gpu_memory_utilization"] == 0.2
    assert given["enable_sleep_mode"] is False and "moe_backend" not in given


def test_too_little_memory_is_one_line_before_weights_are_read(gpu, tmp_path) -> None:
    folder = tiny_folder(tmp_path)
    size = weight_bytes(str(folder), "bfloat16")
    assert size * 2 == weight_bytes(str(folder), "float32")
    on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))  # float32
    assert size == pytest.approx(on_disk / 2, rel=0.02)
    gpu(0, free=size / GIB + 1, total=2)  # (1 + w) - 1 - 0.12 GiB are less than w
    with pytest.raises(ConfigError, match=r"its weights alone are 0\.0; raise engine\.gpu_memory"):
        gpu_arguments(str(folder), EngineConfig(dtype="bfloat16"), has_experts=False)
    gpu(0, free=20, total=80)
    with pytest.raises(ConfigError, match=r"0\.50 asks for 40\.0; lower it"):
        gpu_arguments(str(folder), EngineConfig(gpu_memory_utilization=0.5), has_experts=False)


def test_memory_is_looked_at_before_it_changes_hands() -> None:
    events: list[object] = []
    engine = VllmEngine.__new__(VllmEngine)
    engine._engine = SimpleNamespace(
        get_num_unfinished_requests=lambda: 0,
        sleep=lambda level: events.append(f"sleep {level}"),
        wake_up=events.append,
    )
    engine._sleeps, engine._asleep = True, set()
    engine.before_memory_changes(lambda: events.append("look"))
    engine.sleep()
    engine.sleep()
    engine.wake("weights")
    engine.wake("weights")
    engine.wake("kv_cache")
    assert events == ["look", "sleep 2", "look", ["weights"], "look", ["kv_cache"]]
