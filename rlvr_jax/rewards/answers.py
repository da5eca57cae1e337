r"""The normal form of a mathematical answer: text → Answer → text.

The normal form is LaTeX without formatting: plain numbers as exact fractions ("0.50", r"$\dfrac12$"
and "50/100" are "1/2"; r"2^{10}" and r"\sqrt{16}" are numbers too), without thousands separators
and periods, with words in lower case in \text{}, and with lists and sets sorted. Formulas stay
as they are written, without spaces except between two digits: "7 2" is not 72.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from rlvr_jax.rewards.plain_numbers import parse_plain_number
from rlvr_jax.rewards.units import (
  FUNCTIONS,
  NUMBER_WORDS,
  SIGNS,
  TEXT,
  apply_scale_word,
  split_sign,
  split_unit,
)

SET = r"\{\}"

_NTH = "(?:st|nd|rd|th)"
_NTH_TEXT = rf"\\(?:text|textrm|textnormal|mathrm)\s*\{{\s*{_NTH}\s*\}}"

# Fullwidth digits, signs and brackets, as in Chinese and Japanese texts → ASCII.
_FULLWIDTH = {0xFF00 + code: 0x20 + code for code in range(1, 0x5F)}

# Formatting in the order of its removal. A matrix's "\\" before a space is not a space command.
_FORMATTING = [
  (re.compile(pattern, re.DOTALL), replacement)
  for pattern, replacement in (
    # "n!=5" is an inequality, "5!=120" has a factorial.
    ("<=", r"\\leq "), (">=", r"\\geq "),
    (r"≠|\\not\s?=|(?:(?<=[A-Za-z])|\s)!=", r"\\neq "),
    ("[−–]", "-"), ("π", r"\\pi "), ("∞", r"\\infty "), ("≤", r"\\leq "), ("≥", r"\\geq "),
    ("ℝ", r"\\mathbb{R}"), ("∪", r"\\cup "), ("∅", r"\\emptyset "), ("√", r"\\sqrt "),
    ("×", r"\\times "), ("[·⋅]", r"\\cdot "), ("²", "^2"), ("³", "^3"),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![a-zA-Z])", ""),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"), (r"\\le(?:qslant)?(?![a-zA-Z])", r"\\leq"),
    (r"\\ge(?:qslant)?(?![a-zA-Z])", r"\\geq"), (r"\\ne(?![a-zA-Z])", r"\\neq"),
    (r"\\f?box(?:ed)?\s*(?=[{\d+-])", ""), (r"(?<!\\)\\!", ""), (r"\{([,:])\}", r"\1"),
    (rf"(?<=\d){_NTH}(?![A-Za-z])", ""),
    (rf"(?<=\d)\s*\^\s*(?:{_NTH_TEXT}|\{{\s*(?:{_NTH_TEXT}|{_NTH})\s*\}})", ""),
    (r"(?<=\d)\s*\\[lc]?dots\s*\Z", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])", " "),
    (r"(?<!\\)\$\$?([^$]*)(?<!\\)\$\$?", r"\1"),  # around a formula; other dollars are money
    (r"(?<![\\\d}])(?<![\d}] )\\?\$(?!\s?[-+]?\s?(?:[\d.]|\\frac|\\sqrt))", ""),
    (r"\\?\$", r"\\$"),
    (r"(?<!\\)\\[()\[\]]", ""), (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|[º˚]|\\degree(?![a-zA-Z])", "°"),
    (r"\\(?:R|reals|mathbb\s*R)(?![a-zA-Z])", r"\\mathbb{R}"),
    (r"\s*(?:\\text(?:rm)?\s*\{\s*,?\s*(?:and|or)\s*\}|(?:,\s*|\s)(?:and|or)\s)\s*", ","),
    (r"\\frac\s*(\w)\s*(?=[\w{])", r"\\frac{\1}"),
    (r"\\frac\s*(\{[^{}]*\})\s*(\w)", r"\\frac\1{\2}"),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"), (r"([_^])\s*\{\s*(\w)\s*\}", r"\1\2"), (r"\s+", " "),
    # Groups of three digits, separated by spaces: "12 345", "3.141 592".
    (r"(?:(?<=(?<![\w.,/^])\d)|(?<=(?<![\w.,/^])\d\d)|(?<=(?<![\w.,/^])\d{3})) "
     r"(?=\d{3}(?!\d| ?/))", ""),
    (r"(?:(?<=\.\d{3})|(?<=\.\d{3} \d{3})) (?=\d{1,3}(?!\d| ?/))", ""),
  )
]  # fmt: skip

_BASES = {word: str(number) for number, word in enumerate(NUMBER_WORDS)}
_IN_BASE = re.compile(
  r"\(?([0-9]+)\)?(?:\s?_\s?\{?\s?\(?|\s?(?:in )?(?=base))(?:base )?([0-9]+|[a-z]+)\)?\s?\}?"
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
  **dict.fromkeys(
    ("all real numbers", "all reals", "all real values", "any real number", "real numbers", "reals",
     "the real numbers", "the reals", "the set of real numbers", "the set of all real numbers"),
    r"\mathbb{R}",
  ),
}  # fmt: skip
_LETTERS = re.compile(r"[A-Za-z][A-Za-z' .-]*")
_WORDS = re.compile(
  rf"(?i:yes|no)\Z|(?=.*[A-Za-z]{{4}}|.*[A-Za-z]{{2,}} [A-Za-z]{{2,}})(?!{FUNCTIONS})"
)
_CLOCK = re.compile(
  r"0?([0-9]{1,2}(?::[0-9]{2})?)\s?(?:\\(?:text|textrm|mathrm)\s*\{)?\s?([ap])\.?\s?m[.}]*",
  re.IGNORECASE,
)
# Words before a number that make it a bound; "": words that do not change it.
_BOUND_SIGNS = {
  r"\leq": "at most|(?:no|not) (?:more|greater|larger) than|up to",
  r"\geq": "at least|(?:no|not) (?:less|fewer|smaller) than",
  "<": "(?:less|fewer|smaller|lower) than|under|below|almost|nearly",
  ">": "(?:more|greater|larger|higher) than|over|above|exceeding",
  "": "about|approximately|roughly|around|exactly",
}
BOUNDS = "|".join(_BOUND_SIGNS.values())
_BOUND = re.compile(
  rf"(?:\\(?:text|mathrm)\s?\{{)?\s?(?:{'|'.join(f'({words})' for words in _BOUND_SIGNS.values())})"
  r"\s?\}?\s?(?=[-+.\d\\(])(.+)", re.IGNORECASE,
)  # fmt: skip
_RATIO = re.compile(r"[\d.]+(?:\s?(?:to|\\text\s?\{\s?to\s?\}|:)\s?[\d.]+)+")
_SET_BUILDER = re.compile(
  r"\\\{\s?([A-Za-z])\s?(?:\\in\s?\\mathbb\{R\}\s?)?(?:\\mid(?![A-Za-z])|\\vert(?![A-Za-z])|[|:])"
  r"\s?([^,;|]*(?:[<>]|\\[lg]eq)[^,;|]*)\\\}"
)
FIGURE = re.compile(
  r"(\\(?:angle|measuredangle|triangle|overline|overleftrightarrow|overrightarrow|vec))\s?"
  r"(?:([A-Z]{2,4})|\{\s?([A-Z]{2,4})\s?\})"
)
_MEMBER_OF = re.compile(r"[A-Za-z]\s?\\in(?![A-Za-z])\s?(.+)")
_NAME = re.compile(
  r"([A-Za-z](?:_\w|_\{\w+\})?'?(?:\([a-z](?:,\s?[a-z])*\))?|\\(?!pi(?![a-z]))[a-z]+"
  r"|[A-Za-z][A-Za-z ]{1,20}?)\s?(?:=|\\approx(?![A-Za-z]))([^<>]+)"
)
_NAME_LAST = re.compile(r"([^=<>]+)=\s?([A-Za-z](?:_\w|_\{\w+\})?)")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_COLUMN = re.compile(r"\\begin\s?\{([pb])matrix\}([^&]*)\\end\s?\{\1matrix\}")
_BRACKET = re.compile(r"\\.|[()\[\]{},;]")
_SIGN = re.compile("|".join(map(re.escape, SIGNS)))
_SPACE = re.compile(r"(\\[A-Za-z]+ (?=[A-Za-z])|(?<=\d) (?=\d)|(?<=[A-Za-z]) (?=[A-Za-z ]+\}))|\s")
_OPEN, _CLOSE = ("(", "[", "{", r"\{"), (")", "]", "}", r"\}")


class Answer(NamedTuple):
  r"""The parts of an answer; `str` gives the normal form.

  Attributes:
    value: a formula without spaces, or words; "" for a number or a list.
    number: exact value of a plain number; None for anything else.
    words: whether `value` is text, to be compared as text.
    items: elements of a list, set, tuple or interval, at least two; () for anything else.
    brackets: around the items, "()", "[)", …, or SET; "" for a bare list.
    unit: such as "%", "cm", "m^2", "base 2"; "" if there is none or it is unknown.
    name: the text before "="; "" if there is none.
    choice: the letter of "(B) 5", A to J; "" if there is none.
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
  def is_ordered(self) -> bool:
    return self.brackets not in ("", SET)

  def __str__(self) -> str:
    text = self.value
    if self.items:
      texts = [str(item) for item in self.items]
      half = len(self.brackets) // 2
      inner = ", ".join(texts if self.is_ordered else sorted(texts))
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
  r"""Removes what changes only the appearance of LaTeX: \left, \dfrac, $, thin spaces, Unicode …"""
  text = text.translate(_FULLWIDTH)
  for pattern, replacement in _FORMATTING:
    text = pattern.sub(replacement, text)
  return text.strip(' *`"').rstrip(' .,;:*`"\\').lstrip(" :")


