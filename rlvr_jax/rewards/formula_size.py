r"""Estimates how large a LaTeX formula becomes when multiplied out, without evaluating it.

sympy evaluates and expands while it parses, so that a short text can take hours:
r"(9^{9999})^{9999}", r"(x+y+z+w)^{99}", or twenty nested sines. The estimate is a rough worst case:
a sum adds terms, a product multiplies them, a power expands, and a function or a root multiplies
the terms of its argument by a constant.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_MAX_DEPTH = 25  # of nested brackets
_MAX_DIGITS = 15_000  # of an intermediate number
_MAX_EXPONENT = 6  # digits; of binomials and factorials too …
_MAX_PRODUCT = 1.3  # … and of those with symbols: sympy writes n!/(n-20)! as a product
_MAX_ROOTED = 300  # digits of a number under a root, which sympy factorizes
_FUNCTION, _ROOT, _DENOMINATOR, _INEQUALITY = 4, 2, 3, 4  # cost relative to that of the argument
_SOLVED_DEGREE = 3  # up to this degree an inequality has a fixed cost; above, it grows with it

_OPEN, _CLOSE = "open", "close"
_TOKEN = re.compile(
  r"(?P<open>[(\[{]|\\\{|\\begin\s?\{\w+\})|(?P<close>[)\]}]|\\\}|\\end\s?\{\w+\})"
  r"|(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<sum>[-+=<>,;/&]|\\\\|\\(?:[lgn]eq|pm|mp|in)(?![A-Za-z]))"
  r"|(?P<sign>\\(?:cdot|times|cup|cap)(?![A-Za-z])|[*_|\s])|(?P<post>[\^!])"
  r"|(?P<name>\\[A-Za-z]+|\\.|.)",
  re.DOTALL,
)
_FRACTION = re.compile(r"\\[dtc]?frac")
_BINOMIAL = re.compile(r"\\[dt]?binom")
_FUNCTIONS = re.compile(
  r"\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|max|min|gcd|operatorname)"
)
_LOGARITHM = re.compile(r"\\(?:log|ln|lg)(?![A-Za-z])")
_UNEQUAL = re.compile(r"[<>]|\\[lgn]eq(?![A-Za-z])")
_CONSTANTS = ("e", r"\pi")


class _Size(NamedTuple):
  terms: float  # when multiplied out
  digits: float  # decimal logarithm of the largest intermediate number
  degree: float = 0  # upper bound, as a polynomial in all names

  @property
  def has_symbols(self) -> bool:
    return self.degree > 0


_ONE = _Size(1, 0)
_ENDLESS = _Size(math.inf, math.inf)


def formula_size(latex: str) -> float:
  """Rough upper bound on the terms of a formula when multiplied out; infinite for huge numbers.

  Args:
    latex: without significant spaces, \\left and \\right.
  """
  size = _size(latex)
  if size.digits > _MAX_DIGITS:
    return math.inf
  # Bars can be paired in this many ways; an inequality is solved by finding its roots.
  ways = 2.0 ** (latex.count("|") / 2)
  if _UNEQUAL.search(latex):
    ways *= _INEQUALITY * max(1, size.degree / _SOLVED_DEGREE)
  return size.terms * ways


def _size(latex: str) -> _Size:
  tokens = [(match.lastgroup or "", match[0]) for match in _TOKEN.finditer(latex)]
  depth = deepest = 0
  for kind, _ in tokens:
    depth = max(0, depth + (kind == _OPEN) - (kind == _CLOSE))
    deepest = max(deepest, depth)
  if deepest > _MAX_DEPTH:
    return _ENDLESS
  size, reader = _ONE, _Reader(tokens)
  try:
    while reader.left():  # what follows an unmatched closing bracket is another factor
      size = _product(size, reader.sum())
  except RecursionError:  # fractions of fractions without a bracket
    return _ENDLESS
  return size


def number_digits(latex: str) -> float:
  """Rough upper bound on the digits of the largest number in a formula."""
  return max(_size(latex).digits, len(latex))


def makes_huge_power(*formulas: str) -> bool:
  r"""Whether simplifying their difference may make a huge power: n·log(a) is written log(aⁿ)."""
  text = "+".join(f"({formula})" for formula in formulas)
  return bool(_LOGARITHM.search(text)) and _size(text).digits > _MAX_EXPONENT


def _product(a: _Size, b: _Size) -> _Size:
  return _Size(a.terms * b.terms, a.digits + b.digits, a.degree + b.degree)


def _sum(a: _Size, b: _Size) -> _Size:
  digits = max(a.digits, b.digits) + math.log10(2)
  return _Size(a.terms + b.terms, digits, max(a.degree, b.degree))


def _power(base: _Size, exponent: _Size) -> _Size:
  if exponent.digits > _MAX_EXPONENT or math.isinf(base.terms):
    return _ENDLESS
  times = round(10**exponent.digits)
  digits = base.digits * times
  if exponent.has_symbols:
    return _Size(_ROOT * base.terms * exponent.terms, digits, base.degree + exponent.degree)
  # The number of monomials of degree `times` in `base.terms` unknowns is a binomial coefficient.
  gammas = math.lgamma(base.terms + times), math.lgamma(times + 1), math.lgamma(base.terms)
  logarithm = gammas[0] - gammas[1] - gammas[2]
  return _Size(math.exp(logarithm), digits, base.degree * times) if logarithm < 99 else _ENDLESS


def _fraction(top: _Size, bottom: _Size) -> _Size:
  both = _sum(top, bottom)
  several = bottom.has_symbols and bottom.terms > 1
  terms = (both.terms - 1) * (_DENOMINATOR if several else 1)
  return both._replace(terms=terms, degree=top.degree + bottom.degree)


def _factorial(size: _Size) -> _Size:
  if size.digits > (_MAX_PRODUCT if size.has_symbols else _MAX_EXPONENT):
    return _ENDLESS
  return size._replace(digits=size.digits * 10**size.digits)


def _binomial(top: _Size, bottom: _Size) -> _Size:
  both = _sum(top, bottom)
  if both.digits > (_MAX_PRODUCT if both.has_symbols else _MAX_EXPONENT):
    return _ENDLESS
  return both._replace(digits=10**top.digits * math.log10(2))


class _Reader:
  """Reads tokens from left to right; treats all kinds of brackets alike."""

  def __init__(self, tokens: list[tuple[str, str]]):
    self._tokens, self._at = tokens, 0

  def left(self) -> bool:
    return self._at < len(self._tokens)

  def _next(self) -> tuple[str, str]:
    self._at += 1
    return self._tokens[self._at - 1] if self._at <= len(self._tokens) else (_CLOSE, "")

  def sum(self) -> _Size:
    """The size of all terms up to the closing bracket or the end."""
    total, product = None, _ONE
    while (token := self._next())[0] != _CLOSE:
      if token[0] == "sum":
        total, product = _sum(total, product) if total else product, _ONE
      else:
        product = _product(product, self._factor(*token))
    return _sum(total, product) if total else product

  def _factor(self, kind: str, text: str) -> _Size:
    size = self._atom(kind, text)
    while self.left() and self._tokens[self._at][0] == "post":
      size = _power(size, self._argument()) if self._next()[1] == "^" else _factorial(size)
    return size

  def _argument(self) -> _Size:
    return self._atom(*self._next())

  def _atom(self, kind: str, text: str) -> _Size:
    if kind == _OPEN:
      return self.sum()
    if kind == "number":
      return _Size(1, math.log10(max(int(text.replace(".", "")), 1)))
    if kind != "name":
      return _ONE
    if _FRACTION.fullmatch(text):
      return _fraction(self._argument(), self._argument())
    if _BINOMIAL.fullmatch(text):
      return _binomial(self._argument(), self._argument())
    if text == r"\sqrt":
      return self._root()
    if _FUNCTIONS.fullmatch(text):
      return self._function()
    return _Size(1, 0.5 if text in _CONSTANTS else 0, 1)

  def _root(self) -> _Size:
    if self.left() and self._tokens[self._at][1] == "[":
      self._argument()
    inside = self._argument()
    if inside.digits > _MAX_ROOTED:
      return _ENDLESS
    return inside._replace(terms=_ROOT * inside.terms, degree=_ROOT * inside.degree)

  def _function(self) -> _Size:
    """The size of a function, with its exponent and its base, applied to the next factor."""
    exponent = _ONE
    while self.left() and self._tokens[self._at][1] in ("^", "_"):
      found = self._argument() if self._next()[1] == "^" else self._argument()._replace(digits=0)
      exponent = _sum(exponent, found) if exponent is not _ONE else found
    inside = self._factor(*self._next()) if self.left() else _ONE
    return _power(inside._replace(terms=_FUNCTION * inside.terms), exponent)
