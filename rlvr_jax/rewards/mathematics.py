r"""The mathematics grader: compares a completion's final answer with the gold answer.

The gold answer and the answer are each parsed into a typed value (`answers.Answer`) and compared by
type: integers exactly, other plain numbers to 6 decimal places and a relative difference of 1e-4,
words as text, lists, tuples and sets element by element, intervals and conditions as sets of real
numbers (`conditions`), formulas by their values (`formulas`). Units are compared by name if both
answers have a unit.

A grade depends only on the gold answer and the answer's normal form (`Grade.answer`, see
`answers`), so samples that vote for the same answer get the same grade. The normal form has names
("x = 5") only if the gold answer has names or relations, and most units only if the gold answer has
units. But a name that begins a chain of equations ("x = 2+3 = 5") always stays. Formulas that are
equal but written differently ("x+1", "1+x") are two votes.

If the gold answer is a plain number, a correct answer is a number, or a single power or root of a
number. Other expressions are wrong: otherwise a policy could box the expression of the question. A
sum, an integral, a limit or a derivative in an answer is never evaluated: it is correct only if the
gold answer has the same text.

No completion can make this grader crash: a crash would mask the completion out of the loss. An
answer that is too long or too deeply nested is unparseable. An answer that cannot be parsed is
wrong, unless it is the gold answer's text.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from rlvr_jax.rewards.answers import (
  FIGURE,
  RELATION,
  SET,
  Answer,
  normalize_figure,
  parse_answer,
)
from rlvr_jax.rewards.conditions import parse_relations, regions_match, relations_match
from rlvr_jax.rewards.extraction import MAX_ANSWER, extract_answer, find_stated_answer
from rlvr_jax.rewards.formulas import (
  evaluate_formula,
  formulas_match,
  is_constant,
  names_in,
  parse_formula,
  plain_number,
)
from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.rewards.units import SIGNS

_DECIMALS = 6  # plain numbers are compared to this many decimal places …
_RELATIVE = Fraction(1, 10_000)  # … and to this relative difference; otherwise 1e-7 would equal 0

_THOUSANDS = re.compile(r"(.*[0-9]) ?[Kk]")  # 5K, if K is not a variable
_NUMBERS = re.compile(r"\\(?:cup|cap|setminus|backslash|mathbb\{R\})")
_NAMED = (r"\emptyset", r"\infty", r"-\infty")
_VARIABLE = re.compile(r"[A-Za-z](?=\\[lg]eq|[<>])")
_BOUND = re.compile(r"\\[lg]eq|[<>]")
_CLOCK_TIME = re.compile(r"([0-9]{1,2}):([0-5][0-9])")
_APPROXIMATES = re.compile(r"\\approx(?![A-Za-z])")
_EQUALS = re.compile(r"=|\\approx(?![A-Za-z])")

_TIMES_PI = re.compile(r"([\d.})]?)(?:\*|\\cdot|\\times)?\\pi(?![A-Za-z])")
_OF_VARIABLE = re.compile(r"[\d^/+-]|\\(?:frac|sqrt|log|ln|lg|exp|sin|cos|tan)(?![A-Za-z])|log")


class UnparseableGoldError(ValueError):
  """A gold answer is empty or too long."""


@functools.lru_cache(maxsize=4096)
def _parse_gold(text: str) -> Answer:
  stated_answer = find_stated_answer(text)
  answer = (text if stated_answer is None else stated_answer).strip()
  if not answer or len(answer) > MAX_ANSWER:
    raise UnparseableGoldError(f"{text!r:.200} is empty or has over {MAX_ANSWER} characters")
  gold = parse_answer(answer)
  gold = _mark_words(gold._replace(items=tuple(map(_mark_words, gold.items))))
  return _drop_repeated_items(gold) if gold.brackets == SET else gold


def _mark_words(gold: Answer) -> Answer:
  """Marks adjacent letters of a gold answer as a word, unless they are a product.

  Two or more capitals (ABC) are a word, since they may be a code, an ordering, or the points of a
  figure. Two lower-case letters are a product. Three or more are a product if they have no vowel
  (lwh) or are sorted (abc); otherwise they are a word (cat).
  """
  value = gold.value
  is_word = re.fullmatch("[A-Z]{2,}", value) or (
    re.fullmatch("(?=.*[aeiou])[a-z]{3,}", value) and list(value) != sorted(value)
  )
  return gold._replace(value=value.casefold(), words=True) if is_word else gold


def _drop_repeated_items(answer: Answer) -> Answer:
  items = tuple({str(item): item for item in answer.items}.values())
  return answer._replace(items=items) if len(items) > 1 else items[0]


def reduce_to_form_of(gold: Answer, answer: Answer) -> Answer:
  """Brings an answer into the gold answer's form.

  Removes the parts that the gold answer does not have: names, units, brackets of a list, repeated
  elements of a set, and the letter or the value of a choice such as "(B) 5". Adds names: if the
  gold answer names x and y in this order, (1,2) becomes x=1, y=2.
  """
  if gold.words and answer.choice and re.fullmatch("[A-J]", gold.value):
    return Answer(value=answer.choice, words=True)
  if not gold.choice:
    answer = answer._replace(choice="")
  gold_parts = (gold, *gold.items)
  form = _Form(
    text := str(gold._replace(choice="")),
    names=bool(RELATION.search(text)),
    words=any(part.words for part in gold_parts),
    numbers=gold.number is not None,
    variables=bool(gold.value) and not (gold.words or gold.unit),
    units=frozenset(part.unit for part in gold_parts) - {""},
  )
  # If the gold answer is a figure, such as an angle, its points alone (ABC) also name it.
  if (figure := FIGURE.match(gold.value)) and re.fullmatch("[A-Z]{2,4}", answer.value):
    answer = Answer(value=normalize_figure(figure[1], answer.value))
  brackets = _choose_brackets(gold, answer)
  answer = _reduce(_align_names(gold, answer, form), form)._replace(brackets=brackets)
  if (variable := _VARIABLE.match(gold.value)) and _BOUND.match(answer.value):
    answer = answer._replace(value=variable[0] + answer.value)  # "at most 5" is x ≤ 5
  as_set = answer.brackets == SET and (gold.brackets == SET or not gold.items)
  return _drop_repeated_items(answer) if as_set else answer


class _Form(NamedTuple):
  """The form of a gold answer."""

  text: str  # the gold answer's normal form, without its choice
  names: bool  # whether the gold answer has names or relations
  words: bool  # whether the gold answer or one of its items is text
  numbers: bool  # whether the gold answer is one plain number
  variables: bool  # whether the gold answer is a formula
  units: frozenset[str]  # the units of the gold answer and its items


def _align_names(gold: Answer, answer: Answer, form: _Form) -> Answer:
  """Gives a list the gold names, by position; or sorts its items by their own names.

  So "y=2, x=1" becomes (1,2) if the gold answer is an ordered list without names.
  """
  names = _item_names(gold)
  answer_names = "".join(sorted(_item_names(answer)))
  items = answer.items
  if names and len(items) == len(names) and answer.brackets != SET:
    pairs = zip(items, names, strict=True)
    items = tuple(
      item if RELATION.search(item.value) else item._replace(name=item.name or name)
      for item, name in pairs
    )
  elif gold.is_ordered and not form.names and _are_consecutive_letters(answer_names):
    items = tuple(sorted(items, key=lambda item: item.name))
  return answer._replace(items=items)


def _item_names(answer: Answer) -> tuple[str, ...]:
  """The names of a list's items if all items have a name and all names differ, else ()."""
  names = tuple(item.name for item in answer.items)
  return names if all(names) and len(set(names)) == len(names) else ()


