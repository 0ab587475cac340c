"""Flops of a token by torchtitan against products of matrices counted by hand."""

from pathlib import Path

from support.tiny_models import tiny_folder, tiny_moe_folder, tiny_trainer


def test_flops_of_a_dense_token(tmp_path: Path) -> None:
    """Two layers of 48 values, 4 heads and 2 key-value heads of 32, 80 inner; the head is tied."""
    trainer = tiny_trainer(tiny_folder(tmp_path / "model", vocab_size=100), tmp_path / "run")
    matrices, attention = trainer.flops
    norms = 2 * (48 + 48 + 32 + 32) + 48  # which torchtitan counts as if they were matrices
    layer = 48 * (4 + 2 + 2) * 32 + 4 * 32 * 48 + 3 * 48 * 80
    # Two for a product and a sum, three for forward and both gradients.
    assert matrices == 6 * (2 * layer + 100 * 48 + norms)
    # Scores and weighted values, 4 heads of 32, in each layer.
    assert attention == 6 * 2 * (2 * 4 * 32)


def test_only_the_experts_of_a_token_count(tmp_path: Path) -> None:
    folders = [
        tiny_moe_folder(tmp_path / name, num_experts_per_tok=k) for name, k in (("a", 1), ("b", 2))
    ]
    one, two = (tiny_trainer(folder, tmp_path / f"run-{folder.name}").flops for folder in folders)
    trainer = tiny_trainer(folders[0], tmp_path / "run")
    expert = sum(
        weight.numel() // weight.shape[0]
        for name, weight in trainer.model.named_parameters()
        if ".inner_experts." in name
    )
    assert two[0] - one[0] == 6 * expert
    assert two[1] == one[1]
