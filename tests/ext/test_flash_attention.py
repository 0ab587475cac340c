"""Which FlashAttention is used, with faked GPUs: the trainer is built on every one of them."""

import sys
import types

import pytest
import torch
from support.tiny_models import tiny_folder, tiny_moe_folder
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.tools import utils

from torchtitan_ext.cpu.attention import PackedSDPA, _plan_of
from torchtitan_ext.cpu.experts import Float32Experts
from torchtitan_ext.cpu.kernels import KernelRMSNorm
from torchtitan_ext.flash_attention import AttentionError, use_flash_attention
from torchtitan_ext.logprob_head import LogprobHead
from torchtitan_ext.models.specs import model_spec_from_hf
from torchtitan_ext.trainer_config import TrainerSettings, _model_spec


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Set the capability that torch and torchtitan see."""
    # Put back what `use_flash_attention` replaces.
    original = utils.get_cuda_flash_attention_impl
    monkeypatch.setattr(utils, "get_cuda_flash_attention_impl", original)

    def become(major: int, minor: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))

    return become


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch):
    """Pretend that the package of FA3 is installed, with or without a backward pass."""

    def install(*operators: str) -> None:
        module = types.ModuleType("flash_attn_interface")
        monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
        namespace = types.SimpleNamespace(**dict.fromkeys(operators))
        monkeypatch.setattr(torch.ops, "flash_attn_3", namespace, raising=False)

    return install


def built(folder) -> torch.nn.Module:
    """The model with torchtitan's own attention, as on a GPU."""
    with torch.device("meta"):
        return model_spec_from_hf(folder).model.build()


@pytest.mark.parametrize("major", [9, 10])
def test_without_the_package_torchtitan_alone_cannot_build(gpu, tmp_path, major: int) -> None:
    """What the replacement is for; once this builds, it can go."""
    gpu(major)
    with pytest.raises(ModuleNotFoundError, match="flash_attn"):
        built(tiny_folder(tmp_path))


@pytest.mark.parametrize("major", [8, 9, 10, 12])
def test_the_trainer_is_built_with_what_torch_has(gpu, tmp_path, major: int) -> None:
    gpu(major)
    assert use_flash_attention("auto") == "FA2"
    model = built(tiny_folder(tmp_path))
    assert any(isinstance(module, VarlenAttention) for module in model.modules())


def test_fa3_is_used_where_its_package_can_train(gpu, fa3) -> None:
    gpu(9)
    fa3("fwd", "bwd")
    assert use_flash_attention("auto") == "FA3"
    assert utils.get_cuda_flash_attention_impl() == "FA3"
    assert use_flash_attention("FA2") == "FA2"
    assert utils.get_cuda_flash_attention_impl() is None


def test_a_package_without_backward_is_not_used(gpu, fa3) -> None:
    gpu(9)
    fa3("fwd")
    assert use_flash_attention("auto") == "FA2"
    with pytest.raises(AttentionError, match=r"'FA3': .* has no backward pass; use 'auto' or"):
        use_flash_attention("FA3")


def test_what_was_asked_for_and_cannot_be_had_is_refused(gpu) -> None:
    gpu(8)
    with pytest.raises(AttentionError, match=r"'FA3': it is not for GPUs .* 8\.0"):
        use_flash_attention("FA3")
    gpu(10)
    with pytest.raises(AttentionError, match="'FA4': its package cannot be imported"):
        use_flash_attention("FA4")


def spec_on_gpu(monkeypatch, folder, **changes):
    """Settings of the model as they are built on a GPU."""
    monkeypatch.setattr(utils, "device_type", "cuda")
    values = {"steps": 1, "max_sequence_tokens": 64, "lr": 0.0, "betas": (0.9, 0.95)}
    settings = TrainerSettings(model_folder=str(folder), run_folder="", **values, **changes)
    return _model_spec(settings).model


def parts(model, kind: type) -> list:
    return [config for _, config, _, _ in model.traverse(kind)]


def test_float32_is_float32_on_a_gpu_too(gpu, monkeypatch, tmp_path) -> None:
    """torchtitan's attention and experts would cast to bfloat16: 0.07 nats on the base model."""
    folder = tiny_moe_folder(tmp_path)
    gpu(9)
    model = spec_on_gpu(monkeypatch, folder, dtype="float32")
    assert parts(model, PackedSDPA.Config) and parts(model, Float32Experts.Config)
    assert not parts(model, KernelRMSNorm.Config)  # The CPU's.
    assert {head.chunk_mib for head in parts(model, LogprobHead.Config)} == {512}


def test_bfloat16_uses_torchtitans_own(gpu, monkeypatch, tmp_path) -> None:
    folder = tiny_moe_folder(tmp_path)
    gpu(9)
    model = spec_on_gpu(monkeypatch, folder, dtype="bfloat16", logprob_chunk_mib=32)
    assert not parts(model, PackedSDPA.Config) and not parts(model, Float32Experts.Config)
    assert {head.chunk_mib for head in parts(model, LogprobHead.Config)} == {32}
    with pytest.raises(AttentionError):
        spec_on_gpu(monkeypatch, folder, dtype="bfloat16", attention="FA4")


def test_packed_attention_plans_on_the_device_of_the_row() -> None:
    """What is made without naming that device would land on the default one, here meta."""
    bounds = torch.tensor([0, 3, 5, 12])
    with torch.device("meta"):
        groups, inverse = _plan_of(VarlenMetadata(bounds, bounds, 7, 7), 12)
    assert {index.device.type for index in [*groups, inverse]} == {"cpu"}
    assert sorted(inverse.tolist()) != []  # Real values, not meta's.
