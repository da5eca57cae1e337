r"""Units of answers: "5 cm", "5 square inches", r"\$5", "30°", "50 cents", "5 million people"."""

from __future__ import annotations

import re
from fractions import Fraction

from rlvr_jax.rewards.formulas import plain_number
from rlvr_jax.rewards.notation import TEXT

_UNIT_NAMES = {
  "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre",
  "km": "kilometer kilometre", "in": "inch", "ft": "foot feet", "yd": "yard", "mi": "mile",
  "mg": "milligram", "g": "gram", "kg": "kilogram", "lb": "pound", "oz": "ounce",
  "ml": "milliliter millilitre", "l": "liter litre", "gal": "gallon",
  "s": "sec second", "min": "minute", "h": "hr hour", "day": "", "week": "", "month": "",
  "year": "yr", "%": "percent", "cent": "", "dollar": "", "degree": "", "rad": "radian",
  "euro": "", "k": "", "kelvin": "", "celsius": "centigrade", "fahrenheit": "",
  "unit": "", "square": "sq", "cubic": "cu", "/": "per",
}  # fmt: skip
_UNITS = {alias: unit for unit, names in _UNIT_NAMES.items() for alias in (unit, *names.split())}
_UNIT_LETTERS = "mgslhkKLNJWVACF"
_POWERS = {"square": "^2", "cubic": "^3"}
# Units that one answer may combine, as in "3 hours and 20 minutes", in multiples of the smallest.
_PARTS = (
  {"week": 604_800, "day": 86_400, "h": 3600, "min": 60, "s": 1}, {"year": 12, "month": 1},
  {"mi": 63_360, "yd": 36, "ft": 12, "in": 1}, {"lb": 16, "oz": 1}, {"dollar": 100, "cent": 1},
  {"km": 1_000_000, "m": 1000, "cm": 10, "mm": 1}, {"kg": 1000, "g": 1},
)  # fmt: skip
_COMPOUND = re.compile(
  r"\s*(?:[0-9]+(?:\.[0-9]+)?\s*[A-Za-z]+\.?\s*(?:,|and\b|,\s*and\b|\\land)?\s*){2,4}"
)
_AMOUNTS_OF = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)")
_UNIT_TEXT = re.compile(r"\s*([A-Za-z%][A-Za-z /().-]*?)\s?(\^[23])?[\s.]*")
_WRAPPED_UNIT = re.compile(rf"(.*[^\s\\])\s?{TEXT}\s?((?:\^[23])?)")
_QUOTIENT_OF_UNITS = re.compile(rf"{TEXT}\s?/\s?{TEXT}")
_PERCENT = re.compile(r"(.*[^\s\\%])(?:\s?\\?%)+")
_BARE_UNIT = re.compile(r"(.*[\d}.])(\s?)([A-Za-z][A-Za-z. /-]*(?:\^[23])?)")
_UNIT_OF_FORMULA = re.compile(
  r"(?=.*[\d\\])([^,;=<>]*?[^\s,;=<>])\s([A-Za-z]{2}[A-Za-z. /]*(?:\^[23])?)"
)
_NO_UNIT = re.compile(r"\b(?:to|if|for|when)\b|(?<![A-Za-z])[A-Za-z]{1,2}\b")
SCALES = {
  "dozen": 12, "hundred": 10**2, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "mn": 10**6,
  "crore": 10**7, "billion": 10**9, "bn": 10**9, "trillion": 10**12,
}  # fmt: skip
_SCALED = re.compile(
  rf"(.*[\d}}.])\s?((?:\\[a-z]+\s?\{{)?)\s?({'|'.join(SCALES)})s?(?![A-Za-z])\s?(.*)",
  re.IGNORECASE,
)
NUMBER_WORDS = (
  "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
  " sixteen seventeen eighteen nineteen twenty"
).split()
_CHANGES_VALUE = re.compile(
  rf"\b(?:{'|'.join((*NUMBER_WORDS, *SCALES))}|thirty|forty|fifty|sixty|seventy|eighty|ninety"
  rf"|(?:ten|{'|'.join(SCALES)})ths?|(?:four|fif|six|seven|eigh|nin)ths|thirds|halves|quarters?"
  r"|tens|scores?|gross|pairs?|couples?|half|double|triple|twice|over|at most|at least"
  r"|(?:less|more|fewer) than|less|inverses?|reciprocals?"
  r"|(?:square |cube )?roots?|kilo|binary|octal|hexadecimal|[kmb] (?:dollars|euros|pounds)"
  r"|true|false|no|none)\b(?!-)"
  r"|\b(?:plus|minus|negative|divided|modulo|factorial|(?:mod|base|not|never|wrong|incorrect|or)\b)"
  r"|\A\s*(?:is|was|squared|cubed|doubled|tripled|halved)\b",
  re.IGNORECASE,
)

