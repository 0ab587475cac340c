r"""Finds the final answer of a response and brings it, or a gold answer, to one written form.

The answer is the content of the last complete `\boxed{}` or `\fbox{}`. This module reads text and
does no mathematics: `math_numbers` compares numbers, `math_symbolic` everything else.
"""

import re

MAX_ANSWER_CHARACTERS = 2000
"""A box with more text holds no answer: it counts as none, and bounds the work of a hostile one."""

_BOX = re.compile(r"(?<!\\)\\++(?:boxed|fbox)\s*(?:(\{)|([+-]?\d[\d,./]*))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_INNER_BOX = re.compile(r"(?<!\\)\\++(?:boxed|fbox)\s*(?=\{)")

_REPLACEMENTS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+", " "),
        (r"\u2212|\u2013", "-"),
        (r"\u03c0", r"\\pi "),
        (r"\u221e", r"\\infty "),
        (r"\u00d7", r"\\times "),
        (r"\u00b0|\\degree(?![A-Za-z])", r"^\\circ"),
        (r"\\(?:left|right)\.", ""),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:displaystyle|textstyle)(?![A-Za-z])", ""),
        (r"\{,\}", ","),
        (r"(?<=\d)\\[,!](?=\d{3})|(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\\\(|\\\)|^\\\[|(?<!\\)\\\]$", " "),
        (r"\\?\$", ""),
        (r"^\s*\\approx(?![A-Za-z])", ""),
        (r"\\text(?:bf|it|rm|sf|normal)(?=\s*\{)|\\mathrm(?=\s*\{)|\\mbox(?=\s*\{)", r"\\text"),
        (r"\\text\s*\{\s*i\s*\}", "i"),
        (r"\s*(?:\\text\s*\{\s*(?:percent|pct)\.?\s*\}|\b(?:percent|pct)\b)", r"\\%"),
        (r"(?<!\\)%", r"\\%"),
        (r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*$", ""),
        (r"\s+", " "),
    )
]
"""Ways to write the same thing, applied in this order."""

_ALL_TEXT = re.compile(r"\\text\s*\{([^{}\\]*)\}")
_PLACEHOLDER = re.compile(
    r"(?:see|refer to|as shown|shown|proof|proved?|n/?a|unknown|not available|tbd|no answer"
    r")\b.*|[?\-_. ]*",
    re.IGNORECASE,
)
_BARE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_BLANK = re.compile(r"(?<!\d)\s+|\s+(?!\d)|(?<=\d)\s+(?=\d{3}(?!\d|\s*/))")
"""White space that says nothing; between digits only before three of them: 1 000, not 2 1/3."""

_JOINS_ANSWERS = {"and", "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "inf"}


def last_box(response_text: str) -> str | None:
    r"""Content of the last complete box; None if there is none, or it is longer than an answer.

    A box that the end of the text cuts off does not count, the one before it does. Of nested boxes
    the outermost counts. `\boxed 5` is read as the number that follows. Linear in the text.

    Example:
        r"\boxed{35}, no: \boxed{4}" -> "4"; r"\boxed{4} so \boxed{3" -> "4".
    """
    stop, found, found_end = len(response_text), None, 0
    for box in reversed(list(_BOX.finditer(response_text))):
        if box[1] is None:
            return box[2].rstrip(".,/") if found is None else found
        close = _closing_brace(response_text, box.end(), stop)
        if found is not None:
            if close is None or close < found_end:
                return found
        elif close is None:
            if stop - box.end() > MAX_ANSWER_CHARACTERS:
                return None
            stop = box.start()
            continue
        found, found_end = response_text[box.end() : close], close
    return found


def _closing_brace(text: str, start: int, stop: int) -> int | None:
    """Index of the brace that closes the one before `start`; None if it is not near enough."""
    depth = 1
    for match in _BRACE.finditer(text, start, min(stop, start + MAX_ANSWER_CHARACTERS)):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if not depth:
                return match.start()
    return None


def written_form(latex: str) -> str:
    r"""One spelling for what is only written differently: dollars, \left, \dfrac, spaces, "%".

    A full stop or comma at the end goes, and so does a degree sign.
    """
    text = _INNER_BOX.sub("", latex).strip().strip("*").strip()
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;").strip()
    for _ in range(3):  # a bound: each round reads the whole text
        if _is_one_group(text):
            text = text[1:-1].strip()
    return text


def _is_one_group(text: str) -> bool:
    if not text.startswith("{"):
        return False
    return _closing_brace(text, 1, len(text)) == len(text) - 1


def words_of(text: str) -> str | None:
    r"""The words of an answer that is all `\text{}`, in small letters; None for anything else."""
    match = _ALL_TEXT.fullmatch(text)
    words = " ".join(match[1].split()).strip(".()").lower() if match else ""
    return words if re.search("[a-z]", words) else None


def written_answer(response_text: str) -> str | None:
    """The final answer of a response in written form, for votes; None if it gives none."""
    box = last_box(response_text)
    return None if box is None else written_form(box) or None


def is_same_text(gold: str, answer: str) -> bool:
    r"""Whether two written forms agree but for spaces, or are the same words.

    Words agree whatever their case, in `\text{}` or not: `\text{(C)}` agrees with "C".
    """
    if _BLANK.sub("", gold) == _BLANK.sub("", answer):
        return True
    gold_words, answer_words = words_of(gold), words_of(answer)
    if gold_words is None and answer_words is None:
        return False
    gold_plain, answer_plain = (
        " ".join(one.split()).strip(".()").lower() for one in (gold, answer)
    )
    return (gold_words or gold_plain) == (answer_words or answer_plain)


def is_prose(gold: str) -> bool:
    r"""Whether a gold answer is empty, stands for a missing one, or is a sentence.

    Words inside `\text{}` are an answer ("\text{two real roots}"); two bare words are not.
    """
    match = _ALL_TEXT.fullmatch(gold)
    inside = match[1].strip() if match else gold
    if _PLACEHOLDER.fullmatch(inside):
        return True
    if match or "\\" in gold or any(one.isdigit() for one in gold):
        return False
    words = [one for one in _BARE_WORD.findall(gold) if one.lower() not in _JOINS_ANSWERS]
    return len(words) >= 2
