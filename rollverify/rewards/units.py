"""Units of measure at the end of an answer: which words are one, and when two are the same."""

import re
from functools import lru_cache

_SPELLINGS = """
mm millimeter millimeters millimetre millimetres 毫米
cm centimeter centimeters centimetre centimetres 厘米
m meter meters metre metres 米
km kilometer kilometers kilometre kilometres 千米 公里
in inch inches
ft foot feet
yd yard yards
mi mile miles
mg milligram milligrams 毫克
g gram grams 克
kg kilogram kilograms 千克 公斤
lb lbs pound pounds
oz ounce ounces
s sec secs second seconds 秒
min mins minute minutes 分钟
h hr hrs hour hours 小时
day days 天
week weeks 周
month months 月
year years 年
ml milliliter milliliters millilitre millilitres 毫升
l liter liters litre litres 升
cent cents 分
dollar dollars
degree degrees 度
"""
KNOWN = {word: line.split()[0] for line in _SPELLINGS.strip().splitlines() for word in line.split()}
"""Name of a unit by any of its spellings; two that are both here are compared."""

_NO_UNIT_WORDS = """
or and nor xor to through until minus plus times over divided more less fewer greater than at
least most about not no non wrong incorrect false never except if else otherwise when unless but
is are was maybe possibly either neither both i e j half halves third thirds quarter quarters
fourth fourths fifth fifths sixth sixths seventh eighth eighths ninth tenth tenths hundredth
hundredths thousandth thousandths zero one two three four five six seven eight nine ten eleven
twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty
sixty seventy eighty ninety dozen dozens score hundred hundreds thousand thousands million
millions billion billions trillion trillions quadrillion squared cubed factorial mod modulo base
percent percents pct squares root negative positive double triple twice remainder each between
from up down above below under infinity pi
"""
_NO_UNIT = set(_NO_UNIT_WORDS.split())
"""Words that change the value before them, or say that it is not the answer."""

_BARE = (
    r"mm|cm|km|m|in|inch(?:es)?|ft|feet|foot|yards?|miles?|mph|kg|mg|g|lbs?|pounds?|hours?|minutes?"
    r"|seconds?|days?|weeks?|months?|years?|degrees?|dollars?|cents?|units?|meters?|centimeters?"
    r"|kilometers?|liters?|square|cubic|per"
)
_WORD = rf"(?:\\text\s*\{{[^{{}}\\]*\}}|(?<![A-Za-z\\])(?:{_BARE}))(?:\s*\^\s*(?:\{{-?\d\}}|\d))?"
_HANZI = r"[个只条张本元角分人天年月日周小时钟秒米厘毫公里克斤吨升度平方立种次岁支块名位辆棵件千]+"
_TAIL = re.compile(
    rf"\s*(?:(?<=[\w}}\s/])/\s*)?(?:{_WORD}|{_HANZI}"
    rf"|\\frac\s*\{{\s*(?:{_WORD})\s*\}}\s*\{{\s*(?:{_WORD})\s*\}})\s*$"
)
_MAX_WORDS = 6


def split_unit(text: str) -> tuple[str, str]:
    r"""(value, unit) of a written form; the unit is "" where what ends it is none.

    "35 \text{ cm}^2" -> ("35", "cm^2"); "17 \text{ or more}" -> (all of it, "").
    """
    value = text
    for _ in range(_MAX_WORDS):
        tail = _TAIL.search(value[-200:])
        if tail is None or not value[: (start := max(0, len(value) - 200) + tail.start())].strip():
            break
        value = value[:start].rstrip()
    if value == text or not re.search(r"[\d})!%\]A-Za-z]$", value):
        return text, ""
    unit = _name_of(text[len(value) :])
    return (text, "") if unit is None else (value, unit)


def split_text_unit(text: str) -> tuple[str, str]:
    r"""As `split_unit`, but a letter outside \text is a variable: 2x+3m is whole."""
    return (text, "") if is_bare_letter(text) else split_unit(text)


@lru_cache(maxsize=4096)
def _name_of(tail: str) -> str | None:
    """One spelling of what follows a value; None if a word of it is no unit's."""
    tail = re.sub(r"\\frac\s*\{(.*?\}?(?:\^\{?\d\}?)?)\s*\}\s*\{(.*)\}\s*$", r"\1 per \2", tail)
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", tail).replace("/", " per ")
    plain = re.sub(r"\s*\^\s*\{?(-?\d)\}?", r"^\1", plain).replace(".", " ")
    plain = plain.replace("mph", "miles per hour").lower()
    if not re.fullmatch(r"[^\W\d_]*(?:[\s-]+[^\W\d_]+|\^-?\d)*\s*", plain):
        return None
    names: list[str] = []
    power = ""
    for word in plain.split():
        if word in {"square", "sq", "cubic", "平方", "立方"}:
            power = "^3" if word in {"cubic", "立方"} else "^2"
        elif word in {"squared", "cubed"} and names and names[-1] in KNOWN.values():
            names[-1] += "^2" if word == "squared" else "^3"
        elif any(part in _NO_UNIT for part in word.split("-")):
            return None
        else:
            stem, _, exponent = word.partition("^")
            names.append(KNOWN.get(stem, stem) + (f"^{exponent}" if exponent else power))
            power = ""
    return " ".join(names) + (f" {power}" if power else "")


def are_compatible(gold: str, answer: str) -> bool:
    """Whether two units may be the same: one is missing, or not all words are those of KNOWN."""
    if not gold or not answer or gold == answer:
        return True
    names = {*KNOWN.values(), "per"}
    words = [word.partition("^")[0] for word in f"{gold} {answer}".split()]
    return not all(word in names for word in words)


def is_bare_letter(text: str) -> bool:
    r"""Whether a letter outside \text ends it, as in 5m or 12m^2: a variable as much as a unit."""
    return re.search(r"(?<![A-Za-z\\])[mg](?:\s*\^\s*(?:\{\d\}|\d))?$", text) is not None
