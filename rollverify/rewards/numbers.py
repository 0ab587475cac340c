"""Plain numbers, numerals and clock times, compared exactly: everything is a `Fraction`."""

import re
from dataclasses import dataclass
from fractions import Fraction

from rollverify.rewards.units import are_compatible, is_bare_letter, split_unit

MIN_GOLD_DIGITS = 3
"""Significant digits from which a decimal gold may be a rounded value: 33.3 accepts 100/3."""

MIN_ANSWER_DIGITS = 6
"""Significant digits from which a decimal answer may be rounded: 1/3 accepts 0.333333."""

_MAX_EXPONENT = 400

_WHOLE = r"\d{1,3}(?:,\d{3})+|\d+"
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NUMBER = re.compile(
    r"(?:(?P<name>[A-Za-z](?:_\{?\w+\}?)?)\s*=\s*)?(?P<sign>[+-]?)\s*(?:"
    r"(?P<mixed>\d*)\s*\\frac\s*(?:\{\s*(?P<top>[+-]?\s*\d+)\s*\}|(?P<top_digit>\d))"
    r"\s*(?:\{\s*(?P<bottom>[+-]?\s*\d+)\s*\}|(?P<bottom_digit>\d))"
    rf"|(?:(?P<mixed_whole>\d+)\s+)?(?P<over>{_WHOLE})\s*/\s*(?P<under>{_WHOLE})"
    rf"|(?P<decimal>(?:{_WHOLE})?(?:\.\d+)?)(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*"
    r"(?:\{\s*(?P<power>[+-]?\d+)\s*\}|(?P<power_digit>\d))|[eE](?P<exponent>[+-]?\d+))?"
    rf")(?:\s*(?:\\text\s*\{{\s*)?(?P<scale>{'|'.join(_SCALES)})s?\s*\}}?)?"
    r"(?P<percent>\s*\\%)?"
)
_REMAINDER = re.compile(r"(-?\d+)\s*\\b?mod(?![A-Za-z])\s*(\d+)")
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
    unit: str = ""
    """What it is measured in, in one spelling."""
    is_letter: bool = False
    """Whether its unit is a letter outside of text, which may be a variable."""

    @property
    def is_endless(self) -> bool:
        """Whether no decimal can write it exactly, as 100/3."""
        return 10 ** self.value.denominator.bit_length() % self.value.denominator != 0


def read_number(text: str) -> PlainNumber | None:
    r"""A written form as a plain number; None if it is anything else.

    Read are 1,234.5, 3/4, \frac{3}{4}, mixed 2 2/3 and 2\frac{2}{3}, 1.5\times 10^{-3}, 2 million,
    with a percent sign or a unit after it and "x =" before it, and 0.\overline{3}.
    """
    part, unit = _NUMBER.fullmatch(text), ""
    if part is None:
        if (unusual := _read_unusual(text)) is not None:
            return unusual
        number, unit = split_unit(text)
        part = _NUMBER.fullmatch(number)
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
    value *= 10 ** _SCALES.get(part["scale"], 0)
    value = -value if part["sign"] == "-" else value
    is_letter = bool(unit) and is_bare_letter(text)
    is_percent = part["percent"] is not None
    return PlainNumber(value, is_percent, last_place, num_digits, part["name"], unit, is_letter)


def _read_unusual(text: str) -> PlainNumber | None:
    """A repeating decimal or the remainder of a division; None for anything else."""
    if part := _REPEATING.fullmatch(text):
        # 0.1666... = (16 - 1) / 90: all digits less the fixed ones, over nines and zeros.
        fixed, period = part["whole"] + part["fixed"], part["period"] or part["digit"]
        nines = (10 ** len(period) - 1) * 10 ** len(part["fixed"])
        value = Fraction(int(fixed + period) - int(fixed or 0), nines)
        return PlainNumber(-value if part["sign"] == "-" else value)
    if part := _REMAINDER.fullmatch(text):
        divisor = int(part[2][:_MAX_EXPONENT])
        return PlainNumber(Fraction(int(part[1][:_MAX_EXPONENT]) % divisor)) if divisor else None
    return None


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
    if not are_compatible(gold.unit, answer.unit) or (gold.is_letter and not answer.unit):
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
