"""Each preset reads its set's schema, from the hub's Parquet and from the usual local copies.

The rows are made up here; only their columns and spellings are those of the sets.
"""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from rollverify.config.tables import DataConfig
from rollverify.data.presets import PRESETS
from rollverify.data.prompts import read_prompt_set
from rollverify.data.sources import SourceOptions, resolve_source
from rollverify.data.templates import TEMPLATES, fill

DOCS = Path(__file__).resolve().parents[3] / "docs" / "data.md"

GSM8K_ANSWER = "3 boxes hold 3*400=<<3*400=1200>>1200 pens.\n#### 1,200"


def dapo_row(number):
    message = {"role": "user", "content": fill(TEMPLATES["answer_line"], f"What is {number}?")}
    return {
        "data_source": "math_dapo",
        "prompt": [message],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(number), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"uid-{number}"},
    }


PROBLEM = {"problem": "What is x?", "solution": "It is $\\frac{1}{2}$."}
SCHEMAS = {
    "dapo_math_17k": ([dapo_row(34), dapo_row(5), dapo_row(34)], "What is 34?", "34", "uid-34"),
    "deepscaler": ([PROBLEM | {"answer": "\\frac{1}{2}"}], "What is x?", "\\frac{1}{2}", "1"),
    "gsm8k": ([{"question": "Pens?", "answer": GSM8K_ANSWER}], "Pens?", "1200", "1"),
    "math500": (
        [
            PROBLEM
            | {"answer": "p - q", "subject": "Algebra", "level": 5, "unique_id": "test/a/1.json"}
        ],
        "What is x?",
        "p - q",
        "test/a/1.json",
    ),
    "aime24": (
        [PROBLEM | {"id": 60, "answer": "025", "url": "u", "year": "2024"}],
        "What is x?",
        "25",
        "60",
    ),
    "aime25": ([{"problem": "What is x?", "answer": "70", "id": "0"}], "What is x?", "70", "0"),
    "amc23": (
        [{"id": 0, "question": "What is x?", "answer": 27.0, "url": "u"}],
        "What is x?",
        "27",
        "0",
    ),
}
"""Rows of the hub's table, and problem, answer and id of the first."""

LOCAL_COPIES = [
    ("gsm8k", {"question": "Pens?", "answer": GSM8K_ANSWER}, "1200"),
    ("math500", {"id": 0, "problem": "What?", "answer": "p - q", "level": 5}, "p - q"),
    ("aime24", {"id": 60, "problem": "What?", "answer": "204"}, "204"),
    ("aime25", {"id": 90, "problem": "What?", "answer": "70"}, "70"),
    ("amc23", {"id": 0, "problem": "What?", "answer": "27"}, "27"),
]


def read(preset, path, **options):
    found = SourceOptions(**options)
    text = f"{preset}:{path}"
    return read_prompt_set(resolve_source(text, use="train", setting="data.train", options=found))


def test_every_preset_has_a_schema_here_and_stands_in_the_docs():
    assert SCHEMAS.keys() == PRESETS.keys()
    text = DOCS.read_text(encoding="utf-8")
    missing = [name for name, one in PRESETS.items() if f"| `{name}` | `{one.hub}` |" not in text]
    assert missing == []
    assert [name for name in DataConfig.model_fields if f"`{name}`" not in text] == []


@pytest.mark.parametrize("preset", SCHEMAS)
def test_a_preset_reads_the_table_of_the_hub(preset, tmp_path):
    rows, problem, answer, prompt_id = SCHEMAS[preset]
    path = tmp_path / "set.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    first = read(preset, path).prompts[0]
    assert (first.bare_text, first.answer, first.prompt_id) == (problem, answer, prompt_id)
    assert first.text == fill(TEMPLATES["boxed"], problem)


@pytest.mark.parametrize(("preset", "row", "answer"), LOCAL_COPIES)
def test_a_preset_reads_the_usual_local_copy(preset, row, answer, tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (prompt,) = read(preset, path, template="none").prompts
    assert (prompt.text, prompt.answer) == (row.get("question") or row["problem"], answer)
    assert prompt.prompt_id == str(row.get("id", 1))


def test_dapo_drops_its_repeated_problems(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in SCHEMAS["dapo_math_17k"][0]))
    found = read("dapo_math_17k", path)
    assert [prompt.answer for prompt in found.prompts] == ["34", "5"]
    assert (found.num_rows, found.num_duplicates) == (3, 1)


def test_dapo_can_keep_the_wording_of_the_set(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(dapo_row(34)))
    (prompt,) = read("dapo_math_17k", path, template="answer_line").prompts
    assert prompt.text == dapo_row(34)["prompt"][0]["content"]
    assert prompt.bare_text == "What is 34?"


def test_a_bad_row_of_a_preset_is_named(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "2"}\n')
    with pytest.raises(ValueError, match=r"set\.jsonl:2: 'answer' has nothing after '####'"):
        read("gsm8k", path)
