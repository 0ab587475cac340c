"""Reading and writing prompt sets; every bad file gives one clear line."""

import json
import logging
import os
import subprocess
import sys

import pytest

from rollverify.data.prompts import Prompt, load_prompts, read_prompt_set, write_jsonl
from rollverify.data.sources import PromptSource
from rollverify.errors import DataError

GOOD = '{"id": "a", "prompt": "Fk2=", "answer": "0c"}'


@pytest.fixture
def prompt_file(tmp_path):
    def write(content):
        path = tmp_path / "set.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def prompts_of(*texts):
    return [Prompt(prompt_id=str(i), text=text, answer="0a") for i, text in enumerate(texts)]


def test_load_reads_lines_in_order_with_default_ids(prompt_file):
    path = prompt_file(GOOD + '\n{"prompt": "x", "answer": "y", "more": 1}\n{"id": 7, "prompt": "p"'
                       ', "answer": "q"}\n\n')  # fmt: skip
    assert load_prompts(path) == [
        Prompt(prompt_id="a", text="Fk2=", answer="0c"),
        Prompt(prompt_id="2", text="x", answer="y"),
        Prompt(prompt_id="7", text="p", answer="q"),
    ]


def test_a_prompt_keeps_its_whole_row(prompt_file):
    row = {"id": 7, "prompt": "1 + 1", "answer": 2, "level": 3, "tests": [{"in": None}]}
    (prompt,) = load_prompts(prompt_file(json.dumps(row)))
    assert prompt.columns == row
    assert Prompt(prompt_id="a", text="x", answer="y").columns == {}


def test_only_the_rows_of_prompts_that_stay_are_kept(prompt_file):
    path = prompt_file(REPEATED)
    found = read_prompt_set(PromptSource(location=path, drop_duplicates=True))
    assert [prompt.columns["answer"] for prompt in found.prompts] == ["2", "3"]


def test_load_splits_at_newlines_only(prompt_file):
    text = "one\u2028two\x85three"  # characters at which str.splitlines would split too
    path = prompt_file(f'\ufeff{{"prompt": "{text}", "answer": "a"}}\r\n')
    assert [p.text for p in load_prompts(path)] == [text]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"set\.jsonl is empty; give it lines"),
        ("\n \n", r"set\.jsonl is empty"),
        (GOOD + "\n{oops\n", r"set\.jsonl:2: not valid JSON \(.*column 2\)"),
        (GOOD + "\n" + GOOD[:20], r"set\.jsonl:2: not valid JSON"),
        ("[" * 100_000, r"set\.jsonl:1: JSON too large"),
        (GOOD + "\n\n" + GOOD, r"set\.jsonl:2: blank line; remove it"),
        ('["a"]', r"set\.jsonl:1: expected a JSON object, got list"),
        (
            '{"question": "a", "answer": "b"}',
            r":1: key 'prompt' is missing; .*'question', 'answer'",
        ),
        (GOOD + '\n{"prompt": "x"}', r":2: key 'answer' is missing"),
        ('{"prompt": 3, "answer": "b"}', r":1: 'prompt' must be a string, got int 3"),
        ('{"prompt": "x", "answer": true}', r":1: 'answer' must be a string, got bool True"),
        ('{"prompt": "x", "answer": null}', r":1: the answer is empty, as in every row"),
        ('{"prompt": "", "answer": "b"}', r":1: 'prompt' is empty"),
        ('{"prompt": "x", "answer": " "}', r":1: the answer is empty, as in every row"),  # RW03
        ('{"id": true, "prompt": "x", "answer": "b"}', r":1: 'id' must be a string or an integer"),
        (GOOD + "\n" + GOOD, r":2: id 'a' is already used by .*set\.jsonl:1; make ids unique"),
        (
            '{"id": "2", "prompt": "x", "answer": "y"}\n{"prompt": "x", "answer": "y"}',
            r":2: id '2'",
        ),
        (b'{"prompt": "\xff"}', r"set\.jsonl is not UTF-8 text \(byte 12\)"),
    ],
)
def test_bad_file_gives_one_line_naming_the_place(prompt_file, content, message):
    with pytest.raises(DataError, match=message) as caught:
        load_prompts(prompt_file(content))
    assert "\n" not in str(caught.value)


def test_rows_without_an_answer_are_left_out_and_counted(prompt_file, caplog):
    """As published sets have some; a row that lacks the column is a mistake of the file."""
    rows = ['{"prompt": "a", "answer": "1"}', '{"prompt": "b", "answer": ""}']
    rows += ['{"prompt": "c", "answer": null}', '{"prompt": "d", "answer": "2"}']
    with caplog.at_level("WARNING"):
        prompts = load_prompts(prompt_file("\n".join(rows)))
    assert [(one.text, one.prompt_id) for one in prompts] == [("a", "1"), ("d", "4")]
    (line,) = caplog.messages
    assert "2 of 4 rows of" in line and line.endswith("set.jsonl:2")


