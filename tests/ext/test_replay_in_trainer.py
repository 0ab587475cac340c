"""A mixture-of-experts policy trained and scored under recorded ids, against transformers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import (
    PackedRow,
    Reference,
    full_gradients,
    packed_row,
    random_documents,
    take_steps,
    tiny_folder,
    tiny_moe_folder,
    tiny_trainer,
)
from torch import Tensor

from torchtitan_ext.policy_trainer import PolicyTrainer
from torchtitan_ext.reference_policy import ReferencePolicy
from torchtitan_ext.routing_replay import RoutingReplayError

DOCUMENTS = random_documents([2, 40, 7, 7, 30, 23], seed=1)
NUM_TOKENS = sum(len(ids) - 1 for ids in DOCUMENTS)
NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2
DENSE_LAYER = 1
SETTINGS: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS, "mlp_only_layers": [DENSE_LAYER]}
# Two float32 forward passes of three layers in different orders of summation, log-probs of size 10.
PARITY = 1e-5


def random_routing(num_tokens: int, seed: int) -> Tensor:
    """[T, L, K] uint8, two different experts per token; 255, which is none, in the dense layer."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_tokens, NUM_LAYERS, NUM_EXPERTS, generator=generator).argsort(-1)
    ids = order[..., :TOP_K].to(torch.uint8)
    ids[:, DENSE_LAYER] = 255
    return ids


def row_with(routing: Tensor | None) -> PackedRow:
    return replace(packed_row(DOCUMENTS), routed_experts=routing)


ELSEWHERE = random_routing(NUM_TOKENS, seed=2)


def mean_loss(_: int, logprobs: Tensor, __: Tensor) -> Tensor:
    return -logprobs.mean()


def gradients(trainer: PolicyTrainer, *rows: PackedRow) -> dict[str, Tensor]:
    trainer.optimizers.zero_grad()
    trainer.forward_backward(list(rows), mean_loss)
    wrapper = "_checkpoint_wrapped_module."
    return {name.replace(wrapper, ""): one for name, one in full_gradients(trainer)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe_folder(tmp_path_factory.mktemp("moe") / "model", **SETTINGS)


@pytest.fixture
def trainer(folder: Path, tmp_path: Path) -> Iterator[PolicyTrainer]:
    trainer = tiny_trainer(folder, tmp_path / "run")
    yield trainer
    trainer.close()


class RoutedReference(Reference):
    """transformers' forward with its gates told which experts to take."""

    def routed_logprobs(self, ids: list[int], routing: Tensor) -> Tensor:
        """[T - 1] log-probs with gradient; routing [T - 1, L, K]."""
        for index, layer in enumerate(self.model.model.layers):
            if index != DENSE_LAYER:
                layer.mlp.gate.forward = self._forced(layer.mlp.gate, routing[:, index].long())
        logits = self.model(input_ids=torch.tensor([ids[:-1]])).logits[0]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)

    @staticmethod
    def _forced(gate: Any, ids: Tensor) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            # exp(s_i) / sum over the selected of exp(s_j)
            return logits, logits.gather(1, ids).softmax(-1), ids

        return forward


def test_replayed_logprobs_and_gradients_equal_transformers(
    trainer: PolicyTrainer, folder: Path
) -> None:
    """Each token's row and each layer's column land where they belong, and the gate learns."""
    reference = RoutedReference(folder)
    sizes = [len(ids) - 1 for ids in DOCUMENTS]
    parts = zip(DOCUMENTS, ELSEWHERE.split(sizes), strict=True)
    want = torch.cat([reference.routed_logprobs(ids, part) for ids, part in parts])
    got = trainer.score([row_with(ELSEWHERE)])[0]
    torch.testing.assert_close(got, want.detach(), atol=PARITY, rtol=0.0)
    assert (trainer.score([row_with(None)])[0] - got).abs().max() > 0.1
    (-want.mean()).backward()
    found = gradients(trainer, row_with(ELSEWHERE))
    for index in (0, 2):
        gate = reference.model.model.layers[index].mlp.gate.weight.grad
        assert gate.abs().max() > 1e-4
        # Sums over 103 tokens in float32, gradients of size 0.1.
        name = f"layers.{index}.moe.router.gate.weight"
        torch.testing.assert_close(found[name], gate, atol=1e-6, rtol=1e-3)


def test_replaying_the_own_choice_changes_no_bit(trainer: PolicyTrainer) -> None:
    scores, routing = trainer.score_and_route([row_with(None)])
    assert routing[0].shape == (NUM_TOKENS, NUM_LAYERS, TOP_K) and routing[0].dtype == torch.int16
    assert not routing[0][:, DENSE_LAYER].any() and routing[0][:, 0].any()
    assert torch.equal(scores[0], trainer.score([row_with(None)])[0])
    assert torch.equal(scores[0], trainer.score([row_with(routing[0])])[0])
    plain = gradients(trainer, row_with(None))
    for name, gradient in gradients(trainer, row_with(routing[0])).items():
        assert torch.equal(gradient, plain[name]), name


def test_own_choice_equals_transformers_routers(trainer: PolicyTrainer, folder: Path) -> None:
    model = Reference(folder).model
    seen: list[Tensor] = []
    for layer in (0, 2):
        gate = model.model.layers[layer].mlp.gate
        gate.register_forward_hook(lambda _, __, output: seen.append(output[2]))
    (routing,) = trainer.score_and_route([packed_row([DOCUMENTS[1]])])[1]
    model(input_ids=torch.tensor([DOCUMENTS[1][:-1]]))
    for layer, want in zip((0, 2), seen, strict=True):
        assert torch.equal(routing[:, layer].long().sort(-1).values, want.sort(-1).values)


