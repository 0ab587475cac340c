"""SmolLM2 from its package: where the file is found, the errors, and what config.json keeps."""

import json
import sys
from pathlib import Path

import pytest

from rollverify.errors import ConfigError
from scripts import prepare_smollm2


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package of that form; importing it raises, for its chat program is missing."""
    folder = tmp_path / "site" / "fake_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import chat_program_that_is_not_installed")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(prepare_smollm2, "PACKAGE", folder.name)
    monkeypatch.setattr(prepare_smollm2, "READERS", ())
    return folder


def test_smollm2_file_is_found_without_importing_the_package(package: Path) -> None:
    (package / "weights.gguf").write_bytes(b"")
    assert prepare_smollm2.find_gguf() == package / "weights.gguf"
    assert package.name not in sys.modules


def test_smollm2_package_without_its_file_says_where_it_looked(package: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{package}.* holds no \*\.gguf file") as caught:
        prepare_smollm2.find_gguf()
    assert "\n" not in str(caught.value)


def test_smollm2_without_its_packages_names_them_and_the_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(prepare_smollm2, "PACKAGE", "no_such_model")
    monkeypatch.setattr(prepare_smollm2, "READERS", ("json", "no_such_reader"))
    assert prepare_smollm2.main([str(tmp_path / "model")]) == 2
    error = capsys.readouterr().err
    assert "packages no_such_model, no_such_reader, which are not installed; run: pip" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_smollm2_never_overwrites_a_folder(package: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    with pytest.raises(ConfigError, match="exists; name another folder"):
        prepare_smollm2.write_smollm2(package / "weights.gguf", target)


def test_smollm2_folder_that_fails_half_way_is_not_there(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(gguf: Path, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_smollm2, "_write_tokenizer", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\)"):
        prepare_smollm2.write_smollm2(package / "weights.gguf", tmp_path / "model")
    assert sorted(tmp_path.iterdir()) == before


def test_smollm2_config_forgets_the_quantized_file() -> None:
    """The weights are float32 by then; a reader that saw the key would look for the file."""
    header = {"model_type": "llama", "quantization_config": {"quant_method": "gguf"}}
    config = prepare_smollm2.folder_config(header | {"_name_or_path": "x", "vocab_size": 49152})
    assert json.loads(json.dumps(config)) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
