r"""Reward 1 when the last box of a response holds the expected maths answer, else 0.

Text and plain numbers are compared here; formulas in worker processes (`symbolic.py`).
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from itertools import repeat

from rollverify.data.prompts import Prompt
from rollverify.rewards.pool import WorkerPool
from rollverify.rewards.reward import COUNTED, WorkerReward

MEMORY_BYTES = 3 << 30
"""Address space of a worker; a formula that needs more is an error of the grading."""

MAX_ANSWER_CHARACTERS = 2000
"""A box with more text holds no answer: it counts as none, and bounds the work of a hostile one."""

MIN_GOLD_DIGITS = 3
"""Significant digits from which a decimal gold may be a rounded value: 33.3 accepts 100/3."""

MIN_ANSWER_DIGITS = 6
"""Significant digits from which a decimal answer may be rounded: 1/3 accepts 0.333333."""

_MAX_EXPONENT = 400
_MAX_REMEMBERED = 50_000


class MathReward(WorkerReward):
    r"""Scores responses against `Prompt.answer`, which is LaTeX without dollars.

    1 if the last complete `\boxed{}` or `\fbox{}`, of at most 2,000 characters, means the same as
    the gold answer (`docs/rewards.md` lists the matters of policy), else 0. A comparison that fails
    or runs into its time limit scores 0 and is counted apart.
    """

    has_answers = True

    def __init__(self, *, time_out_s: float, num_workers: int) -> None:
        super().__init__(
            WorkerPool(
                "rollverify.rewards.symbolic:worker_start",
                num_workers=num_workers,
                time_out_s=time_out_s,
                memory_bytes=MEMORY_BYTES,
            )
        )
        self._verdicts: dict[tuple[str, str], str] = {}
        self._late: set[tuple[str, str]] = set()

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        """1.0 if the answer of the response is right, else 0.0."""
        verdict = self._verdict(written_form(prompt.answer), self.answer_of(response_text) or "")
        self._count(verdict)
        return float(verdict == "right")

    def answer_of(self, response_text: str) -> str | None:
        """The content of the last box in written form."""
        box = last_box(response_text)
        return None if box is None else written_form(box) or None

    def unreadable(self, prompts: Sequence[Prompt]) -> list[int]:
        """See `Reward`."""
        golds = [written_form(prompt.answer) for prompt in prompts]
        unclear = [g for g in dict.fromkeys(golds) if not is_prose(g) and not is_plain(g)]
        with ThreadPoolExecutor(self.num_threads) as threads:
            # An error or time-out against "0" would be one against every response, too.
            verdicts = dict(zip(unclear, threads.map(self._ask, unclear, repeat("0")), strict=True))
        return [i for i, g in enumerate(golds) if is_prose(g) or verdicts.get(g) in COUNTED]

    def _verdict(self, gold: str, answer: str) -> str:
        if is_prose(gold):
            return "gold_unreadable"
        if not answer:
            return "wrong"
        if is_same_text(gold, answer):
            return "right"
        is_right = compare_plain(gold, answer)
        if is_right is not None:
            return "right" if is_right else "wrong"
        return self._verdicts.get((gold, answer)) or self._ask(gold, answer)

    def _ask(self, gold: str, answer: str) -> str:
        """The verdict of a worker, remembered unless it may be the machine's fault."""
        kind, value = self._pool.ask(gold, answer)
        verdict = value if kind == "answer" else kind
        if verdict in COUNTED:
            text = "grading gave %s (%s) for the answer %.60r, gold %.60r"
            self._warn(text, verdict, value if kind == "error" else "no verdict", answer, gold)
        if verdict == "error" or (verdict == "timeout" and (gold, answer) not in self._late):
            self._late.add((gold, answer))  # a second time-out is believed
            return verdict
        if len(self._verdicts) >= _MAX_REMEMBERED:
            self._verdicts.clear()
            self._late.clear()
        self._verdicts[gold, answer] = verdict
        return verdict


# ---- The answer in a response, and one written form for what is only spelled differently ----

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


def written_form(latex: str) -> str:
    r"""One spelling of dollars, \left, \dfrac, spaces and "%"; no final dot, comma or degree."""
    text = _INNER_BOX.sub("", latex).strip().strip("*").strip()
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;").strip()
    for _ in range(3):  # a bound: each round reads the whole text
        if text.startswith("{") and _closing_brace(text, 1, len(text)) == len(text) - 1:
            text = text[1:-1].strip()
    return text


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


