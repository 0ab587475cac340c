"""Several runs of the training program in one process, which imports its libraries only once.

The command lines are joined by THEN; tests start it in the program's stead.
"""

import sys
from itertools import groupby

from rollverify import train as program

THEN = "--then"


def main(words: list[str]) -> int:
    """Run one after the other until one fails; returns the last exit code."""
    code = 0
    for is_break, line in groupby(words, key=lambda word: word == THEN):
        code = code if is_break else code or program.main(list(line))
    return code


if __name__ == "__main__":
    program.exit_at_once(main(sys.argv[1:]))
