"""The optimizer's state in main memory: what is moved, and that steps and checkpoints are the same.

Another device is played by "meta", and by copies on the CPU where values matter.
"""

from pathlib import Path

import pytest
import torch
from support.tiny_models import full_parameters, take_steps, tiny_folder, tiny_trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_ext import optimizer_offload
from torchtitan_ext.optimizer_offload import OptimizerOffload, moved

META = torch.device("meta")


def states_of(trainer) -> list[Tensor]:
    return [
        value
        for optimizer in trainer.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Move by copying on the CPU; returns the devices asked for."""
    asked: list[str] = []

    def copied(value: Tensor, device: torch.device) -> Tensor:
        asked.append(device.type)
        local = value.to_local() if isinstance(value, DTensor) else value
        if not isinstance(value, DTensor):
            return local.clone()
        return DTensor(local.clone(), value._spec, requires_grad=False)

    monkeypatch.setattr(optimizer_offload, "moved", copied)
    return asked


def test_moments_are_moved_and_the_count_of_steps_stays(tmp_path: Path) -> None:
    trainer = tiny_trainer(tiny_folder(tmp_path / "model"), tmp_path / "run")
    take_steps(trainer, 1)
    num_values = sum(p.numel() for p in trainer.model.parameters())
    assert trainer.optimizer_bytes == 2 * 4 * num_values
    OptimizerOffload(trainer.optimizers, META).to_device()
    moments = [value for value in states_of(trainer) if value.ndim]
    assert sum(value.numel() for value in moments) == 2 * num_values
    assert {value.to_local().device for value in moments if isinstance(value, DTensor)} <= {META}
    assert {value.device.type for value in states_of(trainer) if not value.ndim} == {"cpu"}
    trainer.close()


def test_a_sharded_tensor_keeps_its_layout(tmp_path: Path) -> None:
    trainer = tiny_trainer(tiny_folder(tmp_path / "model"), tmp_path / "run")
    weight = next(p for p in trainer.model.parameters() if isinstance(p, DTensor))
    there = moved(weight.detach(), META)
    assert isinstance(there, DTensor) and there.to_local().device == META
    assert (there.device_mesh, there.placements) == (weight.device_mesh, weight.placements)
    assert there.shape == weight.shape and there.dtype == weight.dtype
    same = weight.detach()
    assert moved(same, torch.device("cpu")) is same
    trainer.close()


def test_steps_and_checkpoints_are_the_same(tmp_path: Path, copies: list[str]) -> None:
    folder = tiny_folder(tmp_path / "model")
    plain = tiny_trainer(folder, tmp_path / "plain")
    take_steps(plain, 2)
    take_steps(plain, 1, seed=1)
    want = full_parameters(plain)
    plain.close()
    assert copies == []
    trainer = tiny_trainer(folder, tmp_path / "run", offload_optimizer=True)
    assert trainer.optimizer_bytes == 0
    take_steps(trainer, 2)
    assert copies[-1] == "cpu"
    trainer.checkpointer.save(2)
    trainer.close()
    again = tiny_trainer(folder, tmp_path / "run", offload_optimizer=True)
    again.checkpointer.load(2)
    again.offload_optimizer()
    take_steps(again, 1, seed=1)
    got = full_parameters(again)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    again.close()