def test_recorded_routing_survives_an_update(trainer: PolicyTrainer) -> None:
    """Recorded in the trainer's own pass, replayed after a step in which the choice moved."""
    (recorded,) = trainer.score_and_route([row_with(None)])[1]
    take_steps(trainer, 3)
    trainer.take_routing_stats()
    assert not torch.equal(trainer.score_and_route([row_with(None)])[1][0], recorded)
    trainer.forward_backward([row_with(recorded)], mean_loss)
    stats = trainer.take_routing_stats()
    used = torch.stack(
        [recorded[:, layer].long().flatten().bincount(minlength=8) for layer in (0, 2)]
    )
    assert torch.equal(stats.load_LE, used) and (stats.changed_L > 0).all()
    (own,) = trainer.score_and_route([row_with(recorded)])[1]
    is_changed = (own.sort(-1).values != recorded.sort(-1).values).any(-1)
    assert stats.changed_L.tolist() == [is_changed[:, layer].sum().item() for layer in (0, 2)]


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputation_replays_the_same_experts(
    trainer: PolicyTrainer, folder: Path, tmp_path: Path, kind: str
) -> None:
    rows = [row_with(ELSEWHERE), row_with(random_routing(NUM_TOKENS, seed=3)), row_with(None)]
    want, stats = gradients(trainer, *rows), trainer.take_routing_stats()
    other = tiny_trainer(folder, tmp_path / "other", activation_checkpoint=kind)
    for name, gradient in gradients(other, *rows).items():
        # The same operations on the same numbers.
        assert torch.equal(gradient, want[name]), name
    again = other.take_routing_stats()
    # Recomputation is not counted a second time: 3 rows, 2 experts per token.
    assert again.load_LE.sum(1).tolist() == [2 * 3 * NUM_TOKENS] * 2
    assert torch.equal(again.load_LE, stats.load_LE)
    assert torch.equal(again.changed_L, stats.changed_L)
    other.close()


def test_each_row_is_replayed_with_its_own_routing(trainer: PolicyTrainer) -> None:
    rows = [row_with(ELSEWHERE), row_with(random_routing(NUM_TOKENS, seed=3)), row_with(None)]
    alone = [gradients(trainer, row) for row in rows]
    assert not torch.equal(*(one["layers.0.moe.router.gate.weight"] for one in alone[:2]))
    for name, gradient in gradients(trainer, *rows).items():
        # The same three terms, added up in place.
        want = alone[0][name] + alone[1][name] + alone[2][name]
        torch.testing.assert_close(gradient, want, atol=1e-6, rtol=1e-5)


def test_a_row_that_does_not_fit_leaves_nothing_behind(trainer: PolicyTrainer) -> None:
    """RR01: 7 tokens are fed, so 7 rows belong to them; 5, 6 and 8 do not."""
    row = packed_row([DOCUMENTS[2], [5, 6]])
    plain = trainer.score([row])[0]
    for num_rows in (5, 6, 8):
        wrong = replace(row, routed_experts=random_routing(num_rows, seed=3))
        for run in (trainer.score, lambda rows: trainer.forward_backward(rows, mean_loss)):
            with pytest.raises(RoutingReplayError, match=f"row has 7 tokens and {num_rows} rows"):
                run([wrong])
    assert torch.equal(trainer.score([row])[0], plain)
    right = replace(row, routed_experts=random_routing(7, seed=3))
    with pytest.raises(ZeroDivisionError):
        trainer.forward_backward([right], lambda *_: 1 // 0)
    assert torch.equal(trainer.score([row])[0], plain)


def test_only_training_is_counted(trainer: PolicyTrainer) -> None:
    trainer.score([row_with(ELSEWHERE)])
    trainer.score_and_route([row_with(ELSEWHERE)])
    assert trainer.take_routing_stats().num_tokens == 0
    trainer.forward_backward([row_with(ELSEWHERE)], mean_loss)
    stats = trainer.take_routing_stats()
    assert stats.num_tokens == NUM_TOKENS and stats.layers == (0, 2)


def test_a_dense_model_has_no_routing(tmp_path: Path) -> None:
    trainer = tiny_trainer(tiny_folder(tmp_path / "model"), tmp_path / "run")
    with pytest.raises(RoutingReplayError, match="the model has no mixture-of-experts layers"):
        trainer.score([row_with(ELSEWHERE)])
    with pytest.raises(RoutingReplayError, match="the model has no mixture-of-experts layers"):
        trainer.score_and_route([row_with(None)])
    trainer.forward_backward([row_with(None)], mean_loss)
    assert trainer.take_routing_stats() is None
    trainer.close()


def test_the_reference_policy_replays_as_well(trainer: PolicyTrainer) -> None:
    start = trainer.score([row_with(ELSEWHERE)])[0]
    take_steps(trainer, 2)
    reference = ReferencePolicy(trainer)
    assert torch.equal(reference.score([row_with(ELSEWHERE)], temperature=1.0)[0], start)
    assert (reference.score([row_with(None)], temperature=1.0)[0] - start).abs().max() > 0.1


def test_tensor_and_expert_parallelism_together_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel 2 with expert_parallel 2: .* set one"):
        tiny_trainer(folder, tmp_path / "run", tensor_parallel=2, expert_parallel=2)