def _are_consecutive_letters(names: str) -> bool:
  return len(names) > 1 and names in "abcdefghijklmnopqrstuvwxyz"


def _reduce(answer: Answer, form: _Form) -> Answer:
  """Adapts words, thousands, variables, names and units of an answer to the gold answer's form."""
  if form.words and re.fullmatch("[A-Za-z]{2,}", answer.value):
    answer = answer._replace(value=answer.value.casefold(), words=True)
  if form.numbers and (match := _THOUSANDS.fullmatch(answer.value)):
    answer = Answer(number=plain_number(match[1]), unit="k", name=answer.name)
  if form.variables and answer.number is not None and re.fullmatch("[a-z]", answer.unit):
    answer = Answer(value=f"{answer.number}{answer.unit}", name=answer.name)  # 5 m is 5·m
  answer = answer._replace(items=tuple(_reduce(item, form) for item in answer.items))
  if not (form.names or _EQUALS.search(answer.value)):  # A=s^2=25 is solved, s^2=25 is not
    answer = answer._replace(name="")
  return _convert_unit(answer, form)


def _convert_unit(answer: Answer, form: _Form) -> Answer:
  """Converts an answer to the gold answer's currency or scale, and removes an optional unit.

  Dollars and cents are converted. 5 K is 5000 unless the gold answer is in kelvin. Units that have
  a sign ($, °) are optional, and so are words or letters after the sign's unit, such as "per hour"
  in "$5 per hour" and "C" in "30 °C".
  """
  number, unit = answer.number, answer.unit
  units = form.units
  if number is not None and unit == "cent" and "dollar" in units:
    number, unit = number / 100, "dollar"
  elif number is not None and unit == "dollar" and "cent" in units and "dollar" not in units:
    number, unit = number * 100, "cent"
  elif number is not None and unit == "k" and not units & {"k", "kelvin"}:
    number, unit = number * 1000, ""
  elif unit in ("k", "kelvin"):
    unit = next(iter(units & {"k", "kelvin"}), unit)
  is_gold_unit = unit.partition(" ")[0] in (*SIGNS.values(), "%") and any(
    f"{one} ".startswith(f"{other} ")
    for gold in units
    for one, other in ((gold, unit), (unit, gold))
  )
  is_angle = unit == "degree" and r"\pi" in form.text
  if unit != "%" and not unit.startswith("mod ") and (is_gold_unit or not (units or is_angle)):
    unit = ""
  return answer._replace(number=number, unit=unit)


