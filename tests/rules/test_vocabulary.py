"""One name for each thing: words that mean something else elsewhere do not appear in the code."""

import ast
import re

from rules.repository import name_of, parsed, python_files

BANNED = {
    r"\b(old|new)_log": "say behavior_, anchor_, policy_ or updated_logprobs",
    r"\b(rollout|inference|generation|sampling|infer)_log_?probs": "say behavior_logprobs",
    r"\b(weight|param|model)_version\b": "say policy_version",
    r"\baction_mask\b": "say loss_mask",
    r"\bcfg\b": "say config",
}
"""Pattern: what to write instead."""

DEFAULTED_READ = re.compile(r"\bgetattr\((config|self\._?config)\b")
"""Only the config layer itself goes through its fields by name."""

FRONT_ENDS = {
    "rollverify/rewards/try.py",
    "rollverify/config/load.py",
    "rollverify/dry_run/check.py",
    "rollverify/launch/launcher.py",
    "rollverify/metrics/report.py",
    "rollverify/launch/shutdown.py",
}
"""Modules that talk to the person at the terminal; everything else logs."""

CODE = python_files("rollverify", "torchtitan_ext", "scripts")


def banned_in(source: str) -> list[str]:
    return [cure for pattern, cure in BANNED.items() if re.search(pattern, source)]


def prints_in(tree: ast.AST) -> list[int]:
    """Lines that call `print`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if ast.unparse(call.func) == "print"]


def test_no_banned_name_appears():
    for path in CODE:
        assert banned_in(path.read_text(encoding="utf-8")) == [], name_of(path)


def test_settings_are_read_as_fields():
    readers = [path for path in CODE if path.parent.name != "config"]
    found = [p for p in readers if DEFAULTED_READ.search(p.read_text(encoding="utf-8"))]
    assert [name_of(path) for path in found] == []


def test_only_front_ends_print():
    files = python_files("rollverify", "torchtitan_ext")
    printing = {name_of(path) for path in files if prints_in(parsed(path))}
    assert printing <= FRONT_ENDS


def test_files_are_named_after_what_they_hold():
    bad = re.compile(r"(^|_)(utils?|helpers?|misc|common)\.py$")
    assert [name_of(path) for path in python_files() if bad.search(path.name)] == []


def test_banned_names_are_found():
    assert banned_in("x = old_logprobs") and DEFAULTED_READ.search('getattr(config, "a", 1)')
    assert banned_in("policy_logprobs, new_logger, threshold") == [BANNED[r"\b(old|new)_log"]]
    assert banned_in("policy_version, renew_log") == []
    assert prints_in(ast.parse("print(1)\nlogger.info('print(2)')")) == [1]
