"""Equations, inequalities, and the sets of real numbers that they and intervals describe."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from rlvr_jax.rewards.answers import SET, Answer, parse_answer
from rlvr_jax.rewards.formulas import (
  Node,
  UndefinedError,
  evaluate_at,
  _load_mpmath,
  evaluate_formula,
  names_in,
  parse_formula,
  same_ratio,
)

_SIGN = re.compile(r"(\\[lgn]eq(?![A-Za-z])|[=<>])")
_FLIPPED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq", "=": "=", r"\neq": r"\neq"}
_HOLDS: dict[str, Callable[[int], bool]] = {  # of the sign of left - right
  "<": lambda sign: sign < 0, ">": lambda sign: sign > 0, "=": lambda sign: sign == 0,
  r"\leq": lambda sign: sign <= 0, r"\geq": lambda sign: sign >= 0, r"\neq": lambda sign: sign != 0,
}  # fmt: skip
_MAX_DEGREE = 8  # of an inequality that is solved
_ROOT = 10**40  # roots are rounded to multiples of its inverse
_EQUAL = Fraction(1, 10**20)  # ends of intervals that differ by less are equal
_LOW, _HIGH = (r"-\infty",), (r"\infty", r"+\infty")
_OPERATION = re.compile(r"\\(cup|cap|setminus)(?![A-Za-z])|\\backslash(?![A-Za-z])")


class Relation(NamedTuple):
  """left - right < 0, or another sign."""

  difference: Node
  sign: str


class Region(NamedTuple):
  """A set of real numbers that is a finite union of intervals and points.

  Attributes:
    ends: where membership may change.
    contains: whether a number is in it.
    variable: of the condition that describes it; "" for an interval.
  """

  ends: tuple[Fraction, ...]
  contains: Callable[[Fraction], bool]
  variable: str = ""


def parse_relations(text: str) -> list[Relation] | None:
  """Parses "a < b", or a chain of relations "a < b < c"; None if a side is no formula."""
  sides = _SIGN.split(text)
  if len(sides) < 3:
    return None
  nodes = [parse_formula(side) for side in sides[::2]]
  if any(node is None for node in nodes):
    return None
  relations = []
  for left, sign, right in zip(nodes, sides[1::2], nodes[1:], strict=False):
    assert left and right
    relations.append(Relation(Node("+", (left, Node("-", (right,)))), sign))
  return relations


def relations_match(gold: str, answer: str) -> bool:
  """Whether each relation of two chains has the same solutions: both sides times a constant."""
  pair = parse_relations(gold), parse_relations(answer)
  if not (pair[0] and pair[1]) or len(pair[0]) != len(pair[1]):
    return False
  unmatched = list(pair[1])
  for relation in pair[0]:
    found = next((other for other in unmatched if _same_relation(relation, other)), None)
    if found is None:
      return False
    unmatched.remove(found)
  return True


def _same_relation(gold: Relation, answer: Relation) -> bool:
  ratio = same_ratio(gold.difference, answer.difference)
  if not ratio:
    return False
  if gold.sign in ("=", r"\neq"):
    return answer.sign == gold.sign
  return ratio.imag == 0 and answer.sign == (gold.sign if ratio.real > 0 else _FLIPPED[gold.sign])


def find_region(answer: Answer) -> Region | None:
  """The set of real numbers that an answer describes; None if it is none, or is not solved."""
  if answer.words or answer.unit or answer.choice:
    return None
  if answer.items:
    return _region_of_items(answer)
  if answer.number is not None:
    return _points(answer.number)._replace(variable=answer.name)
  if answer.value in (r"\mathbb{R}", r"\mathbb{R}^+"):
    return _interval(None if answer.value == r"\mathbb{R}" else Fraction(0), None, "()")
  if answer.is_condition:
    relations = parse_relations(answer.value) or []
    regions = [_solve(relation) for relation in relations]
    return _combine(regions, all) if regions else None
  return _parse_region(answer.value)


def _region_of_items(answer: Answer) -> Region | None:
  items = answer.items
  if answer.brackets == SET:
    return _combine([find_region(item) for item in items], any)
  if answer.brackets:
    is_interval = len(items) == 2 and len(answer.brackets) == 2
    if not is_interval or any(item.items or item.unit or item.name for item in items):
      return None
    low, high = (str(item) for item in items)
    ends = [None if text in infinity else evaluate_formula(text)
            for text, infinity in ((low, _LOW), (high, _HIGH))]  # fmt: skip
    if (ends[0] is None and low not in _LOW) or (ends[1] is None and high not in _HIGH):
      return None
    return _interval(ends[0], ends[1], answer.brackets)
  regions = [find_region(item) for item in items]
  if not answer.joint:  # "x > 1, x < 3" means both; "x < 1, x > 3" either
    both = _combine(regions, all)
    return both if both is None or signature(both) != [False] else _combine(regions, any)
  return _combine(regions, any if answer.joint == "or" else all)


def _parse_region(text: str) -> Region | None:
  r"""Parses "(1,2)\cup\{3\}"; None for other texts."""
  pieces = _OPERATION.split(text)
  if len(pieces) < 3:
    return None
  region = find_region(parse_answer(pieces[0]))
  for operation, piece in zip(pieces[1::2], pieces[2::2], strict=True):
    other = find_region(parse_answer(piece))
    if other and operation not in ("cup", "cap"):
      other = other._replace(contains=lambda x, inner=other.contains: not inner(x))
    region = _combine([region, other], any if operation == "cup" else all)
  return region


def regions_match(gold: Region, answer: Region) -> bool:
  """Whether two sets are equal; if both name their variable, the names are equal too."""
  names = gold.variable.lower(), answer.variable.lower()
  if all(names) and names[0] != names[1]:
    return False
  ends = (*gold.ends, *answer.ends)
  return signature(gold, ends) == signature(answer, ends)


def signature(region: Region, ends: tuple[Fraction, ...] = ()) -> list[bool]:
  """Membership before, at and between all ends, in order, each only where it may change."""
  values: list[Fraction] = []
  for end in sorted(ends or region.ends):
    if not values or end - values[-1] > _EQUAL:
      values.append(end)
  if not values:
    return [region.contains(Fraction(0))]
  between = [(a + b) / 2 for a, b in itertools.pairwise(values)]
  probes = [values[0] - 1]
  for value, after in zip(values, [*between, values[-1] + 1], strict=True):
    probes += [value, after]
  inside = [region.contains(probe) for probe in probes]
  if len(set(inside)) == 1 and not ends:
    return inside[:1]
  return inside


def _points(*values: Fraction) -> Region:
  return Region(values, lambda x: any(abs(x - value) <= _EQUAL for value in values))


def _interval(low: Fraction | None, high: Fraction | None, brackets: str) -> Region:
  """An interval; None is infinity."""

  def contains(x: Fraction) -> bool:
    after = low is None or x > low + _EQUAL or (abs(x - low) <= _EQUAL and brackets[0] == "[")
    before = high is None or x < high - _EQUAL or (abs(x - high) <= _EQUAL and brackets[1] == "]")
    return after and before

  return Region(tuple(end for end in (low, high) if end is not None), contains)


def _combine(regions: list[Region | None], join: Callable[..., bool]) -> Region | None:
  found = [region for region in regions if region is not None]
  names = {region.variable.lower() for region in found} - {""}
  if len(found) < len(regions) or len(names) > 1:
    return None
  ends = tuple(end for region in found for end in region.ends)
  variable = next(iter(names), "")
  return Region(ends, lambda x: join(region.contains(x) for region in found), variable)


def _solve(relation: Relation) -> Region | None:
  """Solves an inequality of a polynomial in one variable; None for others."""
  names = names_in(relation.difference)
  if len(names) != 1:
    return None
  (name,) = names
  node, sign = _without_bars(relation)

  def value(x: Fraction) -> Fraction:
    return evaluate_at(node, {name: x})

  try:
    roots = _real_roots(value)
  except UndefinedError:
    return None
  if not roots:  # true or false for each number: the solution does not depend on the variable
    return None

  def contains(x: Fraction) -> bool:
    if any(abs(x - root) <= _EQUAL for root in roots):
      return _HOLDS[sign](0)
    return _HOLDS[sign](1 if value(x) > 0 else -1)

  return Region(tuple(roots), contains, name)


def _without_bars(relation: Relation) -> tuple[Node, str]:
  """Writes |u| < c, for a constant c that is not negative, as u² - c² < 0."""
  left, right = relation.difference.args[0], relation.difference.args[1].args[0]
  for bars, other, sign in (
    (left, right, relation.sign),
    (right, left, _FLIPPED[relation.sign]),
  ):
    if bars.kind == "fabs" and not names_in(other):
      try:
        is_negative = evaluate_at(other, {}) < 0
      except (UndefinedError, TypeError):
        break
      if not is_negative:
        squares = [
          Node("^", (node, Node("number", (Fraction(2),)))) for node in (bars.args[0], other)
        ]
        return Node("+", (squares[0], Node("-", (squares[1],)))), sign
  return relation.difference, relation.sign


def _real_roots(function: Callable[[Fraction], Fraction]) -> list[Fraction]:
  """The real roots of a polynomial of degree 1 to _MAX_DEGREE; [] if it has none, or is none."""
  coefficients = _interpolate(function)
  degree = len(coefficients) - 1
  if degree < 2:
    return [-coefficients[0] / coefficients[1]] if degree == 1 else []
  mp = _load_mpmath()
  with mp.workprec(300):
    rounded = [mp.mpf(c.numerator) / c.denominator for c in reversed(coefficients)]
    try:
      roots = mp.polyroots(rounded, maxsteps=100, extraprec=300)
    except mp.NoConvergence:  # a root occurs twice
      return []
    return [
      Fraction(int(mp.nint(root.real * _ROOT)), _ROOT) for root in roots if abs(root.imag) < 1e-25
    ]


def _interpolate(function: Callable[[Fraction], Fraction]) -> list[Fraction]:
  """Coefficients of a polynomial, the constant one first, by Newton's interpolation at integers.

  Returns:
    The coefficients; [] for a function that is no polynomial of at most _MAX_DEGREE.
  """
  table = [function(Fraction(x)) for x in range(_MAX_DEGREE + 4)]
  newton = []
  for order in range(len(table)):
    newton.append(table[0])
    table = [(b - a) / (order + 1) for a, b in itertools.pairwise(table)]
  while newton and abs(newton[-1]) < _EQUAL:
    newton.pop()
  if len(newton) > _MAX_DEGREE + 1:
    return []
  coefficients: list[Fraction] = []
  for order in range(len(newton) - 1, -1, -1):  # times (x - order), plus the next coefficient
    shifted = [Fraction(0), *coefficients]
    coefficients = [a - order * b for a, b in zip(shifted, [*coefficients, 0], strict=True)]
    coefficients[0] += newton[order]
  return coefficients