def test_missing_file_and_folder_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl does not exist; check data\.train"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"cannot read prompt file .*; give a readable"):
        load_prompts(tmp_path)


def test_write_then_load_gives_the_same_prompts(tmp_path):
    prompts = [Prompt(prompt_id="é 1", text='quote " and\nnewline', answer="0a")]
    path = tmp_path / "new" / "set.jsonl"
    write_jsonl(path, prompts_of("to be replaced"))
    write_jsonl(path, prompts)
    assert load_prompts(path) == prompts
    assert os.listdir(path.parent) == ["set.jsonl"]


def test_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path):
    path = tmp_path / "set.jsonl"
    write_jsonl(path, prompts_of("old"))

    def breaks_half_way():
        yield from prompts_of("new")
        raise RuntimeError("no more prompts")

    with pytest.raises(RuntimeError, match="no more prompts"):
        write_jsonl(path, breaks_half_way())
    assert [p.text for p in load_prompts(path)] == ["old"]
    assert os.listdir(tmp_path) == ["set.jsonl"]


def test_write_below_a_file_is_a_data_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*; choose a folder"):
        write_jsonl(tmp_path / "file" / "set.jsonl", prompts_of("a"))


# Rows 1, 3 and 4 ask the same but for white space; row 4 has another answer.
REPEATED = """{"prompt": "1 + 1", "answer": "2"}
{"prompt": "1 + 2", "answer": "3"}
{"prompt": "1  + 1 ", "answer": "2"}
{"prompt": "1 + 1", "answer": "3"}
"""


@pytest.mark.parametrize(("drop", "ids"), [(False, ["1", "2", "3", "4"]), (True, ["1", "2"])])
def test_repeated_prompts_are_counted_and_dropped_on_demand(prompt_file, caplog, drop, ids):
    caplog.set_level(logging.INFO, logger="rollverify")
    path = prompt_file(REPEATED)
    found = read_prompt_set(PromptSource(location=path, drop_duplicates=drop))
    assert [prompt.prompt_id for prompt in found.prompts] == ids
    assert found.places == [f"{path}:{number}" for number in ids]
    # Rows 3 and 4 repeat row 1, row 4 contradicts it.
    assert (found.num_rows, found.num_duplicates, found.num_contradictions) == (4, 2, 1)
    warning, summary = (record.getMessage() for record in caplog.records)
    assert warning == f"{path}:4: the same prompt as {path}:1 with another answer"
    assert "2 of 4 rows" in summary and ("dropped" if drop else "kept") in summary


def test_repeated_ids_of_dropped_prompts_do_not_matter(prompt_file):
    path = prompt_file(GOOD + "\n" + GOOD)
    found = read_prompt_set(PromptSource(location=path, drop_duplicates=True))
    assert [prompt.prompt_id for prompt in found.prompts] == ["a"]


def test_a_template_goes_around_the_problem_and_the_wrap_around_both(prompt_file):
    source = PromptSource(location=prompt_file(GOOD), template="Q: {prompt} A:")
    (prompt,) = read_prompt_set(source, lambda text: f"<user>{text}<assistant>").prompts
    assert prompt.text == "<user>Q: Fk2= A:<assistant>"
    assert prompt.bare_text == "Fk2="


def test_a_problem_that_is_all_template_is_empty(prompt_file):
    path = prompt_file('{"prompt": "Q: .", "answer": "0c"}')
    with pytest.raises(
        DataError, match=r"set\.jsonl:1: the prompt is empty without .*drop the line"
    ):
        read_prompt_set(PromptSource(location=path, taken_off="Q: {prompt}."))


def test_half_a_character_is_refused(prompt_file):
    """A lone surrogate is JSON, but cannot be written as UTF-8 or tokenised."""
    with pytest.raises(DataError, match=r"set\.jsonl:1: 'prompt' holds half of a character"):
        load_prompts(prompt_file('{"prompt": "a\\ud800", "answer": "0c"}'))
    with pytest.raises(DataError, match=r"set\.jsonl:1: 'id' holds half of a character"):
        load_prompts(prompt_file('{"prompt": "a", "answer": "0c", "id": "\\ud800"}'))


def test_without_template_the_problem_is_the_text(prompt_file):
    (prompt,) = load_prompts(prompt_file(GOOD))
    assert prompt.bare_text == prompt.text == "Fk2="


def test_what_the_wrap_refuses_is_named_with_its_line(prompt_file):
    def refuse(text):
        raise DataError("no")

    path = prompt_file(GOOD)
    with pytest.raises(DataError, match=r"set\.jsonl:1: no$"):
        read_prompt_set(PromptSource(location=path), refuse)


def test_prompts_and_rewards_import_without_torch():
    code = (
        "import sys; import rollverify.data.prompts, rollverify.rewards; "
        "heavy = {'torch', 'torchdata', 'torchtitan', 'vllm', 'transformers', 'datasets'}; "
        "bad = (heavy | {'pyarrow'}) & set(sys.modules); "
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
