r"""The answer in a response, and one written form for what is only spelled differently."""

import re

MAX_ANSWER_CHARACTERS = 2000
"""A box with more text holds no answer: it counts as none, and bounds the work of a hostile one."""

_BOX = re.compile(r"(?<!\\)\\++(?:boxed|fbox)\s*(?:(\{)|([+-]?\d[\d,./]*))")
_INNER_BOX = re.compile(r"(?<!\\)\\++(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_box(response_text: str) -> str | None:
    r"""Content of the last complete box; None if there is none, or it is longer than an answer.

    Of nested boxes the outermost counts. `\boxed 5` is read as the number that follows. Linear in
    the text. r"\boxed{35}, no: \boxed{4}" -> "4"; r"\boxed{4} so \boxed{3" -> "4".
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
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if not depth:
            return match.start()
    return None


_STYLES = (
    "bf|rm|it|tt|sf|bfseries|itshape|rmfamily|normalsize|small|tiny|[lL]arge|LARGE|[hH]uge"
    "|scriptstyle"
)
"""Switches of fonts and sizes; they say nothing."""
_FRAMES = "underline|uline|boldsymbol|bm|pmb|mathbf|mathit|mathtt|mathsf|mathnormal|emph"
"""Commands whose argument means the same without them."""
_LABEL = (
    r"^\\text\s*\{(?![^{}]*\b(?:not|no|never|except|without|than|wrong|incorrect)\b)"
    r"[A-Za-z' ]{1,40}"
    r"(?::\s*|\s+(?:is|are|equals)\s*:?\s*)\}\s*:?\s*(?=\S)"
    r"|^(?:[Tt]he )?(?:[Ff]inal )?(?:[Aa]nswer|[Rr]esult|[Tt]otal)\s*(?::|\bis\b:?)\s*(?=\S)"
)
"""What announces an answer: \\text{Answer: } 5."""
_SYMBOLS = {
    "\u2212": "-",
    "\u2013": "-",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u00d7": r"\times ",
    "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ",
    "\u00b0": r"^\circ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2260": r"\ne ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2205": r"\emptyset ",
    "\u00b1": r"\pm ",
    "\u3001": ",",
    "\u3002": ".",
    "\u20ac": "",
    "\u00a3": "",
    "\u00a5": "",
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
}
_RAISED = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b"
_SUPERSCRIPTS = str.maketrans(_RAISED, "0123456789-")
_SUPERSCRIPT = re.compile(f"[{_RAISED}]+")
_ROOT = re.compile("\u221a\\s*(?:\\{([^{}]*)\\}|\\(([^()]*)\\)|(\\d+|[A-Za-z]))")


def _plain_symbols(text: str) -> str:
    """Symbols of Unicode as LaTeX."""
    text = _SUPERSCRIPT.sub(lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2] or found[3]}}}", text)
    return text.translate(str.maketrans(_SYMBOLS))


_DIGITS_IN_TEXT = re.compile(r"\\text\s*\{([^{}\\]*\d[^{}\\]*)\}")


def _open_text(found: re.Match[str]) -> str:
    r"""\text{ or 18} as \text{or} 18: a number inside counts as one."""
    return re.sub(r"[A-Za-z][A-Za-z .']*", r"\\text{\g<0>}", found[1])


_DEGREES = r"(-?[\d.]+)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)"
_ANGLE_OF = r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*\{?\d\}?)?)\s*"
_COMMAND = re.compile(r"\\(?!text\s*\{|frac\s*\{)")
_OF_COMMANDS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]", r"\\\\"),
        (rf"\\(?:{_STYLES})(?![A-Za-z])\s*", ""),
        (r"\\(?:text)?color\s*\{\s*\w+\s*\}\s*", ""),
        (rf"\\(?:{_FRAMES})(?![A-Za-z])\s*\{{([A-Za-z]|[\d.,]+)\}}", r"\1"),
        (rf"\\(?:{_FRAMES})(?![A-Za-z])\s*", ""),
        (r"(\\sqrt\s*\[[^][{}]*\])\s*(\d|[A-Za-z])", r"\1{\2}"),
        (r"\\degree(?![A-Za-z])|\\textdegree(?![A-Za-z])", r"^\\circ"),
        (r"\\varnothing(?![A-Za-z])|^\s*(?:\\left)?\\\{\s*(?:\\right)?\\\}\s*$", r"\\emptyset"),
        (rf"{_ANGLE_OF}\(\s*{_DEGREES}\s*\)", r"\1(\\frac{\2\\pi}{180})"),
        (rf"{_ANGLE_OF}\{{\s*{_DEGREES}\s*\}}", r"\1(\\frac{\2\\pi}{180})"),
        (rf"{_ANGLE_OF}{_DEGREES}", r"\1(\\frac{\2\\pi}{180})"),
    )
]
"""Ways to write the same thing with commands, applied in this order."""

_REPLACEMENTS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+", " "),
        (r"\\(?:text|mathrm)\s*\{\s*([ei])\s*\}", r"\1"),
        (r"^\s*\\text\s*\{\s*(?:the )?(?:empty|null) set\.?\s*\}\s*$", r"\\emptyset"),
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
        (_LABEL, ""),
        (r"\\text\s*\{\s*\}", " "),
        (r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*$", ""),
        (r"\s*\\\\\s*$", ""),
        (r"\s+", " "),
    )
]
"""Ways to write the same thing, applied in this order."""


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def written_form(latex: str) -> str:
    r"""One spelling of dollars, \left, \dfrac, spaces and "%"; no final dot, comma or degree."""
    if latex.isascii() and _NUMBER.fullmatch(latex):
        return latex
    text = latex if latex.isascii() else _plain_symbols(latex)
    text = _INNER_BOX.sub("", text).strip().strip("*").strip()
    replacements = _OF_COMMANDS + _REPLACEMENTS if _COMMAND.search(text) else _REPLACEMENTS
    for pattern, replacement in replacements:
        text = pattern.sub(replacement, text)
    text = _DIGITS_IN_TEXT.sub(_open_text, text)
    text = text.strip().rstrip(".,;").strip()
    for _ in range(3):  # a bound: each round reads the whole text
        if text.startswith("{") and _closing_brace(text, 1, len(text)) == len(text) - 1:
            text = text[1:-1].strip()
    return text
