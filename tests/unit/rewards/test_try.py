"""The command that grades a file of answers and shows what was read."""

import importlib
import json

import pytest

main = importlib.import_module("rollverify.rewards.try").main

ROWS = [
    {"answer": "17", "response": r"\boxed{17\text{ or 18}}"},
    {"gold": r"5\text{ cm}", "response": r"first 4, then \boxed{5\text{ centimeters}}"},
    {"answer": 5, "response": "five"},
]


def file_of(folder, rows):
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_each_row_shows_what_was_read_and_why(tmp_path, capsys):
    path = file_of(tmp_path, ROWS)
    assert main([path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path}:1: wrong, ")
    assert lines[3:6] == [
        f"{path}:2: right, as numbers with what they are measured in",
        r"  gold   5\text{ cm}  (number 5, unit cm)",
        r"  answer 5\text{ centimeters}  (number 5, unit cm)",
    ]
    assert lines[6:] == [
        f"{path}:3: wrong, no answer in a box",
        "  gold   5  (number 5)",
        "  answer none",
        "3 graded: 2 wrong, 1 right",
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"answer": "3"}], ":1: no text or number in 'response'"),
        ([{"response": "3"}], ":1: no text or number in 'answer' or 'gold'"),
        ([], "is empty"),
    ],
)
def test_a_file_that_cannot_be_graded_is_one_line(tmp_path, capsys, rows, message):
    assert main([file_of(tmp_path, rows)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("arguments", [[], ["missing.jsonl"], ["a", "b"]])
def test_a_file_must_be_named(capsys, arguments):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
