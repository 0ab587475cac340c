"""Answers that are words, or hold some: names, choices, ranges, and values joined by words."""

import re

from rollverify.rewards.units import KNOWN, split_unit

_ALL_TEXT = re.compile(r"\\text\s*\{([^{}\\]*)\}")
_BLANK = re.compile(r"(?<!\d)\s+|\s+(?!\d)|(?<=\d)\s+(?=\d{3}(?!\d|\s*/))")
"""White space that says nothing; between digits only before three of them: 1 000, not 2 1/3."""
_PLACEHOLDER = re.compile(
    r"(?:see|refer to|as shown|shown|proof|proved?|n/?a|unknown|not available|tbd|no answer"
    r")\b.*|[?\-_. ]*",
    re.IGNORECASE,
)
_BARE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_JOINS_ANSWERS = {"and", "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "inf"}


def words_of(text: str) -> str | None:
    r"""The words of an answer that is all `\text{}`, in small letters; None for anything else."""
    match = _ALL_TEXT.fullmatch(text)
    words = _plain_words(match[1]) if match else ""
    return words if re.search("[a-z]", words) else None


def _plain_words(text: str) -> str:
    return " ".join(text.split()).strip(".()").lower()


def is_same_text(gold: str, answer: str) -> bool:
    """Whether two written forms agree but for spaces, or are the same words in any case."""
    if _BLANK.sub("", gold) == _BLANK.sub("", answer):
        return True
    words = words_of(gold), words_of(answer)
    if words == (None, None):
        return False
    return (words[0] or _plain_words(gold)) == (words[1] or _plain_words(answer))


def is_prose(gold: str) -> bool:
    r"""Whether a gold answer is empty, stands for a missing one, or is words outside \text{}."""
    match = _ALL_TEXT.fullmatch(gold)
    if _PLACEHOLDER.fullmatch(match[1].strip() if match else gold):
        return True
    if match or "\\" in gold or re.search(r"\d", gold):
        return False
    return sum(word.lower() not in _JOINS_ANSWERS for word in _BARE_WORD.findall(gold)) >= 2


# ---- Forms that formulas would lose: choices, ranges, letters in a row, values with words ----

_CHOICE = re.compile(r"(?:\(\s*([A-J])\s*\)|([A-J])\s*(?:[).:](?!\d)|$))(.*)", re.DOTALL)
_OTHER_CHOICE = re.compile(r"(?<![A-Za-z\\])[A-J]\s*\)|\b(?:or|and|not|nor)\b")
_RANGE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:-|\\text\s*\{\s*(?:-|to)\s*\}|to)\s*(\d+(?:\.\d+)?)")
_SET_OR_TUPLE = r"(?:\\\{[^(){}]*\\\}|\([^(){}]*,[^(){}]*\))"
_SET = re.compile(_SET_OR_TUPLE * 2)
_LETTERS = re.compile(r"[A-Z]{2,}|[A-Za-z]{4,}")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}|(?<![A-Za-z\\])([A-Za-z]{2,})(?![A-Za-z])")
_JOIN = re.compile(r"\s*,?\s*\\text\s*\{\s*,?\s*(and|or)\s*\}\s*|\s*,?\s*\b(and|or)\b\s*")


def choice_of(text: str) -> tuple[str, bool] | None:
    """Letter of a choice and whether it is marked as one: E) 5, (E), E. five; a bare E is not."""
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip()
    plain = re.sub(r"^(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s+", "", plain)
    found = _CHOICE.fullmatch(plain)
    if found is None or _OTHER_CHOICE.search(found[3]):
        return None
    return found[1] or found[2], text != (found[1] or found[2])


def compare_choices(gold: str, answer: str) -> bool | None:
    """Whether two choices agree; None if one side is none, or neither is marked."""
    one, other = choice_of(gold), choice_of(answer)
    if one is None or other is None or not (one[1] or other[1]):
        return None
    return one[0] == other[0]


def compare_text_forms(gold: str, answer: str) -> bool | None:
    """Whether ranges or letters in a row agree, never a set and a tuple; None for other forms."""
    ranges = [range_of(text) for text in (gold, answer)]
    if ranges != [None, None]:
        return ranges[0] == ranges[1]
    shapes = [(text[:1], text[-1:]) for text in (gold, answer)]
    if ("(", ")") in shapes and ("\\", "}") in shapes and _SET.fullmatch(gold + answer):
        return False
    if _LETTERS.fullmatch(gold) and _LETTERS.fullmatch(answer):
        return gold.lower() == answer.lower()
    return None


def range_of(text: str) -> tuple[float, float] | None:
    """Ends of a range from a smaller to a larger number, as 10-15; None for anything else."""
    found = _RANGE.fullmatch(split_unit(text)[0])
    ends = (float(found[1]), float(found[2])) if found else (0.0, 0.0)
    return ends if ends[0] < ends[1] else None


def joined(text: str) -> str:
    """The values that "and" or "or" joins, as a list; with relations the "or" stays."""
    if _JOIN.search(text) is None:
        return text
    if re.search(r"[<>]|\\[lg]e", text):
        return _JOIN.sub(lambda found: rf"\text{{{found[1] or found[2]}}}", text)
    return _JOIN.sub(",", text).strip(", ")


def has_joined_relations(text: str) -> bool:
    """Whether `joined` has left an "and" or "or" between relations."""
    return r"\text{or}" in text or r"\text{and}" in text


def parts_of(text: str) -> tuple[list[str], list[str]] | None:
    """(words, formulas between them) of an answer that words are a part of; None without any."""
    words: list[str] = []
    formulas: list[str] = []
    start = 0
    for found in _TEXT.finditer(text):
        if found[2] and found[2].lower() not in KNOWN and found[2] not in {"or", "and", "if"}:
            continue
        formulas.append(text[start : found.start()].strip(" ,;"))
        said = re.sub(r"[^\w]+", " ", found[1] or found[2] or "").lower().split()
        words.append(" ".join(KNOWN.get(word, word) for word in said))
        start = found.end()
    formulas.append(text[start:].strip(" ,;"))
    return (words, formulas) if words else None
