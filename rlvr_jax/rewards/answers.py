r"""The typed value of a mathematical answer: text → Answer; and its normal form, Answer → text.

The normal form is LaTeX without formatting, thousands separators and periods. Plain numbers are
exact fractions: "0.50", r"$\dfrac12$" and "50/100" are "1/2". r"2^{10}" and r"\sqrt{16}" are plain
numbers too. Words are in lower case in \text{}, and lists and sets are sorted. Formulas keep their
notation, without needless spaces. A space between two digits stays: "7 2" is not 72.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

from rlvr_jax.rewards.formulas import is_constant, plain_number
from rlvr_jax.rewards.notation import AND, OR, TEXT, mark_connectives, normalize
from rlvr_jax.rewards.units import (
  NUMBER_WORDS,
  TRIGONOMETRIC,
  apply_scale_word,
  read_compound,
  split_sign,
  split_unit,
)

SET = r"\{\}"
MATRIX = "matrix"

_BASES = {word: str(number) for number, word in enumerate(NUMBER_WORDS)}
_IN_BASE = re.compile(
  r"\(?([0-9]+)\)?(?:\s?_\s?\{?\s?\(?|\s?(?:in )?(?=base))(?:base )?([0-9]+|[a-z]+)\)?\s?\}?"
)
_MODULO = re.compile(
  r"(.+?)\s?(?:\\pmod|\(\s?(?:\\b?mod|mod\b)|\\b?mod(?![A-Za-z])|\bmod\b)\s?\{?\s?([0-9]+)\s?\}?\)?"
)
_CONGRUENT = re.compile(r"([A-Za-z])\s?\\equiv(?![A-Za-z])\s?(.+)")

_CHOICE = re.compile(
  r"(?:(?i:the )?(?i:correct |right )?(?i:option|choice|answer) )?(?:\(([A-J])\)|([A-J])[).:]?)"
)
_CHOICE_AND_VALUE = re.compile(
  r"\\text\s?\{\s?\(?([A-J])(?:\)|[.:](?=\s))\s?([^{}]*)\}\s*(.*)"
  r"|\(?([A-J])\)\s+(\S.*)|([A-J])[.:]\s(\S.*)"
)
_OTHER_CHOICE = re.compile(r"(?<![A-Za-z])(?:\([A-J]\)|[A-J][).:](?:\s|\Z))")
_BOTH = re.compile(r"(?:both|either) (.+ ?\\l(?:and|or) .+)", re.IGNORECASE)
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
  **dict.fromkeys(
    ("all integers", "any integer", "integers", "the integers", "the set of integers",
     "the set of all integers"), r"\mathbb{Z}",
  ),
  **dict.fromkeys(
    ("all positive real numbers", "all positive reals", "positive real numbers", "positive reals",
     "the positive real numbers", "the positive reals", "any positive real number"),
    r"\mathbb{R}^+",
  ),
}  # fmt: skip
_LETTERS = re.compile(r"[A-Za-z][A-Za-z' .-]*")
_WORDS = re.compile(r"(?i:yes|no)\Z|(?=.*[A-Za-z]{4}|.*[A-Za-z]{2,} [A-Za-z]{2,})")
# Words after an answer that do not change it: "for all x", "where n is an integer", "only".
_QUALIFIER = re.compile(
  r"(.*?[^\s,]),?\s?(?:\(\s?)?(?:(?:\\forall(?![A-Za-z])|(?:\\text\s?\{\s?,?\s?|\b)"
  r"(?:for (?:all|any|every|each)|where)\b)(?!.*\b(?:not|except|unless|but|only|wrong)\b).*"
  r"|(?:\\text\s?\{\s?|\b)only\s?[})]*)"
)
_CLOCK = re.compile(
  r"0?([0-9]{1,2}(?::[0-9]{2})?)\s?(?:\\text\s*\{)?\s?([ap])\.?\s?m[.}]*", re.IGNORECASE
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
  rf"(?:\\text\s?\{{)?\s?(?:{'|'.join(f'({words})' for words in _BOUND_SIGNS.values())})"
  r"\s?\}?\s?(?=[-+.\d\\(])(.+)", re.IGNORECASE,
)  # fmt: skip
_TO = re.compile(r"(?<=\d)\s?(?:to|\\text\s?\{\s?to\s?\})\s?(?=\d)|\s?:\s?")
_SET_BUILDER = re.compile(
  r"\\\{\s?([A-Za-z])\s?(?:\\in\s?\\mathbb\{R\}\s?)?(?:\\mid(?![A-Za-z])|[|:])"
  r"\s?([^,;|]*(?:[<>]|\\[lgn]eq)[^,;|]*)\\\}"
)
FIGURE = re.compile(
  r"(\\(?:angle|measuredangle|triangle|overline|overleftrightarrow|overrightarrow|vec))\s?"
  r"(?:([A-Z]{2,4})|\{\s?([A-Z]{2,4})\s?\})"
)
_NAME_OF_TUPLE = re.compile(
  r"(?:[A-Za-z]\s?\\in(?![A-Za-z])|\(\s?[A-Za-z](?:\s?,\s?[A-Za-z])+\s?\)\s?(?:=|\\in(?![A-Za-z])))"
  r"\s?(.+)"
)
_NAME = re.compile(
  r"([A-Za-z](?:_\w|_\{\w+\}|\^\{-1\}(?=\())?'?(?:\([a-z](?:,\s?[a-z])*\))?|\\(?!pi(?![a-z]))[a-z]+"
  r"|(?!log)[A-Za-z][A-Za-z ]{1,20}?|\\text\s?\{[A-Za-z ]+\})"
  r"\s?(?:=|\\approx(?![A-Za-z]))([^<>]+)"
)
_NAME_LAST = re.compile(r"([^=<>]+)=\s?([A-Za-z](?:_\w|_\{\w+\})?)")
RELATION = re.compile(r"[=<>]|\\[lgn]eq(?![A-Za-z])")
_MATRIX = re.compile(r"\\begin\s?\{([pb])matrix\}(.*)\\end\s?\{\1matrix\}")
_BRACKET = re.compile(r"\\.[a-z]*|[()\[\]{},;]")
_SIGN = re.compile(r"\\\$|[€£¢]")
_SPACE = re.compile(
  r"(\\[A-Za-z]+ (?=[A-Za-z])|(?<=\d) (?=\d|e ?[-+] ?\d)|(?<=[A-Za-z]) (?=[A-Za-z ]+\}))|\s"
)
_PLUS = re.compile(r"(?:^|(?<=[(,=]))\+")
_PLUS_MINUS = re.compile(r"(\\pm|\\mp)(?![A-Za-z])\s?")
_MAX_SIGNS = 4  # ± in one element of a list
_OPEN, _CLOSE = ("(", "[", "{", r"\{"), (")", "]", "}", r"\}")


class Answer(NamedTuple):
  r"""The parts of an answer; `str` gives the normal form.

  Attributes:
    value: a formula, a condition or a ratio, without needless spaces; or words. "" for a number or
      a list.
    number: exact value of a plain number; None for anything else.
    words: whether `value` is text, to be compared as text.
    items: at least two elements of a list, set, tuple or interval, or the entries of a matrix, row
      by row; () for anything else.
    brackets: what encloses the items: "()", "[)", …, SET, or MATRIX with the number of columns; ""
      for a bare list.
    joint: "and" or "or" between the items of a bare list of words or conditions, else "".
    unit: such as "%", "cm", "m^2", "base 2", "mod 7"; "" if there is none or it is unknown.
    name: the text before "="; "" if there is none.
    choice: the letter of "(B) 5", A to J; "" if there is none.
  """

  value: str = ""
  number: Fraction | None = None
  words: bool = False
  items: tuple[Answer, ...] = ()
  brackets: str = ""
  joint: str = ""
  unit: str = ""
  name: str = ""
  choice: str = ""

  @property
  def is_ordered(self) -> bool:
    return self.brackets not in ("", SET)

  @property
  def is_condition(self) -> bool:
    """Whether the answer is an inequality, or several inequalities joined by "and" or "or"."""
    if self.items:
      return not self.brackets and any(item.is_condition for item in self.items)
    return not self.words and re.search(r"[<>]|\\[lgn]eq(?![A-Za-z])", self.value) is not None

  def __str__(self) -> str:
    text = self.value
    if self.items:
      text = self._format_items()
    elif self.number is not None:
      text = str(self.number)
    elif self.words:
      text = rf"\text{{{self.value}}}"
    if self.unit.startswith("base "):
      text += f"_{{{self.unit[5:]}}}"
    elif self.unit.startswith("mod "):
      text += rf"\pmod{{{self.unit[4:]}}}"
    elif self.unit == "%":
      text += r"\%"
    elif self.unit:
      # A power is written after \text{}, and a leading "/" as "per": else they would be read as
      # a formula.
      unit, caret, power = re.sub("^/", "per", self.unit).partition("^")
      text += rf"\text{{ {unit}}}{caret}{power}"
    text = f"{self.name}={text}" if self.name else text
    return rf"\text{{({self.choice}) }}{text}" if self.choice else text

  def _format_items(self) -> str:
    texts = [str(item) for item in self.items]
    if self.brackets.startswith(MATRIX):
      columns = int(self.brackets[len(MATRIX) :])
      rows = ["&".join(texts[i : i + columns]) for i in range(0, len(texts), columns)]
      inner = r"\\".join(rows)
      return rf"\begin{{pmatrix}}{inner}\end{{pmatrix}}"
    half = len(self.brackets) // 2
    between = rf" \l{self.joint} " if self.joint else ", "
    inner = between.join(texts if self.is_ordered else sorted(texts))
    return self.brackets[:half] + inner + self.brackets[half:]


def parse_answer(text: str) -> Answer:
  """Parses an answer; never fails, since the text of an unreadable formula becomes `value`."""
  return _parse(normalize(text))


def _parse(text: str) -> Answer:
  """Parses an answer without formatting; its forms are tried in order."""
  text = text.strip().rstrip(" .")
  is_wrapped = False
  while match := re.fullmatch(TEXT, text):
    text = mark_connectives(match[1].strip())
    is_wrapped = True
  if match := _CHOICE.fullmatch(text):
    return Answer(value=match[1] or match[2], words=True)
  if match := _CHOICE_AND_VALUE.fullmatch(text):
    choice = match[1] or match[4] or match[6]
    value = (match[2] or "") + (match[3] or "") or match[5] or match[7]
    if value and not _OTHER_CHOICE.search(value):
      return _parse(value)._replace(choice=choice)
  if match := _QUALIFIER.fullmatch(text):
    return _parse(match[1])
  if match := _CLOCK.fullmatch(text):
    return _parse(match[1].removesuffix(":00"))._replace(unit=f"{match[2].lower()}m")
  if not text.startswith("[") and (number := plain_number(text)) is not None:
    return Answer(number=number)
  if ":" in text or "to" in text:
    parts = [part.strip() for part in _TO.split(text)]
    if len(parts) > 1 and all(map(is_constant, parts)):
      return Answer(value=":".join(map(_compact, parts)))
  if match := _BOUND.fullmatch(text):
    sign = next(sign for sign, words in zip(_BOUND_SIGNS, match.groups(), strict=False) if words)
    return _parse(f"{sign} {match[len(_BOUND_SIGNS) + 1]}")
  if (scaled_text := apply_scale_word(text)) is not None:
    return _parse(scaled_text)
  return _parse_unit(text) or _parse_words(text, is_wrapped) or _parse_structure(text)


def _parse_unit(text: str) -> Answer | None:
  """Parses an amount with a unit, a base or a modulus; None for other texts."""
  amount, unit = split_sign(text)
  if unit and not (answer := _parse(amount)).items:
    rate = f"{unit} {answer.unit}" if answer.unit.startswith("/") else ""  # "$5 per hour"
    return answer._replace(unit=rate or answer.unit or unit)
  if compound := read_compound(text):
    return Answer(number=compound[0], unit=compound[1])
  if match := _IN_BASE.fullmatch(re.sub(TEXT, r"\1", text)):
    base = _BASES.get(match[2], match[2])
    if base.isdecimal() and all(digit < base for digit in match[1] if len(base) == 1):
      return Answer(number=Fraction(match[1]), unit=f"base {base}")
  if match := _MODULO.fullmatch(re.sub(TEXT, r"\1", text)):
    congruent = _CONGRUENT.fullmatch(match[1])
    answer = _parse(congruent[2] if congruent else match[1])
    if answer.number is not None and answer.number.denominator == 1 and int(match[2]):
      name = congruent[1] if congruent else answer.name
      return Answer(number=answer.number % int(match[2]), unit=f"mod {int(match[2])}", name=name)
  before, unit = split_unit(text)
  if before == text or AND in before or OR in before:
    return None
  return _parse(before)._replace(unit="" if unit.startswith("unit") else unit)


def _parse_words(text: str, is_wrapped: bool) -> Answer | None:
  if not _LETTERS.fullmatch(text):
    return None
  words = " ".join(text.casefold().split())
  if words in _SAME_WORDS:
    words = _SAME_WORDS[words]
    return Answer(value=words, words=not words.startswith("\\"))
  if is_wrapped or _WORDS.match(text):
    return Answer(value=words if len(text) > 1 else text, words=True)
  return None


def _parse_structure(text: str) -> Answer:
  """Parses a list, a set, an interval, a matrix, a named value or a formula."""
  if match := _MATRIX.fullmatch(text):
    rows = [row.split("&") for row in map(str.strip, match[2].split(r"\\")) if row]
    entries = tuple(_parse(entry) for row in rows for entry in row)
    if len(entries) > 1 and len({len(row) for row in rows}) == 1:
      columns = len(rows[0])
      return Answer(items=entries, brackets="()" if columns == 1 else f"{MATRIX}{columns}")
  if (match := _SET_BUILDER.fullmatch(text)) and match[1] in match[2]:
    return _parse(match[2])
  if match := FIGURE.fullmatch(text):
    return Answer(value=normalize_figure(match[1], match[2] or match[3]))
  if match := _BOTH.fullmatch(text):
    text = match[1]
  if (match := _NAME_OF_TUPLE.fullmatch(text)) and len(_split_list(text)[2]) == 1:
    return _parse(match[1])
  brackets, joint, elements = _split_list(text)
  if len(elements) > 1:
    items = tuple(map(_parse, elements))
    keeps_joint = any(item.words or item.is_condition for item in items)
    return Answer(items=items, brackets=brackets, joint=joint if keeps_joint else "")
  if elements[0] != text:
    return _parse(elements[0])
  if match := _NAME.fullmatch(text):
    return _parse(match[2])._replace(name=_compact(re.sub(TEXT, r"\1", match[1])))
  if (match := _NAME_LAST.fullmatch(text)) and is_constant(match[1]):
    return _parse(match[1])._replace(name=_compact(match[2]))
  return Answer(value=_compact(text))


def _split_list(text: str) -> tuple[str, str, list[str]]:
  """Splits a list into its brackets, "and" or "or" or "", and its elements; ± gives two elements.

  Brackets around a single element are removed, except square brackets.
  """
  if r"\begin" in text:
    return "", "", [text]
  opening, inner, closing = _split_brackets(text)
  elements, separators = _split_at_separators(inner)
  is_set = opening in ("{", r"\{")
  if len(elements) == 1 or is_set or not opening:
    elements = [variant for element in elements for variant in _expand_signs(element)]
  elif len(variants := _expand_signs(text)) > 1:
    return "", "", variants
  if len(elements) > 1:
    joint = "or" if OR in separators else "and" if AND in separators else ""
    return SET if is_set else opening + closing, joint, elements
  return "", "", [text if "[" in opening or "]" in closing else inner]


def _expand_signs(text: str) -> list[str]:
  r"""Expands "1 \pm x" into "1 +x" and "1 -x"; signs vary independently unless there is a \mp."""
  signs = _PLUS_MINUS.findall(text)
  if not signs or len(signs) > _MAX_SIGNS:
    return [text]
  if r"\mp" in signs:
    plus = tuple("+" if sign == r"\pm" else "-" for sign in signs)
    choices: Iterable[tuple[str, ...]] = (plus, tuple("-" if s == "+" else "+" for s in plus))
  else:
    choices = itertools.product("+-", repeat=len(signs))
  pieces = _PLUS_MINUS.sub("\0", text).split("\0")
  return ["".join(itertools.chain(*zip(pieces, (*c, ""), strict=True))) for c in choices]


def _split_brackets(text: str) -> tuple[str, str, str]:
  """Splits a text into its opening bracket, its content and its closing bracket.

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


