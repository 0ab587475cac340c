"""Which test problems share a run of words with a training problem.

It compares the texts of the prompts, not their answers, and removes nothing. What is the same at
the start or the end of every prompt of a set is its template and is left out.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollverify.data.prompts import Prompt

_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """A test problem that shares n-grams with the training set."""

    index: int
    """Its place in the test set."""
    test_id: str
    train_id: str
    """Id of the training problem that shares most n-grams with it; of several the first."""
    share: float
    """Part of the test problem's n-grams found anywhere in the training set, in (0, 1]."""


def find_overlaps(test: Sequence[Prompt], train: Sequence[Prompt], ngram: int) -> list[Overlap]:
    """Test problems that share an n-gram with a training problem, in order.

    Words are runs of letters and digits, in lower case. A problem shorter than n words is one
    n-gram by itself, so it is found only where a training problem consists of the same words.
    After Brown et al. 2020, arXiv 2005.14165, appendix C, but for the template.
    """
    grams = [set(_grams(words, ngram)) for words in _without_template(test)]
    owners: defaultdict[str, list[int]] = defaultdict(list)
    for index, own in enumerate(grams):
        for gram in own:
            owners[gram].append(index)
    found: defaultdict[int, set[str]] = defaultdict(set)
    hits: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for number, words in enumerate(_without_template(train)):
        for gram in set(_grams(words, ngram)) & owners.keys():
            for index in owners[gram]:
                found[index].add(gram)
                hits[index][number] += 1
    return [
        Overlap(
            index=index,
            test_id=test[index].prompt_id,
            train_id=train[
                max(hits[index], key=lambda number: (hits[index][number], -number))
            ].prompt_id,
            share=len(found[index]) / len(grams[index]),
        )
        for index in sorted(found)
    ]


def _grams(words: Sequence[str], ngram: int) -> Iterator[str]:
    """Runs of n words; all words where there are fewer."""
    for start in range(max(1, len(words) - ngram + 1)):
        yield " ".join(words[start : start + ngram])


def _without_template(prompts: Sequence[Prompt]) -> list[list[str]]:
    """Words of each prompt between what all of them begin and end with; at least one word each."""
    texts = [
        _WORD.findall(prompt.bare_text.lower()) or [prompt.bare_text.strip()] for prompt in prompts
    ]
    if len(set(map(tuple, texts))) < 2:
        return texts
    shortest = min(map(len, texts))
    start = _common_start(texts, shortest - 1)
    end = _common_start([text[::-1] for text in texts], shortest - 1 - start)
    return [text[start : len(text) - end] for text in texts]


def _common_start(texts: Sequence[Sequence[str]], limit: int) -> int:
    """Words that all texts begin with, at most `limit`."""
    for position in range(limit):
        if len({text[position] for text in texts}) > 1:
            return position
    return limit
