"""Model folders and prompt files for tests of `rollverify.evaluate`; no weights are read."""

import json
from collections.abc import Sequence
from pathlib import Path

from rollverify.data.prompts import Prompt, write_jsonl
from rollverify.toy.tokenizer import EOS_ID, save_tokenizer

NUM_SAMPLES = 2


def model_at(path: Path, weights: bytes = b"") -> Path:
    """A model folder that passes the checks before an engine is started."""
    save_tokenizer(path)
    config = {"vocab_size": 80, "max_position_embeddings": 512, "eos_token_id": EOS_ID}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(weights)
    return path


def flags_in(folder: Path, answers: Sequence[str] = ("00k", "00m", "00k")) -> list[str]:
    """Command line of an evaluation of problems with these answers, and of two training ones."""
    prompts = [
        Prompt(prompt_id=f"q{number}", text=f"D0{number}w\n", answer=answer)
        for number, answer in enumerate(answers)
    ]
    write_jsonl(folder / "test.jsonl", prompts)
    train = [Prompt(prompt_id=f"t{number}", text=f"X0{number}y\n", answer="0") for number in "12"]
    write_jsonl(folder / "train.jsonl", train)
    values = {
        "model.path": model_at(folder / "m"),
        "data.test": folder / "test.jsonl",
        "data.train": folder / "train.jsonl",
        "evaluation.samples-per-problem": NUM_SAMPLES,
        "run.output-dir": folder / "out",
    }
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]
