r"""Plain numbers are compared exactly (CASES section 10)."""

from fractions import Fraction

import pytest

from rollverify.rewards.numbers import compare_plain, is_plain, read_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("115,000", Fraction(115_000)),
        (r"\frac34", Fraction(3, 4)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        ("2 2/3", Fraction(8, 3)),
        (r"-2\frac{2}{3}", Fraction(-8, 3)),
        (r"1.5\times 10^{-3}", Fraction(3, 2000)),
        ("1.5e-3", Fraction(3, 2000)),
        ("x = 5", Fraction(5)),
        (r"35 \text{ cm}^2", Fraction(35)),
        (r"2 \text{ million}", Fraction(2_000_000)),
        (r"28\%", Fraction(28)),
        (r"0.\overline{3}", Fraction(1, 3)),
        (r"-1.2\overline{45}", Fraction(-137, 110)),
        (r".\bar 3", Fraction(1, 3)),
    ],
)
def test_numbers_are_read_exactly(text, value):
    """2 2/3 = 8/3; 1.5 * 10^-3 = 3/2000; 1.2454545... = (1245 - 12) / 990 = 137/110."""
    number = read_number(text)
    assert number is not None and number.value == value


@pytest.mark.parametrize(
    "text", ["", ".", "10^6", "0,1", "5, 6, 7", "3x", r"3 \text{i}", r"\frac{1}{0}", "12:00", "1-2"]
)
def test_what_is_no_plain_number_is_left_to_others(text):
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("gold", "answer", "is_right"),
    [
        ("9007199254740993", "9007199254740992", False),
        (r"28\%", "28", True),
        (r"28\%", "0.28", True),
        (r"28\%", "2.8", False),
        (r"50\%", r"0.5\%", False),
        ("33.3", r"\frac{100}{3}", True),
        ("33.4", r"\frac{100}{3}", False),
        ("33.3", "33.33", False),
        ("0.5", r"\frac{6}{11}", False),
        ("1/3", "0.333333", True),
        ("1/3", "0.33333", False),
        ("1/3", "0.3333334", False),
        ("0.5", "0", False),
        ("x=5", "y=5", False),
        ("52_8", "52_{8}", True),
        ("52_8", "52_9", False),
        ("52_8", "52", True),
        ("52_8", "(52)_8", True),
        ("52_8", "(52_9)", False),
        ("52_8", "52_{(9)}", False),
        ("1/3", r"0.\overline{3}", True),
        (r"0.\overline{3}", "0.3", False),
        ("12:00", "1:00", False),
        ("12:00", r"12:00 \text{ p.m.}", True),
        ("1:30 a.m.", "1:30 p.m.", False),
    ],
)
def test_comparison_follows_the_rules(gold, answer, is_right):
    """CASES M06, M23, M33, M34, M45, M87. 6/11 = 0.5454 rounds to 0.5, but 0.5 has one digit only;
    1/3 - 0.3333334 = 6.7e-8 is above half a unit of the seventh place, 5e-8."""
    assert compare_plain(gold, answer) is is_right


def test_other_answers_have_no_verdict_here():
    assert compare_plain("5", r"\sqrt{25}") is None and not is_plain(r"\sqrt{25}")