def parse_answer(text: str) -> Answer:
  """Parses an answer; never fails, since an unreadable formula becomes `value` as it is."""
  return _parse(strip_formatting(text))


def _parse(text: str) -> Answer:
  """Parses an answer without formatting; its forms are tried in order."""
  text = text.strip().rstrip(" .")
  is_wrapped = False
  while match := re.fullmatch(TEXT, text):
    text = match[1].strip()
    is_wrapped = True
  if match := _CHOICE.fullmatch(text):
    return Answer(value=match[1] or match[2], words=True)
  if match := _CHOICE_AND_VALUE.fullmatch(text):
    return _parse(match[2] or match[4])._replace(choice=match[1] or match[3])
  if match := _CLOCK.fullmatch(text):
    return _parse(match[1].removesuffix(":00"))._replace(unit=f"{match[2].lower()}m")
  if (number := parse_plain_number(text)) is not None:
    return Answer(number=number)
  if match := _RATIO.fullmatch(text):
    return Answer(value=re.sub(r"\s?(?:to|\\text\s?\{\s?to\s?\}|:)\s?", ":", text))
  if match := _BOUND.fullmatch(text):
    sign = next(sign for sign, words in zip(_BOUND_SIGNS, match.groups(), strict=False) if words)
    return _parse(f"{sign} {match[len(_BOUND_SIGNS) + 1]}")
  if (scaled_text := apply_scale_word(text)) is not None:
    return _parse(scaled_text)
  amount, unit = split_sign(text)
  if unit and not (answer := _parse(amount)).items:
    rate = f"{unit} {answer.unit}" if answer.unit.startswith("/") else ""  # "$5 per hour"
    return answer._replace(unit=rate or answer.unit or unit)
  if match := _IN_BASE.fullmatch(re.sub(TEXT, r"\1", text)):
    base = _BASES.get(match[2], match[2])
    if base.isdecimal():
      return Answer(number=Fraction(match[1]), unit=f"base {base}")
  before, unit = split_unit(text)
  if before != text:
    return _parse(before)._replace(unit="" if unit.startswith("unit") else unit)
  if _LETTERS.fullmatch(text):
    words = " ".join(text.casefold().split())
    if words in _SAME_WORDS:
      words = _SAME_WORDS[words]
      return Answer(value=words, words=not words.startswith("\\"))
    if is_wrapped or _WORDS.match(text):
      return Answer(value=words if len(text) > 1 else text, words=True)
  if match := _COLUMN.fullmatch(text):
    entries = [entry for entry in map(str.strip, match[2].split(r"\\")) if entry]
    if len(entries) > 1:
      return Answer(items=tuple(map(_parse, entries)), brackets="()")
  if (match := _SET_BUILDER.fullmatch(text)) and match[1] in match[2]:
    return _parse(match[2])
  if match := FIGURE.fullmatch(text):
    return Answer(value=normalize_figure(match[1], match[2] or match[3]))
  brackets, elements = _split_list(text)
  if len(elements) > 1:
    return Answer(items=tuple(map(_parse, elements)), brackets=brackets)
  if elements[0] != text:
    return _parse(elements[0])
  if match := _MEMBER_OF.fullmatch(text):
    return _parse(match[1])
  if match := _NAME.fullmatch(text):
    return _parse(match[2])._replace(name=_compact(match[1]))
  if (match := _NAME_LAST.fullmatch(text)) and is_constant(match[1]):
    return _parse(match[1])._replace(name=_compact(match[2]))
  return Answer(value=_compact(text))