# ---- Plain numbers, compared exactly: everything is a `Fraction` ----

_WHOLE = r"\d{1,3}(?:,\d{3})+|\d+"
_UNIT = (
    r"(?:(?:\s*\\text\s*\{(?!\s*[ije]\s*\})[A-Za-z .]*\}"
    r"|\s*(?:[cmk]?m|km|ft|in|inch(?:es)?|feet|foot|yards?|miles?|mph|[mk]?g|lbs?|pounds?|hours?"
    r"|minutes?|seconds?|days?|weeks?|months?|years?|degrees?|dollars?|cents?|units?|meters?"
    r"|centimeters?|kilometers?|liters?|square|cubic|per)(?![A-Za-z]))"
    r"(?:\s*\^\s*(?:\{\d\}|\d))?)*"
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_NUMBER = re.compile(
    r"(?:(?P<name>[A-Za-z](?:_\{?\w+\}?)?)\s*=\s*)?(?P<sign>[+-]?)\s*(?:"
    r"(?P<mixed>\d*)\s*\\frac\s*(?:\{\s*(?P<top>[+-]?\s*\d+)\s*\}|(?P<top_digit>\d))"
    r"\s*(?:\{\s*(?P<bottom>[+-]?\s*\d+)\s*\}|(?P<bottom_digit>\d))"
    rf"|(?:(?P<mixed_whole>\d+)\s+)?(?P<over>{_WHOLE})\s*/\s*(?P<under>{_WHOLE})"
    rf"|(?P<decimal>(?:{_WHOLE})?(?:\.\d+)?)(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*"
    r"(?:\{\s*(?P<power>[+-]?\d+)\s*\}|(?P<power_digit>\d))|[eE](?P<exponent>[+-]?\d+))?"
    rf")(?:\s*(?:\\text\s*\{{\s*)?(?P<scale>{'|'.join(_SCALES)})s?\s*\}}?)?"
    rf"(?P<percent>\s*\\%)?{_UNIT}"
)
_REPEATING = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<whole>\d*)\.(?P<fixed>\d*)\s*\\(?:overline|bar|dot)(?![A-Za-z])\s*"
    r"(?:\{\s*(?P<period>\d+)\s*\}|(?P<digit>\d))"
)


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """A number with what its spelling says about rounding."""

    value: Fraction
    """As written; 28 for "28\\%"."""
    is_percent: bool = False
    """Whether a percent sign follows."""
    last_place: Fraction | None = None
    """Value of one unit in the last place of a decimal; None for whole numbers and fractions."""
    num_digits: int = 0
    """Significant digits of a decimal."""
    name: str | None = None
    """What stands before "=", as the x of "x = 5"."""

    @property
    def is_endless(self) -> bool:
        """Whether no decimal can write it exactly, as 100/3."""
        return 10 ** self.value.denominator.bit_length() % self.value.denominator != 0


def read_number(text: str) -> PlainNumber | None:
    r"""A written form as a plain number; None if it is anything else.

    Read are 1,234.5, 3/4, \frac{3}{4}, mixed 2 2/3 and 2\frac{2}{3}, 1.5\times 10^{-3}, 2 million,
    with a percent sign or a unit (never compared) after it and "x =" before it, and 0.\overline{3}.
    """
    if part := _REPEATING.fullmatch(text):
        # 0.1666... = (16 - 1) / 90: all digits less the fixed ones, over nines and zeros.
        fixed, period = part["whole"] + part["fixed"], part["period"] or part["digit"]
        nines = (10 ** len(period) - 1) * 10 ** len(part["fixed"])
        value = Fraction(int(fixed + period) - int(fixed or 0), nines)
        return PlainNumber(-value if part["sign"] == "-" else value)
    part = _NUMBER.fullmatch(text)
    if part is None:
        return None
    last_place, num_digits = None, 0
    try:
        if top := part["top"] or part["top_digit"]:
            whole = int(part["mixed"] or 0)
            bottom = part["bottom"] or part["bottom_digit"]
            value = Fraction(int(top.replace(" ", "")), int(bottom.replace(" ", "")))
            if whole and value <= 0:
                return None
            value += whole
        elif over := part["over"]:
            value = Fraction(int(over.replace(",", "")), int(part["under"].replace(",", "")))
            value += int(part["mixed_whole"] or 0)
        else:
            digits = part["decimal"].replace(",", "")
            exponent = int(part["power"] or part["power_digit"] or part["exponent"] or 0)
            if not digits or abs(exponent) > _MAX_EXPONENT:
                return None
            value = Fraction(digits) * Fraction(10) ** exponent
            if places := len(digits.partition(".")[2]):
                last_place = Fraction(10) ** (exponent - places)
            num_digits = len(digits.replace(".", "").lstrip("0"))
    except (ZeroDivisionError, ValueError):  # of more digits than Python reads
        return None
    value *= _SCALES.get(part["scale"], 1)
    value = -value if part["sign"] == "-" else value
    return PlainNumber(value, part["percent"] is not None, last_place, num_digits, part["name"])