def _choose_brackets(gold: Answer, answer: Answer) -> str:
  """The gold answer's brackets if the answer's brackets are equivalent, else the answer's.

  A list may be without brackets, and a vector may have square brackets. But a pair is neither a set
  nor a closed interval.
  """
  # A set is not equivalent to a list of names, since it does not say which element is x.
  same_as_bare = ("()",) if _item_names(gold) else ("()", SET)
  is_equivalent = (
    bool(gold.items and answer.items and not answer.is_condition)
    and (not answer.brackets or (not gold.brackets and answer.brackets in same_as_bare))
  ) or (len(gold.items) > 2 and {gold.brackets, answer.brackets} == {"()", "[]"})
  return gold.brackets if is_equivalent else answer.brackets


def answers_match(gold: Answer, answer: Answer) -> bool:
  """Whether an answer, from `reduce_to_form_of`, equals the gold answer."""
  if gold.choice:
    if answer.words and answer.value == gold.choice:
      return True
    if answer.choice not in ("", gold.choice):
      return False
    gold, answer = gold._replace(choice=""), answer._replace(choice="")
  if (same_angle := _angles_match(gold, answer)) is not None:
    return same_angle
  if gold.name and answer.name and gold.name != answer.name:
    is_number = gold.number is not None or answer.number is not None
    return not is_number and relations_match(str(gold), str(answer))
  if gold.unit != answer.unit and not _may_omit_unit(gold, answer):
    return False
  if gold.number is not None and answer.number is not None:
    return _numbers_match(gold, answer)
  if FIGURE.match(gold.value) or _is_time(gold.value):
    return gold.value == answer.value
  if answer.words and not gold.words and len(gold.value) == 1:
    return gold.value == answer.value  # a name: b is not B
  if gold.words or answer.words:
    return _normalize_words(gold.value) == _normalize_words(answer.value) != ""
  if _describes_numbers(gold) or (_describes_numbers(answer) and _has_interval(gold)):
    same_numbers = regions_match(gold, answer)
    if same_numbers is not None:
      return same_numbers
  if gold.number is not None and answer.is_condition:
    return False  # else the calculation 17·23 ≤ x ≤ 17·23 would be a right answer
  if gold.items and answer.items:
    return _lists_match(gold, answer)
  if not (gold.items or answer.items) and gold.value == answer.value != "":
    return True
  # If the gold answer is x = 5, another equation such as "5=5" is wrong.
  same_name = gold.name in ("", answer.name)
  if same_name and _EQUALS.search(answer.value) and not RELATION.search(gold.value):
    return _ends_in(gold, answer)
  has_one_value = gold.number is not None or (gold.name and is_constant(gold.value))
  if gold.items or answer.items or (has_one_value and RELATION.search(answer.value)):
    return False
  if gold.number is not None:
    return False
  if ":" in gold.value:
    return _ratios_match(gold.value, answer.value or str(answer.number))
  gold_text, text = (str(each._replace(unit="")) for each in (gold, answer))
  if RELATION.search(gold_text) and RELATION.search(text):
    return relations_match(gold_text, text)
  return formulas_match(gold.value, answer.value or str(answer.number))


