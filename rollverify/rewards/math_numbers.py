r"""Exact comparison of answers that are plain numbers: integers, decimals, fractions, numerals.

Everything is a `Fraction`, so nothing overflows or is rounded. It answers None where one side is
anything else; `math_symbolic` decides those.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MIN_GOLD_DIGITS = 3
"""Significant digits from which a decimal gold may be a rounded value: 33.3 accepts 100/3."""

MIN_ANSWER_DIGITS = 6
"""Significant digits from which a decimal answer may be rounded: 1/3 accepts 0.333333."""

_MAX_EXPONENT = 400

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_WHOLE = r"\d{1,3}(?:,\d{3})+|\d+"
_UNIT = (
    r"(?:(?:\s*\\text\s*\{(?!\s*[ije]\s*\})[A-Za-z .]*\}"
    r"|\s*(?:[cmk]?m|km|ft|in|inch(?:es)?|feet|foot|yards?|miles?|mph|[mk]?g|lbs?|pounds?|hours?"
    r"|minutes?|seconds?|days?|weeks?|months?|years?|degrees?|dollars?|cents?|units?|meters?"
    r"|centimeters?|kilometers?|liters?|square|cubic|per)(?![A-Za-z]))"
    r"(?:\s*\^\s*(?:\{\d\}|\d))?)*"
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_SCALE = r"(?:\s*(?:\\text\s*\{\s*)?(?P<scale>" + "|".join(_SCALES) + r")s?\s*\}?)?"
_FRACTION = (
    r"\\frac\s*(?:\{\s*(?P<top>[+-]?\s*\d+)\s*\}|(?P<top_digit>\d))"
    r"\s*(?:\{\s*(?P<bottom>[+-]?\s*\d+)\s*\}|(?P<bottom_digit>\d))"
)
_NUMBER = re.compile(
    r"(?:(?P<name>[A-Za-z](?:_\{?\w+\}?)?)\s*=\s*)?(?P<sign>[+-]?)\s*(?:"
    rf"(?P<mixed>\d+)\s*{_FRACTION}"
    rf"|(?P<mixed_whole>\d+)\s+(?P<mixed_top>\d+)\s*/\s*(?P<mixed_bottom>\d+)"
    rf"|(?P<over_top>{_WHOLE})\s*/\s*(?P<over_bottom>{_WHOLE})"
    rf"|(?P<decimal>{_DECIMAL})(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{{\s*"
    r"(?P<power>[+-]?\d+)\s*\}|(?P<power_digit>\d))|[eE](?P<exponent>[+-]?\d+))?"
    rf"){_SCALE}(?P<percent>\s*\\%)?(?:{_UNIT})"
)
_PURE_FRACTION = re.compile(rf"(?P<sign>[+-]?)\s*{_FRACTION}{_SCALE}(?P<percent>\s*\\%)?{_UNIT}")
_REPEATING = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<whole>\d*)\.(?P<fixed>\d*)\s*\\(?:overline|bar|dot)(?![A-Za-z])\s*"
    r"(?:\{\s*(?P<period>\d+)\s*\}|(?P<digit>\d))"
)
_NUMERAL = re.compile(
    r"(?P<sign>[+-]?)(?P<digits>[0-9A-Z]+)\s*(?:_\s*(?:\{\s*(?P<base>\d+)\s*\}|(?P<short>\d)))?"
)
_BRACKETS = re.compile(r"\(\s*([+-]?[0-9A-Z]+(?:\s*_\s*(?:\{\s*\d+\s*\}|\d))?)\s*\)")
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?:\s*(?:\\text\s*\{)?\s*([ap])\.?\s*m\.?\s*\}?)?", re.I)


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """A number with what its spelling says about rounding."""

    value: Fraction
    """As written; 28 for "28\\%"."""
    is_percent: bool
    """Whether a percent sign follows."""
    last_place: Fraction | None
    """Value of one unit in the last place of a decimal; None for whole numbers and fractions."""
    num_digits: int
    """Significant digits of a decimal."""
    name: str | None = None
    """What stands before "=", as the x of "x = 5"."""

    @property
    def is_endless(self) -> bool:
        """Whether no decimal can write it exactly, as 100/3."""
        bottom = self.value.denominator
        for prime in (2, 5):
            while bottom % prime == 0:
                bottom //= prime
        return bottom != 1


def read_number(text: str) -> PlainNumber | None:
    r"""A written form as a plain number; None if it is anything else.

    Read are 1,234.5, 3/4, \frac{3}{4}, mixed 2 2/3 and 2\frac{2}{3}, 1.5\times 10^{-3}, 2 million,
    with a percent sign or a unit after it and "x =" before it, and 0.\overline{3}. Units are not
    compared.
    """
    if repeating := _REPEATING.fullmatch(text):
        return PlainNumber(_repeating_value(repeating), False, None, 0)
    match = _PURE_FRACTION.fullmatch(text) or _NUMBER.fullmatch(text)
    if match is None:
        return None
    part = match.groupdict()
    try:
        value, last_place, num_digits = _value_of(part)
    except (ZeroDivisionError, ValueError):
        return None
    value *= _SCALES.get(part.get("scale") or "", 1)
    if part["sign"] == "-":
        value = -value
    is_percent = part["percent"] is not None
    return PlainNumber(value, is_percent, last_place, num_digits, part.get("name"))


def _repeating_value(match: re.Match[str]) -> Fraction:
    """0.1666... = (16 - 1) / 90: all digits less the fixed ones, over nines and zeros."""
    fixed = match["whole"] + match["fixed"]
    period = match["period"] or match["digit"]
    nines = (10 ** len(period) - 1) * 10 ** len(match["fixed"])
    value = Fraction(int(fixed + period) - int(fixed or 0), nines)
    return -value if match["sign"] == "-" else value


def _value_of(part: dict[str, str | None]) -> tuple[Fraction, Fraction | None, int]:
    """Value without its sign; of a decimal also one unit in the last place and its digits."""
    if top := part.get("top") or part.get("top_digit"):
        bottom = part.get("bottom") or part.get("bottom_digit") or ""
        whole = int(part.get("mixed") or 0)
        fraction = Fraction(int(top.replace(" ", "")), int(bottom.replace(" ", "")))
        if whole and fraction <= 0:
            raise ValueError("no mixed number")
        return whole + fraction, None, 0
    for whole, top, bottom in (
        (part["mixed_whole"], part["mixed_top"], part["mixed_bottom"]),
        ("0", part["over_top"], part["over_bottom"]),
    ):
        if whole and top and bottom:
            top, bottom = top.replace(",", ""), bottom.replace(",", "")
            return int(whole) + Fraction(int(top), int(bottom)), None, 0
    digits = (part["decimal"] or "").replace(",", "")
    if not digits:
        raise ValueError("no digits")
    exponent = int(part["power"] or part["power_digit"] or part["exponent"] or 0)
    if abs(exponent) > _MAX_EXPONENT:
        raise ValueError("left to the symbolic comparison")
    scale = Fraction(10) ** exponent
    places = len(digits.partition(".")[2])
    last_place = Fraction(1, 10**places) * scale if places else None
    num_digits = len(digits.replace(".", "").lstrip("0"))
    return Fraction(digits) * scale, last_place, num_digits


def is_rounded_gold(value: Fraction, gold: PlainNumber) -> bool:
    """Whether an exact value rounds to a gold that is a decimal of enough digits."""
    if gold.last_place is None or gold.num_digits < MIN_GOLD_DIGITS:
        return False
    return abs(value - gold.value) <= gold.last_place / 2


def compare_numbers(gold: PlainNumber, answer: PlainNumber) -> bool:
    r"""Whether two plain numbers are the same answer.

    The values are equal exactly; or one side is a decimal that rounds the other, which is an
    endless fraction (or a longer decimal of at least 6 digits). A percent sign on one side alone
    is accepted for both readings: 28\% agrees with 28 and with 0.28.
    """
    if gold.name and answer.name and gold.name != answer.name:
        return False
    if gold.value == answer.value:
        return True
    if gold.is_percent != answer.is_percent:
        factor = Fraction(1, 100)
        one = gold.value * factor if gold.is_percent else gold.value
        return one == (answer.value * factor if answer.is_percent else answer.value)
    longer = answer.last_place is not None and answer.num_digits >= MIN_ANSWER_DIGITS
    if (answer.is_endless or longer) and is_rounded_gold(answer.value, gold):
        return True
    if not gold.is_endless or answer.last_place is None:
        return False
    is_long = answer.num_digits >= MIN_ANSWER_DIGITS
    return is_long and abs(answer.value - gold.value) <= answer.last_place / 2


def compare_plain(gold: str, answer: str) -> bool | None:
    """Whether two written forms agree, if both are plain numbers, numerals or clock times.

    Returns:
        None if one side is anything else.
    """
    numeral = _compare_numerals(gold, answer)
    if numeral is not None:
        return numeral
    gold_time, answer_time = _CLOCK.fullmatch(gold), _CLOCK.fullmatch(answer)
    if gold_time and answer_time:
        same = [int(one) for one in gold_time.groups()[:2]]
        halves = {(one[3] or "").lower() for one in (gold_time, answer_time)} - {""}
        return same == [int(one) for one in answer_time.groups()[:2]] and len(halves) < 2
    gold_number, answer_number = read_number(gold), read_number(answer)
    if gold_number is None or answer_number is None:
        return None
    return compare_numbers(gold_number, answer_number)


def _compare_numerals(gold: str, answer: str) -> bool | None:
    """52_8 against 52_8, 52_9 or 52: a base that only one side names is not compared."""
    one, other = _numeral(gold), _numeral(answer)
    if not one or not other:
        return None
    bases = [match["base"] or match["short"] for match in (one, other)]
    if bases == [None, None]:
        return None
    same = one["sign"] == other["sign"]
    same &= one["digits"].lstrip("0") == other["digits"].lstrip("0")
    return same and (None in bases or bases[0] == bases[1])


def _numeral(text: str) -> re.Match[str] | None:
    """The numeral that a text is, brackets around it, its digits or its base left off."""
    return _NUMERAL.fullmatch(_BRACKETS.sub(r"\1", text))


def is_plain(text: str) -> bool:
    """Whether a written form is a number, a numeral with a base, or a clock time."""
    numeral = _numeral(text)
    has_base = numeral is not None and (numeral["base"] or numeral["short"]) is not None
    return has_base or _CLOCK.fullmatch(text) is not None or read_number(text) is not None