# Units with a sign. If the gold answer has one, an answer may omit it.
SIGNS = {r"\$": "dollar", "€": "euro", "£": "lb", "¢": "cent", "°": "degree"}
_SIGN_FIRST = re.compile(r"([-+]?)\s?(\\\$|[€£])\s?([-+]?\s?(?:[\d.]|\\frac|\\sqrt).*)")
_SIGN_LAST = re.compile(
  r"(.*[^\s\\{(,;°€£¢$])\s?(?:(\\\$|[€£¢])|(°)(?:\s?([CF])|\s?\\text\s?\{\s?([CF])\s?\})?"
  r"|\\text\s?\{\s?(°)\s?([CF])?\s?\})"
)
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_SCALES_OF_DEGREES = {"C": "degree celsius", "F": "degree fahrenheit"}
_AMOUNT = re.compile(r"(.*\d\.?)\s?(?:\\text\s?\{\s?)?([KkMB])\s?\}?")  # of money
_AMOUNTS = {"K": "thousand", "k": "thousand", "M": "million", "B": "billion"}


def split_sign(text: str) -> tuple[str, str]:
  r"""Splits r"-\$5" into ("-5", "dollar"), "30°" into ("30", "degree"), "30" into ("30", "").

  The degrees of an angle in a function, \sin 30°, belong to the formula.
  """
  if match := _SIGN_FIRST.fullmatch(text):
    amount, unit = match[1] + match[3], SIGNS[match[2]]
  elif (match := _SIGN_LAST.fullmatch(text)) and not (match[3] and TRIGONOMETRIC.search(text)):
    unit = SIGNS[match[2] or match[3] or match[6]]
    scale = match[4] or match[5] or match[7]
    amount, unit = match[1], _SCALES_OF_DEGREES[scale] if scale else unit
  else:
    return text, ""
  if unit in ("dollar", "euro", "lb") and (match := _AMOUNT.fullmatch(amount)):
    amount = f"{match[1]} {_AMOUNTS[match[2]]}"
  return amount, unit


def split_unit(text: str) -> tuple[str, str]:
  r"""Splits a text into the text before the unit, and the unit; the unit is "" if there is none.

  Words after a plain number are dropped, as in "5 apples", unless they are a known unit or change
  the number's value, as in "5 squared". A single letter directly after a number is a variable
  ("5m"); after a space or in \text{} it may be a unit. After a formula, a unit outside of \text{}
  must have at least two letters.
  """
  if match := _PERCENT.fullmatch(text):
    return match[1], "%"
  if match := _WRAPPED_UNIT.fullmatch(_QUOTIENT_OF_UNITS.sub(r"\\text{\1/\2}", text)):
    unit = _parse_unit(match[2] + match[3])
    if unit or (unit is not None and plain_number(match[1]) is not None):
      return match[1], unit
  if (match := _BARE_UNIT.fullmatch(text)) and plain_number(match[1]) is not None:
    unit = _parse_unit(match[3])
    if unit and (match[2] or len(match[3]) > 1):
      return match[1], unit
    if unit is not None and match[2] and not _NO_UNIT.search(match[3]):
      return match[1], ""
  if (match := _UNIT_OF_FORMULA.fullmatch(text)) and (unit := _parse_unit(match[2])):
    return match[1], unit
  return text, ""


def apply_scale_word(text: str) -> str | None:
  """Writes out "5 million people" as "5000000 people".

  Returns:
    The text; None if it has no plain number before a word such as "million".
  """
  match = _SCALED.fullmatch(text)
  number = plain_number(match[1].strip()) if match else None
  if match is None or number is None:
    return None
  remaining_text = match[4][1:] if match[4].startswith("}") else match[2] + match[4]
  return f"{number * SCALES[match[3].lower()]} {remaining_text}"


def read_compound(text: str) -> tuple[Fraction, str] | None:
  """Reads "3 hours and 20 minutes" as (200, "min"); None for other texts."""
  text = re.sub(TEXT, r" \1 ", text)
  if not _COMPOUND.fullmatch(text):
    return None
  amounts = [(Fraction(number), _parse_unit(unit)) for number, unit in _AMOUNTS_OF.findall(text)]
  for sizes in _PARTS:
    factors = [sizes[unit] for _, unit in amounts if unit in sizes]
    if len(factors) == len(amounts) and factors == sorted(set(factors), reverse=True):
      total = sum(number * f for (number, _), f in zip(amounts, factors, strict=True))
      return Fraction(total) / factors[-1], amounts[-1][1] or ""
  return None


def _parse_unit(text: str) -> str | None:
  """Parses "square inches" into "in^2".

  Returns:
    The unit; "" for words that are not a known unit; None for text that is not words, for a letter
    that is no unit, and for words that change the value of the number before them.
  """
  match = _UNIT_TEXT.fullmatch(text)
  if not match or _CHANGES_VALUE.search(text):
    return None
  words = re.findall("[a-z]+|[/%]", match[1].lower())
  stems = ((word, word.removesuffix("s"), word.removesuffix("es")) for word in words)
  units = [next((_UNITS[stem] for stem in three if stem in _UNITS), "") for three in stems]
  if len(match[1]) == 1 and match[1] not in _UNIT_LETTERS:
    return None
  if not all(units):
    return ""
  power = match[2] or ""
  if units[0] in _POWERS:
    power = _POWERS[units.pop(0)]
  return " ".join(units) + power
