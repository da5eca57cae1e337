"""Compares formulas by math-verify, within bounds on what that may cost."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
from collections.abc import Callable
from typing import Any

from rlvr_jax.rewards.formula_size import formula_size, makes_huge_power, number_digits

_DIFFERENTIAL = r"(?:d|\\partial|\\mathrm\{d\})"
_UNEVALUATED = re.compile(  # \frac{dy}{dx} is a name, and not among these
  r"\\(?:sum|prod|i{0,3}nt|oint|lim)(?![A-Za-z])"
  rf"|\\frac\{{{_DIFFERENTIAL}(?![-+]|\w\}})[^{{}}]*\}}\{{{_DIFFERENTIAL} ?[A-Za-z]"
)
_TWO_NUMBERS = re.compile(r"(?<![_^A-Za-z0-9])[0-9]+ [0-9]")  # "7 2" is neither 72 nor 14
_EXACT = 40  # digits of compared values, in addition to those of the largest number
_MAX_EXACT = 2000  # … of which at most this many count
_INEXACT = 15  # digits of compared values if a formula has a decimal
_MARGIN = 3  # last digits that may differ
_MAX_SIZE = 100  # terms of an answer when multiplied out, see `formula_size`; more take seconds
_MAX_GOLD_SIZE = 10_000  # … if the gold answer has half as many


def can_parse(latex: str) -> bool:
  """Whether math-verify can parse a formula."""
  return bool(_load_math_verify()[0](latex))


@functools.cache
def _load_math_verify() -> tuple[Callable[[str], list], Callable[[list, list], bool]]:
  """Imports math-verify and returns its functions (parse, verify) with our settings."""
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
  # Units are parsed in `answers`: math-verify would take the variable of "5m" for a unit.
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


def formulas_match(gold: str, answer: str) -> bool:
  """Whether formulas are equal, by math-verify or by value; False if comparing them is costly."""
  if _UNEVALUATED.search(answer):  # only the same text is correct, which has been compared already
    return False
  if formula_size(answer) > max(_MAX_SIZE, min(2 * formula_size(gold), _MAX_GOLD_SIZE)):
    return False
  if _TWO_NUMBERS.search(answer):
    return False
  parse, verify = _load_math_verify()
  parsed_gold = parse(gold)
  parsed_answer = parse(answer)
  if not (parsed_gold and parsed_answer):
    return False
  digits = _EXACT + math.ceil(min(_MAX_EXACT, max(map(number_digits, (gold, answer)))))
  same_value = _values_match(parsed_gold[0], parsed_answer[0], digits)
  if same_value is not None:
    return same_value
  return not makes_huge_power(gold, answer) and verify(parsed_gold, parsed_answer)


def _values_match(gold: Any, answer: Any, digits: int) -> bool | None:
  r"""Whether two formulas without variables agree to `digits` digits; None for other formulas.

  math-verify would simplify their difference, which costs hours for \log_2 3 and 10^{999}.
  """
  for formula in (gold, answer):
    if not getattr(formula, "is_number", False) or formula.is_finite is False:
      return None
  if gold.is_Rational and answer.is_Rational:
    return bool(gold == answer)
  inexact = any(type(atom).__name__ == "Float" for both in (gold, answer) for atom in both.atoms())
  try:
    digits = _INEXACT if inexact else digits
    gap, size = (abs(value).evalf(digits) for value in (gold - answer, gold))
    return bool(gap <= 10 ** (_MARGIN - digits) * max(size, 1))
  except TypeError:  # a function without a value
    return None


def evaluate_formula(text: str) -> float | None:
  """Evaluates a real formula without variables; None for any other or costly formula."""
  if _UNEVALUATED.search(text) or formula_size(text) > _MAX_SIZE:
    return None
  parsed = _load_math_verify()[0](text)
  try:
    return float(parsed[0].evalf(15))
  except (IndexError, AttributeError, TypeError, ValueError, OverflowError):
    return None
