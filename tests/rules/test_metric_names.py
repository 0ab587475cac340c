"""Every metric key that stands in the code is declared, and every declared key is used."""

import ast
import re

from rules.repository import name_of, parsed, python_files

from rollverify.metrics.names import METRICS, is_declared

AREAS = sorted({key.split("/")[0] for key in METRICS})
KEY = re.compile(rf"({'|'.join(AREAS)})/[\w/]*")

NOT_KEYS = {"eval/", "eval/mean_at_", "rollout/response_tokens", "eval/x/x"}
"""Beginnings of keys (evaluation metrics, response lengths) and the ids of evaluation requests."""

BUILT = ("rollout/response_tokens_", "time/")
"""Keys put together from a prefix, by `distribution` and by the helpers of `names.py`."""

FILES = [path for path in python_files("rollverify") if path.name != "names.py"]


def keys_in(tree: ast.AST) -> set[str]:
    """Strings that look like metric keys; a `{...}` of an f-string counts as "x"."""
    inside = {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
    texts = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            texts.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [one.value if isinstance(one, ast.Constant) else "x" for one in node.values]
            texts.add("".join(map(str, parts)))
    return {text for text in texts if KEY.fullmatch(text)}


def test_every_key_in_the_code_is_declared():
    for path in FILES:
        keys = keys_in(parsed(path)) - NOT_KEYS
        assert sorted(key for key in keys if not is_declared(key)) == [], name_of(path)


def test_every_declared_key_is_used():
    used = set().union(*(keys_in(parsed(path)) for path in FILES))
    exact = {key for key in METRICS if "<" not in key and not key.startswith(BUILT)}
    assert sorted(exact - used) == []


def test_keys_are_found_in_plain_and_formatted_strings():
    tree = ast.parse('a = "train/los"; b = f"eval/mean_at_{k}"; c = "not/a/key"; d = "train loss"')
    assert keys_in(tree) == {"train/los", "eval/mean_at_x"}
    assert not is_declared("train/los")
