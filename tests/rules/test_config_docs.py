"""Every config field has an attribute docstring and is read outside the config layer."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from rollverify.config.tables import SETTINGS, Config, classes_of

PACKAGE = Path(__file__).resolve().parents[2] / "rollverify"

REFUSED_BY_THE_CHECK = {"rollout.top_p", "rollout.top_k"}
"""Settings that exist to be refused: `config/rules.py` allows one value and says why."""


def reads_in(source: str) -> set[tuple[str, str]]:
    """Pairs (owner, attribute) read in a module: `config.training.steps` gives (training, steps).

    The owner of `self._training.steps` is "training". A name annotated with a table class, as in
    `table: TrainingConfig`, counts as that table.
    """
    tree = ast.parse(source)
    classes = {kind.__name__: table for table in Config.model_fields for kind in classes_of(table)}
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and isinstance(node.annotation, ast.Name):
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            if node.annotation.id in classes:
                aliases[name] = classes[node.annotation.id]
    found: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = ast.unparse(node.value).removeprefix("self.")
            owner = aliases.get(owner, owner.rpartition(".")[2].lstrip("_"))
            names = trainer_settings() if node.attr == "model_dump" else {node.attr}
            found |= {(owner, name) for name in names}
    return found


@cache
def trainer_settings() -> set[str]:
    """Fields that the trainer takes by keyword, from tables that are handed on whole."""
    source = (PACKAGE.parent / "torchtitan_ext" / "trainer_config.py").read_text(encoding="utf-8")
    (settings,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == "TrainerSettings"
    ]
    return {ast.unparse(n.target) for n in settings.body if isinstance(n, ast.AnnAssign)}


@cache
def reads_of_the_package() -> set[tuple[str, str]]:
    """All reads in rollverify/ outside config/."""
    files = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "config"]
    return set().union(*(reads_in(path.read_text(encoding="utf-8")) for path in files))


@pytest.mark.parametrize("table", Config.model_fields)
def test_every_field_has_a_docstring(table: str) -> None:
    for kind in classes_of(table):
        own = {
            name: field for name, field in kind.model_fields.items() if name in kind.__annotations__
        }
        docs = {name: setting.description or "" for name, setting in own.items()}
        assert [name for name, text in docs.items() if len(text.split()) < 2] in ([], ["name"])
        assert len((kind.__doc__ or "").split()) > 2


def test_every_flag_in_the_documents_exists() -> None:
    flags = {"--" + key.replace("_", "-") for key in SETTINGS} | {"--table.key"}
    unknown = [
        (path.name, flag)
        for path in [*PACKAGE.parent.glob("*.md"), *PACKAGE.parent.glob("*/**/*.md")]
        if not {".venv", "outputs"} & set(path.relative_to(PACKAGE.parent).parts)
        for flag in re.findall(r"--[a-z_-]+\.[a-z0-9_-]+", path.read_text(encoding="utf-8"))
        if flag.replace("_", "-").replace(".no-", ".") not in flags
    ]
    assert unknown == []


def test_every_setting_is_read_outside_the_config_layer() -> None:
    reads = reads_of_the_package()
    unread = {key for key in SETTINGS if tuple(key.split(".")) not in reads}
    assert unread == REFUSED_BY_THE_CHECK, "remove the setting or use it"


def test_reads_are_found_through_names_attributes_and_annotations() -> None:
    source = (
        "def f(config, training, t: LossConfig):\n"
        "    self._rollout.top_k, training.steps, config.run.seed, t.name\n"
        "    training.lr = 3\n"
    )
    expected = {("rollout", "top_k"), ("training", "steps"), ("run", "seed"), ("loss", "name")}
    assert expected <= reads_in(source)
    assert ("training", "lr") not in reads_in(source)