def _split_list(text: str) -> tuple[str, list[str]]:
  """Splits a list into (brackets, elements).

  Brackets around a single element are removed, except for [ ].
  """
  if r"\begin" in text:
    return "", [text]
  opening, inner, closing = _split_brackets(text)
  elements = _split_at_commas(inner)
  if len(elements) > 1:
    is_set = opening in ("{", r"\{")
    return SET if is_set else opening + closing, elements
  return "", [text if "[" in opening or "]" in closing else inner]


def _split_brackets(text: str) -> tuple[str, str, str]:
  """Splits a text into (opening bracket, inside, closing bracket).

  The brackets are "" if no pair encloses the full text.
  """
  depth = 0
  first = ""
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


def _split_at_commas(text: str) -> list[str]:
  """Splits at the commas and semicolons outside all brackets; [text] if an element is empty."""
  depth = 0
  cuts = [-1]
  for token in _BRACKET.finditer(text):
    depth += (token[0] in _OPEN) - (token[0] in _CLOSE)
    if depth == 0 and token[0] in (",", ";"):
      cuts.append(token.start())
  ends: Iterable[int] = [*cuts[1:], len(text)]
  elements = [text[start + 1 : end].strip() for start, end in zip(cuts, ends, strict=True)]
  return elements if all(elements) else [text]


def is_constant(text: str) -> bool:
  r"""Whether a formula has no variable: "2+3", "2\sqrt{2}"."""
  return not re.search("[A-Za-z]", _COMMAND.sub("", text))


def normalize_figure(command: str, points: str) -> str:
  r"""Orders the points of a figure: \angle CBA is \angle ABC; a triangle's points are sorted."""
  if command in (r"\triangle", r"\overline", r"\overleftrightarrow"):
    points = "".join(sorted(points))
  elif command.endswith("angle"):
    points = min(points, points[::-1])
  return f"{command} {points}"


def _compact(text: str) -> str:
  r"""Removes signs of units, and spaces except after a command ("\pi r") and between digits."""
  text = _SIGN.sub("", text)
  return _SPACE.sub(lambda match: match[1] or "", text)
