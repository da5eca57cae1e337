"""Compares equations, inequalities, and the sets of real numbers that answers describe."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import NamedTuple

from rlvr_jax.rewards.answers import SET, Answer, parse_answer
from rlvr_jax.rewards.formulas import (
  Node,
  UndefinedError,
  constant_ratio,
  evaluate_at,
  evaluate_formula,
  load_mpmath,
  names_in,
  parse_formula,
)

_SIGN = re.compile(r"(\\[lgn]eq(?![A-Za-z])|[=<>])")
_FLIPPED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq", "=": "=", r"\neq": r"\neq"}
_HOLDS = {
  "<": operator.lt,
  ">": operator.gt,
  r"\leq": operator.le,
  r"\geq": operator.ge,
  r"\neq": operator.ne,
}
_MAX_DEGREE = 8  # of an inequality that is solved
_MAX_CONDITIONS = 20  # of an answer; each takes up to 0.1 s
_EQUAL = Fraction(1, 10**20)  # ends of intervals that differ by less are equal
_OPERATION = re.compile(r"\\(cup|cap|setminus)(?![A-Za-z])")


class Relation(NamedTuple):
  """The relation left - right < 0, or another sign in place of <."""

  difference: Node
  sign: str


class Region(NamedTuple):
  """A set of real numbers that is a finite union of intervals and points.

  Attributes:
    ends: the numbers at which membership may change.
    contains: number → whether the number is in the set.
    variable: the variable of the condition that describes the set; "" for an interval.
  """

  ends: tuple[Fraction, ...]
  contains: Callable[[Fraction], bool]
  variable: str = ""


def parse_relations(text: str) -> list[Relation] | None:
  """Parses "a < b", or a chain of relations such as "a < b < c".

  None if the text has no relation, or if a side is not a formula.
  """
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
  """Whether the relations of two chains, in any order, are equal up to constant factors."""
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
  ratio = constant_ratio(gold.difference, answer.difference)
  if not ratio:
    return False
  if gold.sign in ("=", r"\neq"):
    return answer.sign == gold.sign
  return ratio.imag == 0 and answer.sign == (gold.sign if ratio.real > 0 else _FLIPPED[gold.sign])


def _find_region(answer: Answer) -> Region | None:
  """The set of real numbers that an answer describes; None if no such set is found."""
  if answer.words or answer.unit or answer.choice:
    return None
  if answer.items:
    return _region_of_items(answer)
  if answer.number is not None:
    return _interval(answer.number, answer.number, "[]")._replace(variable=answer.name)
  if answer.value in (r"\mathbb{R}", r"\mathbb{R}^+"):
    return _interval(None if answer.value == r"\mathbb{R}" else Fraction(0), None, "()")
  if answer.is_condition:
    relations = parse_relations(answer.value)
    return _combine([_solve(relation) for relation in relations], all) if relations else None
  first, *others = _OPERATION.split(answer.value)
  region = _find_region(parse_answer(first)) if others else None
  for operation, text in zip(others[::2], others[1::2], strict=True):
    other = _find_region(parse_answer(text))
    if other and operation == "setminus":
      other = _complement(other)
    region = _combine([region, other], any if operation == "cup" else all)
  return region


def _region_of_items(answer: Answer) -> Region | None:
  if answer.brackets and answer.brackets != SET:
    if len(answer.items) != 2 or len(answer.brackets) != 2:
      return None
    low, high = (str(item) for item in answer.items)
    ends = evaluate_formula(low), evaluate_formula(high)
    is_interval = (ends[0] is not None or low == r"-\infty") and (
      ends[1] is not None or high == r"\infty"
    )
    return _interval(*ends, answer.brackets) if is_interval else None
  if len(answer.items) > _MAX_CONDITIONS:
    return None
  regions = [_find_region(item) for item in answer.items]
  if answer.joint or answer.brackets == SET:
    return _combine(regions, all if answer.joint == "and" else any)
  both = _combine(regions, all)  # "x > 1, x < 3" means "and"; "x < 1, x > 3" means "or"
  return both if both is None or any(_members(both, both.ends)) else _combine(regions, any)


def regions_match(gold: Answer, answer: Answer) -> bool | None:
  """Whether two answers are the same set of real numbers; None if an answer is not such a set.

  If both answers name their variable, the names must also be equal.
  """
  try:
    regions = [_find_region(gold), _find_region(answer)]
    found = [region for region in regions if region]
    if len(found) < 2:
      return None
    names = {region.variable.lower() for region in found} - {""}
    ends = (*found[0].ends, *found[1].ends)
    return len(names) < 2 and _members(found[0], ends) == _members(found[1], ends)
  except UndefinedError:
    return None


def _members(region: Region, ends: tuple[Fraction, ...]) -> list[bool]:
  """For a number below, at, between and above the ends, in order: whether it is in the region."""
  probes: list[Fraction] = []
  for end in sorted(ends):
    if not probes:
      probes = [end - 1, end]
    elif end - probes[-1] > _EQUAL:
      probes += [(probes[-1] + end) / 2, end]
  return [region.contains(probe) for probe in (*probes, probes[-1] + 1 if probes else Fraction(0))]


def _interval(low: Fraction | None, high: Fraction | None, brackets: str) -> Region:
  """The interval from `low` to `high`; an end that is None is infinite."""

  def contains(x: Fraction) -> bool:
    for end, is_inside in ((low, low is None or x > low), (high, high is None or x < high)):
      if end is not None and abs(x - end) <= _EQUAL:
        return brackets[0 if end == low else 1] in "[]"
      if not is_inside:
        return False
    return True

  return Region(tuple(end for end in (low, high) if end is not None), contains)


def _complement(region: Region) -> Region:
  return region._replace(contains=lambda x: not region.contains(x))


def _combine(regions: list[Region | None], join: Callable[[Iterable[bool]], bool]) -> Region | None:
  """The union (any) or intersection (all) of regions; None if one is None or variables differ."""
  found = [region for region in regions if region is not None]
  names = {region.variable.lower() for region in found} - {""}
  if len(found) < len(regions) or len(names) > 1:
    return None
  ends = tuple(end for region in found for end in region.ends)
  return Region(ends, lambda x: join(region.contains(x) for region in found), "".join(names))


def _solve(relation: Relation) -> Region | None:
  """The solutions of a polynomial inequality in one variable; None for any other relation."""
  names = names_in(relation.difference)
  if len(names) != 1 or relation.sign == "=":  # an equation is not solved
    return None
  (name,) = names
  node, sign = _without_bars(relation)
  if not _is_polynomial(node):
    return None
  try:
    roots = _real_roots(lambda x: evaluate_at(node, {name: x}))
  except UndefinedError:
    return None
  if not roots:  # it says nothing about the variable, or is not solved
    return None

  def contains(x: Fraction) -> bool:
    is_root = any(abs(x - root) <= _EQUAL for root in roots)
    return _HOLDS[sign](0 if is_root else evaluate_at(node, {name: x}), 0)

  return Region(tuple(roots), contains, name)


def _without_bars(relation: Relation) -> tuple[Node, str]:
  """Writes |u| < c, for a constant c that is not negative, as u² - c² < 0."""
  left, right = relation.difference.args[0], relation.difference.args[1].args[0]
  for bars, other, sign in ((left, right, relation.sign), (right, left, _FLIPPED[relation.sign])):
    if bars.kind == "fabs" and not names_in(other) and evaluate_at(other, {}) >= 0:
      squares = [Node("^", (node, Node("number", (Fraction(2),)))) for node in (*bars.args, other)]
      return Node("+", (squares[0], Node("-", (squares[1],)))), sign
  return relation.difference, relation.sign


def _is_polynomial(node: Node) -> bool:
  if node.kind in ("name", "+", "-", "*"):
    return all(_is_polynomial(part) for part in node.args if isinstance(part, Node))
  has_names = [bool(names_in(part)) for part in node.args if isinstance(part, Node)]
  if node.kind in ("^", "/") and has_names == [True, False]:
    return _is_polynomial(node.args[0])
  return not any(has_names)


def _real_roots(function: Callable[[Fraction], Fraction]) -> list[Fraction]:
  """The real roots of a polynomial of degree 1 to _MAX_DEGREE; [] if it has none.

  [] also if there is a double root, which is found too inexactly to distinguish < from ≤.
  """
  # Newton's interpolation at 0, 1, 2 …; then the coefficients, the constant term first.
  table = [function(Fraction(x)) for x in range(_MAX_DEGREE + 2)]
  newton = []
  for order in range(len(table)):
    newton.append(table[0])
    table = [(b - a) / (order + 1) for a, b in itertools.pairwise(table)]
  while newton and abs(newton[-1]) < _EQUAL:
    newton.pop()
  if not 2 <= len(newton) <= _MAX_DEGREE + 1:
    return []
  coefficients: list[Fraction] = []
  for order in range(len(newton) - 1, -1, -1):  # times (x - order), plus the next one of Newton's
    lower, same = [newton[order], *coefficients], [*coefficients, Fraction(0)]
    coefficients = [a - order * b for a, b in zip(lower, same, strict=True)]
  mp = load_mpmath()
  with mp.workprec(300):
    floats = [mp.mpf(c.numerator) / c.denominator for c in reversed(coefficients)]
    try:
      roots = mp.polyroots(floats, maxsteps=100, extraprec=300)
    except mp.NoConvergence:
      return []
    if any(0 < abs(root.imag) < 1e-9 for root in roots):
      return []
    scale = 10**40
    return [Fraction(int(mp.nint(r.real * scale)), scale) for r in roots if not r.imag]
