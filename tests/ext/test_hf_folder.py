"""Export to Hugging Face folders: shards, index, and nothing left after a failure."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import Reference, tiny_config, tiny_folder
from torch import Tensor

from torchtitan_ext.hf_folder import INDEX_FILE, write_hf_folder, write_random_hf_folder
from torchtitan_ext.models.hf_config import ModelFolderError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tiny_folder(tmp_path / "source", tie_word_embeddings=False)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("stays behind")
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def write(folder: Path, source: Path, shard_bytes: int = 2**30) -> None:
    write_hf_folder(
        folder,
        iter(weights_of(source).items()),
        source=source,
        is_writer=True,
        shard_bytes=shard_bytes,
    )


def test_several_shards_have_an_index_and_load_in_transformers(
    tmp_path: Path, source: Path
) -> None:
    target, want, limit = tmp_path / "target", weights_of(source), 60_000
    write(target, source, shard_bytes=limit)
    files = sorted(file.name for file in target.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((target / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == 4 * sum(t.numel() for t in want.values())
    assert set(index["weight_map"].values()) == set(files)
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(target / file)[name], want[name])
    for file in files:  # one tensor alone may be larger than the limit; none here is
        assert sum(t.numel() * 4 for t in load_file(target / file).values()) <= limit
    model = Reference(target).model.state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in want.items())


def test_one_shard_needs_no_index_and_known_files_come_along(tmp_path: Path, source: Path) -> None:
    write(tmp_path / "target", source)
    names = {file.name for file in (tmp_path / "target").iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json"}


def failing(source: Path) -> Iterator[tuple[str, Tensor]]:
    yield from list(weights_of(source).items())[:3]
    raise OSError("disk full")


def test_failure_leaves_nothing_behind(tmp_path: Path, source: Path) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="disk full"):
        write_hf_folder(
            tmp_path / "target", failing(source), source=source, is_writer=True, shard_bytes=1
        )
    assert sorted(tmp_path.iterdir()) == before


def test_failure_keeps_the_folder_that_was_there(tmp_path: Path, source: Path) -> None:
    write(tmp_path / "target", source)
    before = {file.name: file.read_bytes() for file in (tmp_path / "target").iterdir()}
    with pytest.raises(OSError, match="disk full"):
        write_hf_folder(tmp_path / "target", failing(source), source=source, is_writer=True)
    assert {f.name: f.read_bytes() for f in (tmp_path / "target").iterdir()} == before


def test_existing_folder_is_replaced_whole(tmp_path: Path, source: Path) -> None:
    write(tmp_path / "target", source, shard_bytes=60_000)
    write(tmp_path / "target", source)
    assert not (tmp_path / "target" / INDEX_FILE).exists()
    assert len(list((tmp_path / "target").glob("*.safetensors"))) == 1


def test_other_ranks_gather_and_write_nothing(tmp_path: Path, source: Path) -> None:
    parameters = iter(weights_of(source).items())
    write_hf_folder(tmp_path / "target", parameters, source=source, is_writer=False)
    assert next(parameters, None) is None
    assert not (tmp_path / "target").exists()


def test_random_folder_depends_on_its_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    a, b, c = (
        weights_of(tiny_folder(tmp_path / name, seed=seed))
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert "lm_head.weight" not in a  # tied


def test_random_folder_of_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="gpt2"):
        write_random_hf_folder(tmp_path / "m", tiny_config(model_type="gpt2"), seed=0)