def _split_at_separators(text: str) -> tuple[list[str], set[str]]:
  """Splits a text at the commas, semicolons, "and" and "or" outside all brackets.

  If semicolons or "or" separate lists of named values, as in "x=1, y=2 or x=3, y=4", the text is
  split at the semicolons and "or" only.

  Returns:
    The elements, or [text] if one is empty; and the separators.
  """
  found = list(_find_separators(text))
  higher = [token for token in found if token[0] in (";", OR)]
  if len(higher) < len(found) and higher:
    groups, _ = _cut(text, higher)
    lists = [_cut(group, list(_find_separators(group)))[0] for group in groups]
    if all(len(items) > 1 and all("=" in item for item in items) for items in lists):
      return [f"({group})" for group in groups], set()
  return _cut(text, found)


def _find_separators(text: str) -> Iterator[re.Match[str]]:
  depth = 0
  for token in _BRACKET.finditer(text):
    depth += (token[0] in _OPEN) - (token[0] in _CLOSE)
    if depth == 0 and token[0] in (",", ";", AND, OR):
      yield token


def _cut(text: str, separators: list[re.Match[str]]) -> tuple[list[str], set[str]]:
  starts = [0, *(token.end() for token in separators)]
  ends = [*(token.start() for token in separators), len(text)]
  elements = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
  return (elements if all(elements) else [text]), {token[0] for token in separators}


def normalize_figure(command: str, points: str) -> str:
  r"""Orders the points of a figure: \angle CBA is \angle ABC; a triangle's points are sorted."""
  if command in (r"\triangle", r"\overline", r"\overleftrightarrow"):
    points = "".join(sorted(points))
  elif command.endswith("angle"):
    points = min(points, points[::-1])
  return f"{command} {points}"


def _compact(text: str) -> str:
  r"""Removes currency signs, degrees outside functions, and needless spaces and plus signs.

  Spaces stay after a command ("\pi r") and between digits.
  """
  text = _SIGN.sub("", text if TRIGONOMETRIC.search(text) else text.replace("°", ""))
  return _PLUS.sub("", _SPACE.sub(lambda match: match[1] or "", text))