def _may_omit_unit(gold: Answer, answer: Answer) -> bool:
  if f"{gold.unit} {answer.unit}".startswith("base ") or "mod " in gold.unit + answer.unit:
    return False
  return not (gold.unit and answer.unit)


def _describes_numbers(answer: Answer) -> bool:
  """Whether an answer is a condition or a set of real numbers, other than a list or an interval."""
  return answer.is_condition or bool(_NUMBERS.search(answer.value))


def _has_interval(answer: Answer) -> bool:
  return any(len(each.items) == len(each.brackets) == 2 for each in (answer, *answer.items))


def _ratios_match(gold: str, answer: str) -> bool:
  """Whether two ratios are equal, as 1:2:3 and 2:4:6, or 1:2 and 1/2."""
  gold_parts, parts = gold.split(":"), answer.split(":")
  if len(gold_parts) == 2 and len(parts) == 1:
    parts.append("1")
  return len(gold_parts) == len(parts) and all(
    formulas_match(f"({gold_parts[0]})({part})", f"({gold_part})({parts[0]})")
    for gold_part, part in zip(gold_parts[1:], parts[1:], strict=True)
  )


def _is_time(value: str) -> bool:
  """Whether a text such as "8:30" is a time of day; a ratio would be written 4:15."""
  match = _CLOCK_TIME.fullmatch(value)
  if not match:
    return False
  return match[2][0] == "0" or math.gcd(int(match[1]), int(match[2])) > 1


def _angles_match(gold: Answer, answer: Answer) -> bool | None:
  r"""Whether angles are equal, as 30° and \frac{\pi}{6}; None unless one has ° and the other has π.

  The angle with π must be a plain number times π: 30° does not equal \arcsin(\frac12)+0\pi.
  """
  degrees, radians = (gold, answer) if gold.unit == "degree" else (answer, gold)
  if degrees.unit != "degree" or degrees.number is None or radians.unit not in ("", "rad"):
    return None
  if r"\pi" not in radians.value:
    return None
  factor = _TIMES_PI.sub(lambda match: match[1] or "{1}", radians.value, count=1)
  if plain_number(factor) is None:
    return False
  top, bottom = degrees.number.as_integer_ratio()
  return formulas_match(rf"\frac{{{top}\pi}}{{{180 * bottom}}}", radians.value)


