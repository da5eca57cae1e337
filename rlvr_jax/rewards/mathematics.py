r"""The mathematics grader: extracts a completion's final answer and compares it with the gold one.

Plain numbers, words, and the structure of lists, tuples, sets and intervals are compared here,
exactly and without sympy. Formulas are compared by math-verify (pip install -e ".[math]"), without
its timeout, since the pool limits the time of the item. Units are compared by name where both
answers have one.

A grade depends on the answer's normal form (`Grade.answer`, see `answers`) and the gold answer
alone, so samples that vote for the same answer get the same grade. Names ("x = 5") and units are
part of the normal form only if the gold answer has some. Formulas that are equal but written
differently ("x+1", "1+x") are two votes.

If the gold answer is a plain number, only a number, or one power or root of a number, equals it;
another way to compute it does not, since a policy could box the question. A sum, an integral, a
limit or a derivative in an answer is never evaluated: it is right if the gold answer has the same
text.

No completion can make this grader crash, which would mask it out of the loss. An answer that is too
long or too deeply nested is unparseable; one that math-verify cannot parse, or only at a high cost,
is wrong.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from rlvr_jax.rewards.answers import FUNCTIONS, SET, TEXT, Answer, is_computed, parse_answer
from rlvr_jax.rewards.formula_size import formula_size
from rlvr_jax.rewards.graders import ANSWER_MARK, DIGITS, NUMBER, after_thinking
from rlvr_jax.rewards.outcome import Grade, Outcome

MAX_ANSWER = 1000  # characters; longer ones are not answers, and are slow in sympy
_TAIL = 100_000  # characters at a completion's end that are searched for a box or "####"
_PROSE = 10_000  # … for an answer in running text
_DECIMALS = 6  # plain numbers are compared to this many places, as in math-verify …
_RELATIVE = Fraction(1, 10_000)  # … and to this relative difference, or 1e-7 would equal 0

_BOX_TOKEN = re.compile(
  rf"\\(?:boxed|fbox)\s*\{{|\\(?:boxed|fbox)\s*(?P<bare>[+-]?{NUMBER}(?:/{DIGITS})?)|\\.|[{{}}]",
  re.DOTALL,
)
# Possessive (*+), without backtracking: a completion may have any number of spaces.
_BETWEEN_BOXES = re.compile(
  r"[\s$]*+(?:;|,(?!\s*+(?:and|or))|(?:,\s*+)?(?:and|or(?:[\s$]*+[A-Za-z]\s*+=)?))[\s$]*+"
)
_ANSWER_IS = re.compile(
  r"\banswers?\b[^\n.]{0,60}?(?:\b(?:is|are)(?=\b|n['’]t)|[:=])[\s*:]*", re.IGNORECASE
)
_NOT_THIS = re.compile(
  r"(?:\bnot|n['’]t|\bbetween)\b(?:(?!\b(?:but|is|are)\b|[.,;:]\s)[^\n])*\Z", re.IGNORECASE
)
_NOT_BEFORE = 60  # characters before a number that may say that it is not the answer
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_MATH = re.compile(
  r"\$\$.{1,1000}?\$\$|\$[^$\n]{1,1000}\$|\\\(.{1,1000}?\\\)|\\\[.{1,1000}?\\\]", re.DOTALL
)
_NUMBER = re.compile(rf"{NUMBER}(?:\s?/\s?{DIGITS})?(?:\s?\\?%)?")
_WORD = re.compile(rf"(?<![\\A-Za-z])(?!(?:and|or|{FUNCTIONS})\b)[A-Za-z]{{2,}}")
_RELATION = re.compile(r"[=<>]|\\[lgn]eq")
_EQUALS = re.compile(r"=|\\approx(?![A-Za-z])")
_DIFFERENTIAL = r"(?:d|\\partial|\\mathrm\{d\})"
_UNEVALUATED = re.compile(  # but \frac{dy}{dx}, a name
  r"\\(?:sum|prod|i{0,3}nt|oint|lim)(?![A-Za-z])"
  rf"|\\frac\{{{_DIFFERENTIAL}(?![-+]|\w\}})[^{{}}]*\}}\{{{_DIFFERENTIAL} ?[A-Za-z]"
)
_MAX_SIZE = 100  # terms of an answer multiplied out, see `formula_size`; more take seconds
_MAX_GOLD_SIZE = 10_000  # … if the gold answer has half as many


class Box(NamedTuple):
  start: int
  end: int
  content: str


def boxes(text: str) -> tuple[list[Box], bool]:
  r"""(outermost \boxed{…}, \fbox{…} and \boxed 5 in order; whether one is never closed)."""
  closed: list[tuple[int, int, int, int]] = []  # start and end of the box, then of its content
  stack: list[tuple[int, int | None]] = []  # of open braces: start; start of a box's content
  for token in _BOX_TOKEN.finditer(text):
    if token["bare"]:
      closed.append((*token.span(), *token.span("bare")))
    elif token[0] == "}" and stack:
      start, content = stack.pop()
      if content is not None:
        while closed and closed[-1][0] > start:
          closed.pop()
        closed.append((start, token.end(), content, token.start()))
    elif token[0] == "{":
      stack.append((token.start(), None))
    elif token[0].endswith("{") and token[0] != r"\{":
      stack.append((token.start(), token.end()))
  found = [Box(start, end, text[first:last]) for start, end, first, last in closed]
  return found, any(content is not None for _, content in stack)


def stated_answer(text: str) -> str | None:
  r"""The last \boxed{…}, else the line after the last "####"; None if there is neither.

  Boxes joined by commas, "and" or "or" are one answer, a list. If no box is ever closed, the answer
  is empty.
  """
  found, unclosed = boxes(text)
  if found:
    parts = found[-1:]
    for box in reversed(found[:-1]):
      if not _BETWEEN_BOXES.fullmatch(text, box.end, parts[0].start):
        break
      parts.insert(0, box)
    return ", ".join(box.content for box in parts)
  if unclosed:
    return ""
  _, mark, rest = text.rpartition(ANSWER_MARK)
  return rest.strip().partition("\n")[0] if mark else None


def _has_words(text: str) -> bool:
  return bool(_WORD.search(re.sub(TEXT, " ", _MATH.sub(" ", text))))


def _last_expression(text: str) -> str | None:
  """The formula in $…$, \\(…\\) or \\[…\\], or the number, that ends last.

  None if the text says that it is not the answer, or if it is one end of a range.
  """
  found = [(m.end(), m.start()) for m in (*_NUMBER.finditer(text), *_MATH.finditer(text))]
  end, start = max(found, default=(0, 0))
  return None if start == end or _NOT_THIS.search(text[:start][-_NOT_BEFORE:]) else text[start:end]


def _phrase_answer(phrase: str) -> str | None:
  """The answer in "x + 1", "5 apples", "therefore $5$", "Tuesday"; None in longer prose."""
  if not _has_words(phrase) or parse_answer(phrase[:MAX_ANSWER]).number is not None:
    return phrase
  return _last_expression(phrase) or (phrase if len(phrase.split()) <= 5 else None)


def _prose_answer(text: str) -> str | None:
  text = text[-_PROSE:].strip()
  announced = list(_ANSWER_IS.finditer(text))
  if announced:
    return _phrase_answer(_SENTENCE_END.split(text[announced[-1].end() :], maxsplit=1)[0])
  if "\n" not in text and (not _has_words(text) or len(text.split()) == 1):
    return text
  return _last_expression(text)


def extract(completion: str) -> str | None:
  r"""The text of a completion's final answer, or None.

  In this order: the last \boxed{…}; the line after the last "####"; what follows the last "answer
  is"; the full text if it is one formula or word; the formula or number that ends last. Only what
  follows a "</think>" counts, and nothing while a "<think>" is open.
  """
  text = after_thinking(completion)
  if text is None:
    return None
  stated = stated_answer(text[-_TAIL:])
  answer = _prose_answer(text) if stated is None else stated
  return (answer or "").strip() or None


class UnparseableGoldError(ValueError):
  """A gold answer that cannot be compared with anything."""


@functools.lru_cache(maxsize=4096)
def _gold(text: str) -> Answer:
  stated = stated_answer(text)
  answer = (text if stated is None else stated).strip()
  if not answer or len(answer) > MAX_ANSWER:
    raise UnparseableGoldError(f"{text!r:.200} is empty or has over {MAX_ANSWER} characters")
  gold = parse_answer(answer)
  return _distinct(gold) if gold.brackets == SET else gold


def _distinct(answer: Answer) -> Answer:
  items = tuple({str(item): item for item in answer.items}.values())
  return answer._replace(items=items) if len(items) > 1 else items[0]


def reduced_to(gold: Answer, answer: Answer) -> Answer:
  """The answer without the parts that the gold answer does not have.

  These are names, units, brackets of a list, repeated elements of a set, and, of a choice such as
  "(B) 5", its letter or its value.
  """
  if gold.words and answer.choice and re.fullmatch("[A-J]", gold.value):
    return Answer(value=answer.choice, words=True)
  if not gold.choice:
    answer = answer._replace(choice="")
  gold_text = str(gold._replace(choice=""))
  has_unit = any(part.unit not in ("", "%") for part in (gold, *gold.items))
  answer = _reduced(answer, bool(_RELATION.search(gold_text)), has_unit)._replace(
    brackets=_brackets(gold, answer)
  )
  as_set = answer.brackets == SET and (gold.brackets == SET or not gold.items)
  return _distinct(answer) if as_set else answer


def _reduced(answer: Answer, names: bool, units: bool) -> Answer:
  return answer._replace(
    name=answer.name if names else "",
    unit=answer.unit if units or answer.unit == "%" else "",
    items=tuple(_reduced(item, names, units) for item in answer.items),
  )


def _brackets(gold: Answer, answer: Answer) -> str:
  """The answer's brackets, or the gold ones if they count as the same.

  A list may be bare, and a vector may have square brackets; but a pair is neither a set nor [ , ].
  """
  same = (
    bool(gold.items and answer.items)
    and (not answer.brackets or (not gold.brackets and answer.brackets in ("()", SET)))
  ) or (len(gold.items) > 2 and {gold.brackets, answer.brackets} == {"()", "[]"})
  return gold.brackets if same else answer.brackets


def equal(gold: Answer, answer: Answer) -> bool:
  """Whether an answer, from `reduced_to`, equals the gold one."""
  if gold.choice:
    if answer.words and answer.value == gold.choice:
      return True
    if answer.choice not in ("", gold.choice):
      return False
    gold, answer = gold._replace(choice=""), answer._replace(choice="")
  names = gold.name and answer.name and gold.name != answer.name
  units = gold.unit != answer.unit and (answer.unit or gold.unit.startswith("base")) and gold.unit
  if names or units:
    return False
  if gold.number is not None and answer.number is not None:
    return _equal_numbers(gold, answer)
  if answer.words and not gold.words and len(gold.value) == 1:
    return gold.value == answer.value  # a name: b is not B
  if gold.words or answer.words:
    return _letters(gold.value) == _letters(answer.value) != ""
  if gold.items and answer.items:
    return _equal_lists(gold, answer)
  if not (gold.items or answer.items) and gold.value == answer.value != "":
    return True
  of_gold = gold.name in ("", answer.name)  # to x = 5, another equation such as "5=5" is wrong
  if of_gold and _EQUALS.search(answer.value) and not _RELATION.search(gold.value):
    return _ends_in(gold, answer)
  if gold.number is not None or gold.value == r"\emptyset":  # math-verify reads 0 < 1 as a set
    return False
  return _equal_formulas(str(gold._replace(unit="")), str(answer._replace(unit="")))


def _ends_in(gold: Answer, answer: Answer) -> bool:
  """Whether "2+3=5", "m+n=5" or "x \\approx 5" end in the gold answer, and no side is another."""
  *sides, last = _EQUALS.split(answer.value)
  end = reduced_to(gold, parse_answer(last))
  if not equal(gold, end._replace(unit=end.unit or answer.unit)):
    return False
  formula = str(gold._replace(name="", unit=""))
  return all(_equal_formulas(formula, side) for side in sides if side and is_computed(side))


def _letters(text: str) -> str:
  return re.sub(r"[\s.]", "", text.casefold())


def _equal_numbers(gold: Answer, answer: Answer) -> bool:
  assert gold.number is not None and answer.number is not None
  pairs = []
  if gold.unit == "%" != answer.unit:
    pairs.append((gold.number / 100, answer.number))
  if answer.unit == "%" != gold.unit:
    pairs.append((gold.number, answer.number / 100))
  if not pairs or gold.unit == "%" or abs(gold.number) >= 1:
    pairs.append((gold.number, answer.number))  # 5 may mean 5 %, but 0.05 not 0.05 %
  return any(_close(a, b) for a, b in pairs)


def _close(a: Fraction, b: Fraction) -> bool:
  if a == b or (a.denominator == b.denominator == 1):
    return a == b
  return round(a, _DECIMALS) == round(b, _DECIMALS) and abs(a - b) <= _RELATIVE * abs(a)


def _equal_lists(gold: Answer, answer: Answer) -> bool:
  if gold.brackets != answer.brackets or len(gold.items) != len(answer.items):
    return False
  if gold.ordered:
    return all(map(equal, gold.items, answer.items))
  rest = list(answer.items)
  for item in gold.items:
    match = next((i for i, other in enumerate(rest) if equal(item, other)), None)
    if match is None:
      return False
    del rest[match]
  return True


@functools.cache
def _math_verify() -> tuple[Callable[[str], list], Callable[[list, list], bool]]:
  # GMP aborts the process when memory runs out; Python's own integers raise MemoryError.
  os.environ.setdefault("SYMPY_GROUND_TYPES", "python")
  os.environ.setdefault("MPMATH_NOGMPY", "1")
  try:
    import math_verify
    from latex2sympy2_extended import NormalizationConfig
  except ImportError as error:
    raise ImportError(
      'the mathematics grader needs math-verify: pip install -e ".[math]"'
    ) from error
  logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeout is off
  # Units are parsed in `answers`: math-verify would read the variable of "5m" as a unit.
  normalization = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none",
    equations=False,
  )  # fmt: skip
  config = math_verify.LatexExtractionConfig(normalization_config=normalization)

  def parse(latex: str) -> list:
    return math_verify.parse(
      f"${latex}$", [config], fallback_mode="no_fallback", parsing_timeout=None
    )

  def verify(gold: list, answer: list) -> bool:
    return math_verify.verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None)

  return functools.lru_cache(maxsize=512)(parse), verify


def _equal_formulas(gold: str, answer: str) -> bool:
  if _UNEVALUATED.search(answer):  # only the same text is right, which has been compared already
    return False
  if formula_size(answer) > max(_MAX_SIZE, min(2 * formula_size(gold), _MAX_GOLD_SIZE)):
    return False
  parse, verify = _math_verify()
  parsed_gold = parse(gold)
  return bool(parsed_gold) and verify(parsed_gold, parse(answer))


def _unparsed(gold: Answer) -> str:
  """The first formula of a gold answer that math-verify cannot parse; "" if there is none."""
  if gold.items:
    return next(filter(None, map(_unparsed, gold.items)), "")
  if gold.number is not None or gold.words or _math_verify()[0](gold.value):
    return ""
  return gold.value


def mathematics(completion: str, reference: Mapping[str, Any]) -> Grade:
  r"""Compares the final answer of a completion with the gold one; see `extract` and `equal`.

  Args:
    completion: text.
    reference: "answer", the gold answer: bare LaTeX or a number, or a text with it in a \boxed{…}
      or after a "####".
  Returns:
    correct (score 1) or wrong (0) with the extracted answer's normal form as `answer` and `detail`;
    unparseable without an answer, or with one over MAX_ANSWER characters or nested too deeply;
    crashed if the gold answer is empty or too long, whatever the completion. If math-verify cannot
    parse the gold answer, only the same normal form is correct, and `detail` says so.
  """
  try:
    gold = _gold(str(reference["answer"]))
  except (UnparseableGoldError, RecursionError) as error:
    return Grade(Outcome.CRASHED, detail=f"the gold answer: {error}")
  try:
    text = extract(completion)
    if text is None:
      return Grade(Outcome.UNPARSEABLE, detail="no answer")
    if len(text) > MAX_ANSWER:
      return Grade(Outcome.UNPARSEABLE, detail=f"an answer of {len(text)} characters")
    answer = reduced_to(gold, parse_answer(text))
    normal = str(answer)
    is_correct = equal(gold, answer)
    unparsed = "" if is_correct else _unparsed(gold)
  except (RecursionError, MemoryError) as error:
    return Grade(Outcome.UNPARSEABLE, detail=f"{type(error).__name__} in comparing the answer")
  outcome = Outcome.CORRECT if is_correct else Outcome.WRONG
  detail = normal
  if unparsed:
    detail += f" (only the same text counts: math-verify cannot parse the gold {unparsed!r:.200})"
  return Grade(outcome, float(is_correct), detail=detail, answer=normal)


def mathematics_self_test() -> None:
  """Raises unless math-verify is installed and tells a right answer from a wrong one."""
  reference = {"answer": r"\frac{\sqrt{2}}{2}"}
  texts = (r"so \boxed{\frac{1}{\sqrt{2}}}", r"\boxed{\sqrt{2}}")
  got = [mathematics(text, reference).outcome for text in texts]
  if got != [Outcome.CORRECT, Outcome.WRONG]:
    raise RuntimeError(f"mathematics graded a right and a wrong answer to √2/2 as {got}")
