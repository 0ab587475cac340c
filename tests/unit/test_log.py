"""Console logging: levels by rank, prefixes, quiet libraries, lines beside a progress bar."""

import io
import logging
import sys

import pytest
from tqdm import tqdm

from rollverify.log import ProgressSafeHandler, init_logger

NAMES = ("rollverify", "torchtitan_ext", "__main__", "torchtitan", "vllm", "transformers")


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.delenv("ROLLVERIFY_DEBUG", raising=False)
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")


def lines(capsys) -> list[str]:
    """What was logged, without the time that starts each line."""
    return [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]


def speak(name: str) -> None:
    logger = logging.getLogger(name)
    logger.debug("a %s", "debug")
    logger.info("an %s", "info")
    logger.warning("a %s", "warning")


def test_rank_0_shows_info(capsys):
    init_logger(rank=0)
    speak("rollverify.train")
    assert lines(capsys) == ["an info", "WARNING a warning"]


def test_other_ranks_show_warnings_with_their_rank(capsys):
    init_logger(rank=1, world_size=2)
    speak("rollverify.train")
    assert lines(capsys) == ["[rank 1] WARNING a warning"]


def test_rank_0_of_several_has_a_prefix_too(capsys):
    init_logger(rank=0, world_size=2)
    speak("torchtitan_ext.trainer")
    assert lines(capsys) == ["[rank 0] an info", "[rank 0] WARNING a warning"]


@pytest.mark.parametrize("name", ["torchtitan.trainer", "vllm.engine", "transformers", "other"])
def test_libraries_show_only_errors_under_their_name(name, capsys, monkeypatch):
    # A library that another test has imported may have given its logger a handler of its own.
    monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    init_logger(rank=0)
    speak(name)
    logging.getLogger(name).error("an error")
    assert lines(capsys) == [f"ERROR {name}: an error"]


def test_debug_variable_opens_everything_on_every_rank(capsys, monkeypatch):
    monkeypatch.setenv("ROLLVERIFY_DEBUG", "1")
    init_logger(rank=1, world_size=2)
    speak("rollverify.train")
    speak("vllm.engine")
    assert lines(capsys) == [
        "[rank 1] DEBUG a debug",
        "[rank 1] an info",
        "[rank 1] WARNING a warning",
        "[rank 1] vllm.engine: an info",
        "[rank 1] WARNING vllm.engine: a warning",
    ]


def test_level_is_taken_for_rank_0(capsys):
    init_logger(rank=0, level="WARNING")
    speak("rollverify.train")
    assert lines(capsys) == ["WARNING a warning"]


def test_unknown_level_is_refused():
    with pytest.raises(ValueError, match="'LOUD'"):
        init_logger(rank=0, level="LOUD")


def test_setting_up_twice_does_not_double_lines(capsys):
    init_logger(rank=0)
    init_logger(rank=0)
    logging.getLogger("rollverify").info("once")
    assert lines(capsys) == ["once"]


def test_vllm_is_told_to_leave_logging_alone(monkeypatch):
    monkeypatch.delenv("VLLM_CONFIGURE_LOGGING")
    init_logger(rank=0)
    import os

    assert os.environ["VLLM_CONFIGURE_LOGGING"] == "0"


def test_a_line_does_not_break_a_progress_bar():
    stream = io.StringIO()
    logger = logging.Logger("bar")
    logger.addHandler(ProgressSafeHandler(stream))
    with tqdm(total=3, file=stream, mininterval=0) as bar:
        bar.update(1)
        drawn = len(stream.getvalue())
        logger.warning("hello")
        written = stream.getvalue()[drawn:]
    # The bar's line is blanked, the record gets a line of its own, the bar is drawn below it.
    blank, record, redrawn = written.partition("hello\n")
    assert record and blank.strip("\r ") == "" and blank.endswith("\r")
    assert "1/3" in redrawn and "\n" not in redrawn


def test_an_exception_is_shown_with_its_traceback(capsys):
    init_logger(rank=0)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("rollverify").exception("failed")
    shown = capsys.readouterr().err
    assert "ERROR failed\n" in shown and shown.endswith("ValueError: broken\n")


def test_a_replaced_stderr_is_followed(monkeypatch):
    init_logger(rank=0)
    replaced = io.StringIO()
    monkeypatch.setattr(sys, "stderr", replaced)
    logging.getLogger("rollverify").info("here")
    assert replaced.getvalue().endswith(" here\n")