def _is_rounded_value(exact: str, decimal: str) -> bool:
  """Whether a decimal is a formula's value, rounded or truncated to the decimal's digits."""
  number = plain_number(decimal)
  value = evaluate_formula(exact)
  if number is None or value is None:
    return False
  unit = Fraction(1, 10 ** len(decimal.partition(".")[2]))
  gap = abs(value) - abs(number)
  return value * number >= 0 and (abs(gap) <= unit * 501 / 1000 or 0 <= gap < unit)


def _ends_in(gold: Answer, answer: Answer) -> bool:
  r"""Whether an equation such as "2+3=5", "m+n=5" or "x \approx 5" ends in the gold answer.

  No side may contradict the gold answer. Sides with variables that the gold answer lacks, such as
  m+n, are not compared. In r"2\sqrt{3} \approx 3.46" either side may be the gold answer, if the
  right side is the rounded left side.
  """
  exact, *decimals = _APPROXIMATES.split(answer.value)
  if decimals and all(map(is_constant, _EQUALS.split(exact))):
    candidates = (exact, decimals[-1])
    return all(_is_rounded_value(_EQUALS.split(exact)[-1], text) for text in decimals) and any(
      answers_match(gold, reduce_to_form_of(gold, parse_answer(side))._replace(name=""))
      for side in candidates
    )
  *sides, last = _EQUALS.split(answer.value)
  formula = str(gold._replace(name="", unit=""))
  variables = _names_in(formula) or frozenset()
  if not (variables or answer.name) and _has_one_unknown(sides[0]):
    return False
  end = reduce_to_form_of(gold, parse_answer(last))
  if not answers_match(gold, end._replace(unit=end.unit or answer.unit)):
    return False
  for side in sides:
    names = _names_in(side)
    if names is not None and names <= variables and not formulas_match(formula, side):
      return False
  return True


def _names_in(formula: str) -> frozenset[str] | None:
  """The variables of a formula; None if the text is not a formula."""
  node = parse_formula(formula)
  return None if node is None else names_in(node)


def _has_one_unknown(side: str) -> bool:
  r"""Whether a side of an equation is an unsolved term in one variable, such as "2m" in "2m=5".

  "x^2" and r"\log x" are such terms; m+n and f(2) are not. Capitals and Greek letters are no
  variables but parts of a figure: \cos A=5 is an answer.
  """
  names = _names_in(re.sub(r"(?<!\\)log", r"\\log ", side)) or frozenset()
  names_value = re.search(r"(?<!log)_|['|]|[a-z](?:\^\{-1\})?\([^a-z]*\)", side)
  return (
    re.fullmatch("[a-z]", ",".join(names)) is not None
    and not names_value
    and bool(_OF_VARIABLE.search(side))
  )


def _normalize_words(text: str) -> str:
  """Removes case, spaces and periods."""
  return re.sub(r"[\s.]", "", text.casefold())


def _numbers_match(gold: Answer, answer: Answer) -> bool:
  assert gold.number is not None and answer.number is not None
  pairs = []
  if gold.unit == "%" != answer.unit:
    pairs.append((gold.number / 100, answer.number))
  if answer.unit == "%" != gold.unit:
    pairs.append((gold.number, answer.number / 100))
  if not pairs or gold.unit == "%" or abs(gold.number) >= 1:
    pairs.append((gold.number, answer.number))  # 5 may mean 5 %, but 0.05 cannot mean 0.05 %
  return any(_is_close(a, b) for a, b in pairs)


def _is_close(a: Fraction, b: Fraction) -> bool:
  if a == b or (a.denominator == b.denominator == 1):
    return a == b
  return round(a, _DECIMALS) == round(b, _DECIMALS) and abs(a - b) <= _RELATIVE * abs(a)


