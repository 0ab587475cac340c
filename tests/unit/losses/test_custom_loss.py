"""A loss of one's own: what it is given, what it may give, and how it is refused."""

import math
from pathlib import Path

import pytest
import torch
from support.fakes import ScoringTrainer
from unit.losses.loss_rows import loss_inputs
from unit.losses.objective_cases import stale_batch, take_step

from rollverify.config.losses import CustomLoss, Grpo, NoCorrection
from rollverify.errors import ConfigError
from rollverify.losses.custom import custom_loss
from rollverify.losses.objective import Objective

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "losses.md"
ROWS = ([[-1.0, -2.0, math.nan]], [[-1.5, -2.0, math.inf]], [[-1.0, -2.0, -math.inf]], [2.0])


@pytest.fixture
def loss(tmp_path):
    """Write the source of a function `f`; return its table."""

    def write(source: str, **settings: object) -> CustomLoss:
        file = tmp_path / f"loss_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(f"import torch\n{source}")
        return CustomLoss(name=f"{file}:f", settings=settings)

    return write


def test_the_row_is_0_outside_the_mask_and_settings_are_keywords(loss):
    source = """
def f(row, *, power):
    rows = (row.policy_logprobs, row.denominator_logprobs, row.behavior_logprobs)
    assert [each[2].item() for each in (*rows, row.advantages)] == [0.0] * 4
    assert (row.num_sequences, row.sequence_ids.tolist()) == (1, [0, 0, 0])
    return -row.advantages * (row.policy_logprobs - row.denominator_logprobs) ** power
"""
    inputs = loss_inputs(*ROWS, [[1, 1, 0]])
    token_loss, flags = custom_loss(inputs, loss(source, power=2))
    assert token_loss.tolist() == [-0.5, 0.0, 0.0]  # -2 * 0.5^2
    assert {name: values.sum().item() for name, values in flags.items()} == {
        "is_clipped_low": 0.0,
        "is_clipped_high": 0.0,
        "is_masked": 0.0,
    }


def test_what_stands_outside_the_mask_reaches_neither_loss_nor_gradient(loss):
    policy = torch.tensor([-1.0, -2.0, math.nan], dtype=torch.float64, requires_grad=True)
    inputs = loss_inputs(policy, *ROWS[1:], [[1, 1, 0]])
    source = """
def f(row):
    return row.policy_logprobs.exp(), {"is_masked": torch.ones(3)}
"""
    token_loss, flags = custom_loss(inputs, loss(source))
    token_loss.sum().backward()
    assert policy.grad.tolist() == pytest.approx([math.exp(-1), math.exp(-2), 0.0])
    assert token_loss[2] == 0.0 and flags["is_masked"].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ("None", "the loss of each token, a tensor [3], got NoneType"),
        ("row.policy_logprobs.mean()", "a tensor [3], got [] torch.float64"),
        ("row.sequence_ids", "a tensor [3], got [3] torch.int64"),
        ("(row.policy_logprobs, {'gate': row.loss_mask})", "is_masked, got ['gate']"),
        ("(row.policy_logprobs, {'is_masked': row.loss_mask[:1]})", "flags [3] like the loss"),
        ("row.policy_logprobs / 0", "a finite loss of each trained token"),
    ],
)
def test_what_is_no_loss_is_refused_in_one_line(loss, result, problem):
    settings = loss(f"def f(row): return {result}")
    with pytest.raises(ConfigError) as caught:
        custom_loss(loss_inputs(*ROWS, [[1, 1, 0]]), settings)
    assert str(caught.value).startswith(f"loss.name = {settings.name!r} must give ")
    assert problem in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def f(row, power): ...", "keywords: missing a required argument: 'power'"),
        ("def f(row, *, base=1): ...", "got an unexpected keyword argument 'clip'"),
        ("g = 1", "has no function 'f'"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(loss, source, problem):
    settings = {} if "power" in source else {"clip": 1}
    with pytest.raises(ConfigError, match=problem):
        Objective(loss=loss(source, **settings))


def test_the_loss_of_the_document_takes_a_step(tmp_path, monkeypatch):
    """The example of docs/losses.md is GRPO with one clip distance."""
    _, _, rest = DOCUMENT.read_text(encoding="utf-8").partition("```python\n")
    example, _, _ = rest.partition("```")
    monkeypatch.chdir(tmp_path)
    Path("my_losses.py").write_text(example)
    settings = CustomLoss(name="my_losses.py:clipped", settings={"clip": 0.2})
    own, builtin = ScoringTrainer(), ScoringTrainer()
    kept = {"denominator": "behavior"}
    custom = Objective(loss=settings.model_copy(update=kept), correction=NoCorrection())
    metrics = take_step(own, stale_batch(), custom)
    grpo = Objective(loss=Grpo(clip_low=0.2, clip_high=0.2, **kept), correction=NoCorrection())
    right = take_step(builtin, stale_batch(), grpo)
    torch.testing.assert_close(own.gradient, builtin.gradient, atol=0, rtol=0)
    assert metrics["train/clip_high_frac"] == right["train/clip_high_frac"] > 0