def is_rounded_gold(value: Fraction, gold: PlainNumber) -> bool:
    """Whether an exact value rounds to a gold that is a decimal of enough digits."""
    if gold.last_place is None or gold.num_digits < MIN_GOLD_DIGITS:
        return False
    return abs(value - gold.value) <= gold.last_place / 2


def compare_numbers(gold: PlainNumber, answer: PlainNumber) -> bool:
    r"""Whether two plain numbers are the same answer: equal exactly, or one rounds the other.

    Only an endless fraction or a decimal of at least 6 digits may be rounded. A percent sign on one
    side alone is accepted for both readings: 28\% agrees with 28 and with 0.28.
    """
    if gold.name and answer.name and gold.name != answer.name:
        return False
    if gold.value == answer.value:
        return True
    if gold.is_percent != answer.is_percent:
        percent, plain = (gold, answer) if gold.is_percent else (answer, gold)
        return percent.value == plain.value * 100
    is_long = answer.last_place is not None and answer.num_digits >= MIN_ANSWER_DIGITS
    if (answer.is_endless or is_long) and is_rounded_gold(answer.value, gold):
        return True
    if not gold.is_endless or answer.last_place is None or not is_long:
        return False
    return abs(answer.value - gold.value) <= answer.last_place / 2


# ---- Numerals with a base, and clock times ----

_NUMERAL = re.compile(
    r"(?P<sign>[+-]?)(?P<digits>[0-9A-Z]+)\s*(?:_\s*(?:\{\s*(?P<base>\d+)\s*\}|(?P<short>\d)))?"
)
_BRACKETS = re.compile(r"\(\s*([+-]?[0-9A-Z]+(?:\s*_\s*(?:\{\s*\d+\s*\}|\d))?)\s*\)")
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?:\s*(?:\\text\s*\{)?\s*([ap])\.?\s*m\.?\s*\}?)?", re.I)


def compare_plain(gold: str, answer: str) -> bool | None:
    """Whether two plain numbers, numerals or clock times agree; None if one side is neither.

    A base that only one side names is not compared: 52_8 agrees with 52, not with 52_9.
    """
    (digits, base), (other_digits, other_base) = _numeral(gold), _numeral(answer)
    if digits is not None and other_digits is not None and (base or other_base):
        return digits == other_digits and (not base or not other_base or base == other_base)
    if (time := _CLOCK.fullmatch(gold)) and (other_time := _CLOCK.fullmatch(answer)):
        halves = {(one[3] or "").lower() for one in (time, other_time)} - {""}
        return (int(time[1]), time[2]) == (int(other_time[1]), other_time[2]) and len(halves) < 2
    number, other_number = read_number(gold), read_number(answer)
    if number is None or other_number is None:
        return None
    return compare_numbers(number, other_number)


def _numeral(text: str) -> tuple[str | None, str | None]:
    """(sign and digits, base) of a numeral, brackets around it, its digits or its base left off."""
    match = _NUMERAL.fullmatch(_BRACKETS.sub(r"\1", text))
    if match is None:
        return None, None
    return match["sign"] + match["digits"].lstrip("0"), match["base"] or match["short"]


def is_plain(text: str) -> bool:
    """Whether a written form is a number, a numeral with a base, or a clock time."""
    return bool(_numeral(text)[1] or _CLOCK.fullmatch(text) or read_number(text))