def _lists_match(gold: Answer, answer: Answer) -> bool:
  if gold.brackets != answer.brackets or len(gold.items) != len(answer.items):
    return False
  if gold.joint and answer.joint and gold.joint != answer.joint:
    return False
  if gold.is_ordered:
    return all(map(answers_match, gold.items, answer.items))
  if _item_names(gold) and not all(item.name for item in answer.items):
    return False
  unmatched_items = list(answer.items)
  for item in gold.items:
    match = next((i for i, other in enumerate(unmatched_items) if answers_match(item, other)), None)
    if match is None:
      return False
    del unmatched_items[match]
  return True


def _find_unparseable(gold: Answer) -> str:
  """Finds the first formula of a gold answer that cannot be parsed; "" if there is none."""
  if gold.items:
    return next(filter(None, map(_find_unparseable, gold.items)), "")
  if gold.number is not None or gold.words or FIGURE.match(gold.value) or ":" in gold.value:
    return ""
  if parse_formula(gold.value) or parse_relations(gold.value) or regions_match(gold, gold):
    return ""
  return "" if gold.value in _NAMED else gold.value


def mathematics(completion: str, reference: Mapping[str, Any]) -> Grade:
  r"""Compares the final answer of a completion with the gold answer.

  See `extract_answer` and `answers_match`.

  Args:
    completion: text.
    reference: "answer", the gold answer: bare LaTeX or a number, or a text that has it in a
      \boxed{…} or after a "####".
  Returns:
    correct (score 1) or wrong (0) with the extracted answer's normal form as `answer` and `detail`;
    unparseable if there is no answer, or if it has over MAX_ANSWER characters or is nested too
    deeply; crashed for any completion if the gold answer is empty or too long. If the gold answer
    cannot be parsed, only the same normal form is correct, and `detail` says so.
  """
  try:
    gold = _parse_gold(str(reference["answer"]))
  except (UnparseableGoldError, RecursionError) as error:
    return Grade(Outcome.CRASHED, detail=f"the gold answer: {error}")
  try:
    text = extract_answer(completion)
    if text is None:
      return Grade(Outcome.UNPARSEABLE, detail="no answer")
    if len(text) > MAX_ANSWER:
      return Grade(Outcome.UNPARSEABLE, detail=f"an answer of {len(text)} characters")
    normal = str(reduce_to_form_of(gold, parse_answer(text)))
    # The graded answer is parsed from the normal form: one normal form, one grade.
    is_correct = answers_match(gold, reduce_to_form_of(gold, parse_answer(normal)))
    unparsed = "" if is_correct else _find_unparseable(gold)
  except ImportError:
    raise
  except Exception as error:  # a completion must not be able to have its rollout left out
    detail = f"{type(error).__name__} in comparing the answer: {error}"
    return Grade(Outcome.UNPARSEABLE, detail=detail)
  outcome = Outcome.CORRECT if is_correct else Outcome.WRONG
  detail = normal
  if unparsed:
    detail += f" (only the same text counts: the gold {unparsed!r:.200} cannot be parsed)"
  return Grade(outcome, float(is_correct), detail=detail, answer=normal)


def mathematics_self_test() -> None:
  """Raises an error unless mpmath is installed and the grader tells right from wrong answers."""
  reference = {"answer": r"\frac{\sqrt{2}}{2}"}
  texts = (r"so \boxed{\frac{1}{\sqrt{2}}}", r"\boxed{\sqrt{2}}")
  outcomes = [mathematics(text, reference).outcome for text in texts]
  if outcomes != [Outcome.CORRECT, Outcome.WRONG]:
    raise RuntimeError(
      "the self-test of mathematics failed: for the reference √2/2, the answers 1/√2 and √2 must be"
      f" graded correct and wrong, but were graded {outcomes}"
    )
