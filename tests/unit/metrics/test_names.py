"""The list of metric keys: form, families, helpers."""

import re

import pytest

from rollverify.hooks import hook_time_key
from rollverify.metrics.names import METRICS, is_declared, phase_time_key


def test_every_key_has_form_unit_and_meaning():
    for key, metric in METRICS.items():
        assert re.fullmatch(r"[a-z]+(/[a-z0-9_<>]+)+", key), key
        assert metric.unit and metric.meaning, key


@pytest.mark.parametrize("suffix", ["s", "gib", "nats", "frac"])
def test_a_key_that_names_its_unit_has_that_unit(suffix):
    unit = {"s": "s", "gib": "GiB", "nats": "nats", "frac": "share"}[suffix]
    keys = [key for key in METRICS if key.endswith(f"_{suffix}") and "_per_" not in key]
    assert keys
    assert {METRICS[key].unit for key in keys} == {unit}


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("reward/mean", True),
        ("eval/mean_at_8", True),
        ("eval/mean_at_", False),
        ("eval/mean_at_<k>/x", False),
        ("time/hook/a/b_s", False),
        ("reward/mea", False),
        ("reward/mean2", False),
    ],
)
def test_only_listed_keys_and_families_are_declared(key, expected):
    assert is_declared(key) is expected


@pytest.mark.parametrize("phase", ["rollout", "train", "verify", "sync"])
def test_the_phases_of_the_loop_have_declared_keys(phase):
    assert is_declared(phase_time_key(phase))


def test_hook_keys_are_declared():
    assert hook_time_key("verification") == "time/hook/verification_s"
    assert is_declared(hook_time_key("verification"))
