r"""The normal form of a mathematical answer: text → Answer → text.

The normal form is LaTeX without formatting: plain numbers as exact fractions ("0.50", r"$\dfrac12$"
and "50/100" are "1/2"; r"2^{10}" and r"\sqrt{16}" are numbers too), without thousands separators,
currencies, degree signs and periods, with words in lower case in \text{}, and with lists and sets
sorted. Formulas stay as they are written, without spaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from rlvr_jax.rewards.plain_numbers import parse_plain_number

FUNCTIONS = "sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|max|min"  # words that are formulas
TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
SET = r"\{\}"

_NTH = "(?:st|nd|rd|th)"
_NTH_TEXT = rf"\\(?:text|textrm|textnormal|mathrm)\s*\{{\s*{_NTH}\s*\}}"

# From fullwidth digits, signs and brackets, as in Chinese and Japanese texts, to ASCII.
_FULLWIDTH = {0xFF00 + code: 0x20 + code for code in range(1, 0x5F)}

# Formatting, in the order of removal. A matrix's "\\" before a space is not a space command.
_FORMATTING = [
  (re.compile(pattern, re.DOTALL), replacement)
  for pattern, replacement in (
    ("[−–]", "-"), ("π", r"\\pi "), ("∞", r"\\infty "), ("≤", r"\\leq "), ("≥", r"\\geq "),
    ("∪", r"\\cup "), ("∅", r"\\emptyset "), ("√", r"\\sqrt "), ("×", r"\\times "),
    ("[·⋅]", r"\\cdot "), ("²", "^2"), ("³", "^3"),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![a-zA-Z])", ""),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"), (r"\\le(?:qslant)?(?![a-zA-Z])", r"\\leq"),
    (r"\\ge(?:qslant)?(?![a-zA-Z])", r"\\geq"), (r"\\ne(?![a-zA-Z])", r"\\neq"),
    (r"\\f?box(?:ed)?\s*(?=[{\d+-])", ""), (r"(?<!\\)\\!", ""), (r"\{([,:])\}", r"\1"),
    (rf"(?<=\d){_NTH}(?![A-Za-z])", ""),
    (rf"(?<=\d)\s*\^\s*(?:{_NTH_TEXT}|\{{\s*(?:{_NTH_TEXT}|{_NTH})\s*\}})", ""),
    (r"(?<=\d)\s*\\[lc]?dots\s*\Z", ""),
    (r"(?<=\d)(?:\\,|\\ |~)(?=\d{3}(?!\d))", ","),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])", " "), (r"\\?\$|[€£]", ""),
    (r"(?<!\\)\\[()\[\]]", ""), (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|°|\\degree(?![a-zA-Z])", ""),
    (r"\s*(?:\\text(?:rm)?\s*\{\s*,?\s*(?:and|or)\s*\}|(?:,\s*|\s)(?:and|or)\s)\s*", ","),
    (r"\\frac\s*(\w)\s*(?=[\w{])", r"\\frac{\1}"),
    (r"\\frac\s*(\{[^{}]*\})\s*(\w)", r"\\frac\1{\2}"),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"), (r"([_^])\s*\{\s*(\w)\s*\}", r"\1\2"), (r"\s+", " "),
  )
]  # fmt: skip

_IN_BASE = re.compile(
  r"\(?([0-9]+)\)?(?:\s?_\s?\{?\s?\(?|\s?(?:in )?(?=base))(?:base )?([0-9]+|[a-z]+)\)?\s?\}?"
)

_UNIT_NAMES = {
  "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre",
  "km": "kilometer kilometre", "in": "inch", "ft": "foot feet", "yd": "yard", "mi": "mile",
  "mg": "milligram", "g": "gram", "kg": "kilogram", "lb": "pound", "oz": "ounce",
  "ml": "milliliter millilitre", "l": "liter litre", "gal": "gallon",
  "s": "sec second", "min": "minute", "h": "hr hour", "day": "", "week": "", "month": "",
  "year": "yr", "%": "percent", "cent": "", "dollar": "", "degree": "", "rad": "radian",
  "unit": "", "square": "sq", "cubic": "cu", "/": "per",
}  # fmt: skip
_UNITS = {alias: unit for unit, names in _UNIT_NAMES.items() for alias in (unit, *names.split())}
_POWERS = {"square": "^2", "cubic": "^3"}
_UNIT_TEXT = re.compile(r"\s*([A-Za-z][A-Za-z /().-]*?)\s?(\^[23])?[\s.]*")
_WRAPPED_UNIT = re.compile(rf"(.*[^\s\\])\s?{TEXT}\s?((?:\^[23])?)")
_PERCENT = re.compile(r"(.*[^\s\\%])(?:\s?\\?%)+")
_BARE_UNIT = re.compile(r"(.*[\d}.])(\s?)([A-Za-z][A-Za-z. /-]*(?:\^[23])?)")
_UNIT_OF_FORMULA = re.compile(
  r"(?=.*[\d\\])([^,;=<>]*?[^\s,;=<>])\s([A-Za-z]{2}[A-Za-z. /]*(?:\^[23])?)"
)
_NO_UNIT = re.compile(rf"\b(?:{FUNCTIONS}|to|if|for|when|is|not)\b|(?<![A-Za-z])[A-Za-z]{{1,2}}\b")
_SCALES = {
  "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12
}  # fmt: skip
_SCALED = re.compile(
  rf"(.*[\d}}.])\s?((?:\\[a-z]+\s?\{{)?)\s?({'|'.join(_SCALES)})s?(?![A-Za-z])\s?(.*)",
  re.IGNORECASE,
)
_NUMBER_WORDS = (
  "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
  " sixteen seventeen eighteen nineteen twenty"
).split()
_BASES = {word: str(number) for number, word in enumerate(_NUMBER_WORDS)}
_CHANGES_VALUE = re.compile(
  rf"\b(?:{'|'.join((*_NUMBER_WORDS, *_SCALES))}|thirty|forty|fifty|sixty|seventy|eighty|ninety"
  rf"|(?:ten|{'|'.join(_SCALES)})ths?|(?:four|fif|six|seven|eigh|nin)ths|thirds|halves"
  r"|half|over)\b(?!-)|\b(?:plus|minus|divided|modulo|factorial)"
  r"|\A\s*(?:squared|cubed|doubled|tripled|halved)\b",
  re.IGNORECASE,
)

_CHOICE = re.compile(r"\(([A-J])\)|([A-J])[).:]?")
_CHOICE_AND_VALUE = re.compile(
  r"\\(?:text|textbf|textrm|textnormal|mathrm|mathbf|mbox)\s*\{\s*\(?([A-J])\)\s*\}\s*(\S.*)"
  r"|\(?([A-J])\)\s+((?:-?[0-9.]|\\frac|\\sqrt|\\text).*)"
)
_SAME_WORDS = {
  **dict.fromkeys(("dne", "limit does not exist"), "does not exist"),
  **dict.fromkeys(
    ("none", "no solution", "no solutions", "no real solution", "no real solutions", "empty set",
     "the empty set"), r"\emptyset",
  ),
}  # fmt: skip
_LETTERS = re.compile(r"[A-Za-z][A-Za-z' .-]*")
_WORDS = re.compile(
  rf"(?i:yes|no)\Z|(?=.*[A-Za-z]{{4}}|.*[A-Za-z]{{2,}} [A-Za-z]{{2,}})(?!{FUNCTIONS})"
)
_CLOCK = re.compile(
  r"([0-9]{1,2}(?::[0-9]{2})?)\s?(?:\\text\s*\{)?\s?([ap])\.?\s?m[.}]*", re.IGNORECASE
)
_MEMBER_OF = re.compile(r"[A-Za-z]\s?\\in(?![A-Za-z])\s?(.+)")
_NAME = re.compile(
  r"([A-Za-z](?:_\w|_\{\w+\})?'?(?:\([a-z](?:,\s?[a-z])*\))?|\\[a-z]+|[A-Za-z][A-Za-z ]{1,20}?)\s?"
  r"(?:=|\\approx(?![A-Za-z]))([^<>]+)"
)
_NAME_LAST = re.compile(r"([^=<>]+)=\s?([A-Za-z](?:_\w|_\{\w+\})?)")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_COLUMN = re.compile(r"\\begin\s?\{([pb])matrix\}([^&]*)\\end\s?\{\1matrix\}")
_BRACKET = re.compile(r"\\.|[()\[\]{},;]")
_OPEN, _CLOSE = ("(", "[", "{", r"\{"), (")", "]", "}", r"\}")


class Answer(NamedTuple):
  r"""An answer in its parts; `str` gives the normal form.

  Attributes:
    value: a formula without spaces, or words; "" for a number or a list.
    number: of a plain number.
    words: whether `value` is text, to be compared as such.
    items: elements of a list, set, tuple or interval, at least two.
    brackets: around the items, "()", "[)", …, or SET; "" for a bare list.
    unit: such as "%", "cm", "m^2", "base 2"; "" if there is none, or an unknown one.
    name: the text before "=".
    choice: the letter of "(B) 5", A to J.
  """

  value: str = ""
  number: Fraction | None = None
  words: bool = False
  items: tuple[Answer, ...] = ()
  brackets: str = ""
  unit: str = ""
  name: str = ""
  choice: str = ""

  @property
  def ordered(self) -> bool:
    return self.brackets not in ("", SET)

  def __str__(self) -> str:
    text = self.value
    if self.items:
      texts = [str(item) for item in self.items]
      half = len(self.brackets) // 2
      inner = ", ".join(texts if self.ordered else sorted(texts))
      text = self.brackets[:half] + inner + self.brackets[half:]
    elif self.number is not None:
      text = str(self.number)
    elif self.words:
      text = rf"\text{{{self.value}}}"
    if self.unit.startswith("base "):
      text += f"_{{{self.unit[5:]}}}"
    elif self.unit:
      text += r"\%" if self.unit == "%" else rf"\text{{ {self.unit}}}"
    text = f"{self.name}={text}" if self.name else text
    return rf"\text{{({self.choice}) }}{text}" if self.choice else text


def strip_formatting(text: str) -> str:
  r"""LaTeX without what changes only its appearance: \left, \dfrac, $, thin spaces, Unicode …"""
  text = text.translate(_FULLWIDTH)
  for pattern, replacement in _FORMATTING:
    text = pattern.sub(replacement, text)
  return text.strip(' *`"').rstrip(' .,;:*`"\\').lstrip(" :")


def parse_answer(text: str) -> Answer:
  """The parts of an answer; never fails, since an unreadable formula becomes `value` as it is."""
  return _parse(strip_formatting(text))


def _parse(text: str) -> Answer:
  text, wrapped = text.strip(), False
  while match := re.fullmatch(TEXT, text):
    text, wrapped = match[1].strip(), True
  if match := _CHOICE.fullmatch(text):
    return Answer(value=match[1] or match[2], words=True)
  if match := _CHOICE_AND_VALUE.fullmatch(text):
    return _parse(match[2] or match[4])._replace(choice=match[1] or match[3])
  if match := _CLOCK.fullmatch(text):
    return Answer(value=f"{match[1]} {match[2].lower()}m", words=True)
  if (number := parse_plain_number(text)) is not None:
    return Answer(number=number)
  if (scaled := _scaled(text)) is not None:
    return _parse(scaled)
  if match := _IN_BASE.fullmatch(re.sub(TEXT, r"\1", text)):
    base = _BASES.get(match[2], match[2])
    if base.isdecimal():
      return Answer(number=Fraction(match[1]), unit=f"base {base}")
  before, unit = _split_unit(text)
  if before != text:
    return _parse(before)._replace(unit="" if unit.startswith("unit") else unit)
  if _LETTERS.fullmatch(text):
    words = " ".join(text.casefold().split())
    if words in _SAME_WORDS:
      words = _SAME_WORDS[words]
      return Answer(value=words, words=not words.startswith("\\"))
    if wrapped or _WORDS.match(text):
      return Answer(value=words if len(text) > 1 else text, words=True)
  if match := _COLUMN.fullmatch(text):
    entries = [entry for entry in map(str.strip, match[2].split(r"\\")) if entry]
    if len(entries) > 1:
      return Answer(items=tuple(map(_parse, entries)), brackets="()")
  brackets, elements = _split_list(text)
  if len(elements) > 1:
    return Answer(items=tuple(map(_parse, elements)), brackets=brackets)
  if elements[0] != text:
    return _parse(elements[0])
  if match := _MEMBER_OF.fullmatch(text):
    return _parse(match[1])
  if match := _NAME.fullmatch(text):
    return _parse(match[2])._replace(name=_compact(match[1]))
  if (match := _NAME_LAST.fullmatch(text)) and is_computed(match[1]):
    return _parse(match[1])._replace(name=_compact(match[2]))
  return Answer(value=_compact(text))


def _split_unit(text: str) -> tuple[str, str]:
  r"""(text before the unit, the unit), or (text, "") without one.

  Words after a plain number are dropped if they are not a known unit ("5 apples") and do not change
  its value ("5 squared"). A single letter directly after a number is a variable ("5m"); after a
  space or in \text{} it may be a unit. After a formula, a bare unit has at least two letters.
  """
  if match := _PERCENT.fullmatch(text):
    return match[1], "%"
  if match := _WRAPPED_UNIT.fullmatch(text):
    unit = _unit(match[2] + match[3])
    if unit or (unit is not None and parse_plain_number(match[1]) is not None):
      return match[1], unit
  if (match := _BARE_UNIT.fullmatch(text)) and parse_plain_number(match[1]) is not None:
    unit = _unit(match[3])
    if unit and (match[2] or len(match[3]) > 1):
      return match[1], unit
    if unit is not None and match[2] and not _NO_UNIT.search(match[3]):
      return match[1], ""
  if (match := _UNIT_OF_FORMULA.fullmatch(text)) and (unit := _unit(match[2])):
    return match[1], unit
  return text, ""


def _scaled(text: str) -> str | None:
  """ "5 million people" → "5000000 people"; None without a plain number before such a word."""
  match = _SCALED.fullmatch(text)
  number = parse_plain_number(match[1].strip()) if match else None
  if match is None or number is None:
    return None
  rest = match[4][1:] if match[4].startswith("}") else match[2] + match[4]
  return f"{number * _SCALES[match[3].lower()]} {rest}"


def _unit(text: str) -> str | None:
  """ "square inches" → "in^2"; "" for words that are not a known unit.

  None for text other than words, or for words that change the value of the number before them.
  """
  match = _UNIT_TEXT.fullmatch(text)
  if not match or _CHANGES_VALUE.search(text):
    return None
  words = re.findall("[a-z]+|/", match[1].lower())
  stems = ((word, word.removesuffix("s"), word.removesuffix("es")) for word in words)
  units = [next((_UNITS[stem] for stem in three if stem in _UNITS), "") for three in stems]
  if not all(units):
    return ""
  power = match[2] or ""
  if units[0] in _POWERS:
    power = _POWERS[units.pop(0)]
  return " ".join(units) + power


def _split_list(text: str) -> tuple[str, list[str]]:
  """(brackets, elements); brackets around a single element are removed, except for [ ]."""
  if r"\begin" in text:
    return "", [text]
  opening, inner, closing = _inside(text)
  elements = _at_commas(inner)
  if len(elements) > 1:
    braces = opening in ("{", r"\{")
    return SET if braces else opening + closing, elements
  return "", [text if "[" in opening or "]" in closing else inner]


def _inside(text: str) -> tuple[str, str, str]:
  """(opening bracket, inside, closing bracket) if one pair encloses the full text."""
  depth, first = 0, ""
  for token in _BRACKET.finditer(text):
    depth += (token[0] in _OPEN) - (token[0] in _CLOSE)
    if not first:
      first = token[0]
      if token.start() or first not in _OPEN:
        break
    elif depth == 0:
      if token.end() == len(text):
        return first, text[len(first) : token.start()].strip(), token[0]
      break
  return "", text, ""


def _at_commas(text: str) -> list[str]:
  """Splits at the commas and semicolons outside all brackets; [text] if an element is empty."""
  depth, cuts = 0, [-1]
  for token in _BRACKET.finditer(text):
    depth += (token[0] in _OPEN) - (token[0] in _CLOSE)
    if depth == 0 and token[0] in (",", ";"):
      cuts.append(token.start())
  ends: Iterable[int] = [*cuts[1:], len(text)]
  elements = [text[start + 1 : end].strip() for start, end in zip(cuts, ends, strict=True)]
  return elements if all(elements) else [text]


def is_computed(text: str) -> bool:
  r"""Whether a formula has no variable: "2+3", "2\sqrt{2}"."""
  return not re.search("[A-Za-z]", _COMMAND.sub("", text))


def _compact(text: str) -> str:
  r"""Removes spaces, except for one that ends a command before a letter ("\pi r")."""
  return re.sub(r"(\\[A-Za-z]+) (?=[A-Za-z])|\s", lambda m: f"{m[1]} " if m[1] else "", text)
