"""A pretrained Llama on real text against transformers, where its package is installed."""

import importlib.util
from pathlib import Path

import pytest
import torch
from support.tiny_models import Reference, export, packed_row, tiny_trainer
from tokenizers import Tokenizer

from scripts import prepare_smollm2

NEEDED = (prepare_smollm2.PACKAGE, *prepare_smollm2.READERS)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason=f"needs {', '.join(NEEDED)}: {prepare_smollm2.INSTALL}",
    ),
]

# 30 layers in float32, two orders of summation. The aim is 1e-4.
PARITY = 1e-4

TEXTS = [
    "The capital of France is Paris, and the river that flows through it is the Seine. In 1889 "
    "a tower of iron was built there; it is 330 metres high and was to stand for 20 years only.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))\n",
    "<|im_start|>user\nWhat is 12 * 11?<|im_end|>\n<|im_start|>assistant\nIt is 132.<|im_end|>\n",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("smollm2") / "model"
    return prepare_smollm2.write_smollm2(prepare_smollm2.find_gguf(), target)


def documents(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def scores(folder: Path, run_folder: Path, exported: Path | None = None) -> torch.Tensor:
    trainer = tiny_trainer(folder, run_folder, max_sequence_tokens=256)
    got = trainer.score([packed_row(documents(folder))])[0].double()
    if exported is not None:
        export(trainer, exported, folder)
    trainer.close()
    return got


def test_smollm2_logprobs_equal_transformers_also_after_a_round_trip(
    folder: Path, tmp_path: Path
) -> None:
    """WS01 on the trainer's side."""
    exported = tmp_path / "exported"
    once = scores(folder, tmp_path / "a", exported)
    again = scores(exported, tmp_path / "b")
    reference = Reference(folder)
    want = torch.cat([reference.logprobs(ids) for ids in documents(folder)])
    # Prose that a trained model finds likely, not noise: far below ln 49152 = 10.8 nats.
    assert -want.mean() < 4.0
    torch.testing.assert_close(once, want, atol=PARITY, rtol=0.0)
    assert torch.equal(again, once)


def test_smollm2_tokenizer_splits_digits_and_knows_the_chat(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("a  135").tokens == ["a", "ĠĠ", "1", "3", "5"]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()
