"""Compares formulas with math-verify, in worker processes: it may take for ever or any memory."""

import contextlib
import logging
import re
from collections.abc import Callable
from typing import Any

import latex2sympy2_extended as latex2sympy
import math_verify.grader as grader
import sympy
from math_verify import verify

from rollverify.rewards.numbers import is_plain, is_rounded_gold, read_number
from rollverify.rewards.words import words_of

_WARM_UP = (
    r"x+1;2\sqrt{5}-\frac{\pi}{3};\left(3,\frac{\pi}{2}\right);(-\infty,2)\cup[3,4];\{1,-2,x\};"
    r"y=3x^2-4x_1+7;0<x\le 5;\begin{pmatrix}1\\2\end{pmatrix};\tan^2(y)+\log_2 8;1\pm\sqrt{19}"
)
"""Formulas of the usual kinds."""

_NORMALIZATION = latex2sympy.NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
_SLASH = re.compile(r"(?<![\w.^/}])(\d+)\s*/\s*(\d+)(?![\d.]|\s*[/^!])")
"""A fraction in a line, before anything is multiplied: 2/3\\pi is two thirds of pi."""
_EXACT_TOLERANCE = sympy.Float("1e-12")
_FLOAT_TOLERANCE = sympy.Float("1e-5")
_NUM_DIGITS = 30
_MAX_PARSED = 4096

_original_numeric_eq = grader.sympy_numeric_eq
_original_symbolic_eq = grader.sympy_symbolic_eq
_parsed: dict[str, Any] = {}


def worker_start() -> Callable[[], Callable[[str, str], str]]:
    """What workers call; they are forked with the parser's tables filled."""
    logging.disable()  # math-verify warns at every call that it is given no time limit
    for formula in _WARM_UP.split(";"):
        with contextlib.suppress(Exception):
            compare(formula, formula + "+0")
    return lambda: compare


def compare(gold: str, answer: str) -> str:
    """Whether two written forms mean the same: right, wrong, or gold_unreadable."""
    expected = _parse(gold)
    if expected is None and not is_plain(gold) and words_of(gold) is None:
        return "gold_unreadable"
    found = _parse(answer)
    if expected is None or found is None:
        return "wrong"
    rules = {"timeout_seconds": None, "raise_on_error": True, "allow_set_relation_comp": True}
    is_right = verify(expected, found, **rules) or _is_rounded(gold, found)
    return "right" if is_right else "wrong"


def _parse(latex: str) -> Any:
    """SymPy object of a written form; None if it is no LaTeX formula."""
    if latex not in _parsed:
        if len(_parsed) >= _MAX_PARSED:
            _parsed.clear()
        _parsed[latex] = _parse_anew(latex)
    return _parsed[latex]


def _parse_anew(latex: str) -> Any:
    number = read_number(latex)
    is_exact = number is not None and number.last_place is None and not number.is_percent
    if number is not None and is_exact and not number.is_letter:
        return sympy.Rational(number.value.numerator, number.value.denominator)
    for word, join in ((r"\text{or}", sympy.Union), (r"\text{and}", sympy.Intersection)):
        if word in latex:
            return _joined_sets(latex.split(word), join)
    latex = _SLASH.sub(r"\\frac{\1}{\2}", latex)
    normal = latex2sympy.normalize_latex(latex, _NORMALIZATION)
    sides = normal.split("=")  # the last one of a chain a = b = c is its result
    is_chain = len(sides) > 2 and not {",", ";"} & set(normal)
    for part in (normal, sides[-1]) if is_chain else (normal,):
        try:
            found = latex2sympy.latex2sympy(
                part,
                is_real=not grader.should_treat_as_complex(part),
                convert_degrees=False,
                normalization_config=None,
            )
        except MemoryError:
            raise
        except Exception:  # Whatever the generated parser and SymPy's constructors raise.
            continue
        return None if found in (sympy.nan, sympy.zoo) else _with_i(found)
    return None


def _with_i(found: Any) -> Any:
    """A constant in which the letter i is the imaginary unit: i^2, 1/i."""
    symbols = getattr(found, "free_symbols", set())
    if isinstance(found, sympy.Expr) and {str(one) for one in symbols} == {"i"}:
        return sympy.expand_complex(found.subs(dict.fromkeys(symbols, sympy.I)))
    return found


def _joined_sets(parts: list[str], join: Callable[..., Any]) -> Any:
    """The numbers for which one of several inequalities holds, or all; None if one is none."""
    found = [_parse(part.strip(" ,")) for part in parts]
    try:
        return join(*(one if isinstance(one, sympy.Set) else one.as_set() for one in found))
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _is_rounded(gold: str, found: Any) -> bool:
    """Whether an exact, irrational or endless answer rounds to a decimal gold (policy: yes)."""
    number = read_number(gold)
    if number is None or not isinstance(found, sympy.Expr) or not found.is_number:
        return False
    if found.has(sympy.Float) or not found.is_real:
        return False
    value = sympy.Rational(str(sympy.N(found, _NUM_DIGITS)))
    return is_rounded_gold(value, number)  # pyright: ignore[reportArgumentType]


def _numeric_eq(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    """math-verify's comparison, but relative to the size of the numbers.

    Alone it takes 1/2004! and 1/2006! for the same, because both are 0 to 15 digits.
    """
    if not _original_numeric_eq(a, b, float_rounding, numeric_precision):
        return False
    if isinstance(a, sympy.MatrixBase) or isinstance(b, sympy.MatrixBase):
        return True  # their elements have come through here one by one
    if grader.get_pct_val(a) is not None or grader.get_pct_val(b) is not None:
        return True
    is_float = a.has(sympy.Float) or b.has(sympy.Float)
    values = [sympy.N(x.doit(), _NUM_DIGITS) for x in (a, b)]
    if not all(value.is_number for value in values):
        return True
    if 0 in values:
        return values[0] == values[1]
    gap = abs(values[0] / values[1] - 1)
    return bool(gap < (_FLOAT_TOLERANCE if is_float else _EXACT_TOLERANCE))


def _symbolic_eq(a: Any, b: Any) -> bool:
    """math-verify's comparison, left out where one point shows that the two differ.

    `simplify` costs many milliseconds, and most wrong answers differ everywhere.
    """
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr) and _differ_at_a_point(a, b):
        return False
    return _original_symbolic_eq(a, b)


def _differ_at_a_point(a: Any, b: Any) -> bool:
    """Whether two expressions have clearly different finite values at one fixed point."""
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {x: sympy.Rational(700 + 37 * i, 1009) for i, x in enumerate(symbols)}
    try:
        one, other = (complex(sympy.N(x.subs(point).doit(), _NUM_DIGITS)) for x in (a, b))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return False  # no number there; the full comparison decides
    size = abs(one) + abs(other)
    return 0 < size < float("inf") and abs(one - other) > 1e-6 * size


grader.sympy_numeric_eq = _numeric_eq
grader.sympy_symbolic_eq = _symbolic_eq
