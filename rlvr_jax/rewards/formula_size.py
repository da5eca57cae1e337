r"""Estimates how large a LaTeX formula becomes when multiplied out, without evaluating it.

sympy evaluates and expands while it parses, so a short text can take hours:
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
_MAX_EXPONENT = 6  # digits of an exponent, and of a binomial or factorial without symbols
_MAX_PRODUCT = 1.3  # digits of one with symbols: sympy writes n!/(n-20)! as a product
_MAX_ROOTED = 300  # digits of a number under a root, which sympy factorizes
_FUNCTION, _ROOT, _DENOMINATOR, _INEQUALITY = 4, 2, 3, 4  # cost relative to that of the argument
_SOLVED_DEGREE = 3  # up to this degree an inequality has a fixed cost; above, a proportional one

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
  """Upper bounds on the size of a formula."""

  terms: float  # when multiplied out
  digits: float  # decimal logarithm of the largest intermediate number
  degree: float = 0  # as a polynomial in all names

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
  size = _estimate_size(latex)
  if size.digits > _MAX_DIGITS:
    return math.inf
  # Bars can be paired in this many ways; an inequality is solved by finding its roots.
  ways = 2.0 ** (latex.count("|") / 2)
  if _UNEQUAL.search(latex):
    ways *= _INEQUALITY * max(1, size.degree / _SOLVED_DEGREE)
  return size.terms * ways


def _estimate_size(latex: str) -> _Size:
  """Estimates the size of a formula; infinite if it is nested too deeply."""
  tokens = [(match.lastgroup or "", match[0]) for match in _TOKEN.finditer(latex)]
  depth = deepest = 0
  for kind, _ in tokens:
    depth = max(0, depth + (kind == _OPEN) - (kind == _CLOSE))
    deepest = max(deepest, depth)
  if deepest > _MAX_DEPTH:
    return _ENDLESS
  size = _ONE
  reader = _Reader(tokens)
  try:
    while reader.has_tokens():  # text after an unmatched closing bracket is another factor
      size = _product(size, reader.read_sum())
  except RecursionError:  # fractions of fractions without a bracket
    return _ENDLESS
  return size


def number_digits(latex: str) -> float:
  """Rough upper bound on the digits of the largest number in a formula."""
  return max(_estimate_size(latex).digits, len(latex))


def makes_huge_power(*formulas: str) -> bool:
  r"""Whether simplifying their difference may make a huge power, as n·log(a) becomes log(aⁿ)."""
  text = "+".join(f"({formula})" for formula in formulas)
  return bool(_LOGARITHM.search(text)) and _estimate_size(text).digits > _MAX_EXPONENT


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
  total = _sum(top, bottom)
  has_sum_below = bottom.has_symbols and bottom.terms > 1
  terms = (total.terms - 1) * (_DENOMINATOR if has_sum_below else 1)
  return total._replace(terms=terms, degree=top.degree + bottom.degree)


def _factorial(size: _Size) -> _Size:
  if size.digits > (_MAX_PRODUCT if size.has_symbols else _MAX_EXPONENT):
    return _ENDLESS
  return size._replace(digits=size.digits * 10**size.digits)


def _binomial(top: _Size, bottom: _Size) -> _Size:
  total = _sum(top, bottom)
  if total.digits > (_MAX_PRODUCT if total.has_symbols else _MAX_EXPONENT):
    return _ENDLESS
  return total._replace(digits=10**top.digits * math.log10(2))


class _Reader:
  """Reads tokens, (kind, text), from left to right; treats all kinds of brackets alike."""

  def __init__(self, tokens: list[tuple[str, str]]):
    self._tokens = tokens
    self._position = 0

  def has_tokens(self) -> bool:
    return self._position < len(self._tokens)

  def _read_token(self) -> tuple[str, str]:
    self._position += 1
    return self._tokens[self._position - 1] if self._position <= len(self._tokens) else (_CLOSE, "")

  def read_sum(self) -> _Size:
    """Reads all terms up to the closing bracket or the end; returns the size of their sum."""
    total = None
    product = _ONE
    while (token := self._read_token())[0] != _CLOSE:
      if token[0] == "sum":
        total, product = _sum(total, product) if total else product, _ONE
      else:
        product = _product(product, self._read_factor(*token))
    return _sum(total, product) if total else product

  def _read_factor(self, kind: str, text: str) -> _Size:
    size = self._read_atom(kind, text)
    while self.has_tokens() and self._tokens[self._position][0] == "post":
      is_power = self._read_token()[1] == "^"
      size = _power(size, self._read_argument()) if is_power else _factorial(size)
    return size

  def _read_argument(self) -> _Size:
    return self._read_atom(*self._read_token())

  def _read_atom(self, kind: str, text: str) -> _Size:
    if kind == _OPEN:
      return self.read_sum()
    if kind == "number":
      return _Size(1, math.log10(max(int(text.replace(".", "")), 1)))
    if kind != "name":
      return _ONE
    if _FRACTION.fullmatch(text):
      return _fraction(self._read_argument(), self._read_argument())
    if _BINOMIAL.fullmatch(text):
      return _binomial(self._read_argument(), self._read_argument())
    if text == r"\sqrt":
      return self._read_root()
    if _FUNCTIONS.fullmatch(text):
      return self._read_function()
    return _Size(1, 0.5 if text in _CONSTANTS else 0, 1)

  def _read_root(self) -> _Size:
    if self.has_tokens() and self._tokens[self._position][1] == "[":
      self._read_argument()
    inside = self._read_argument()
    if inside.digits > _MAX_ROOTED:
      return _ENDLESS
    return inside._replace(terms=_ROOT * inside.terms, degree=_ROOT * inside.degree)

  def _read_function(self) -> _Size:
    """Reads a function's exponent, base and next factor; returns the size of the application."""
    exponent = _ONE
    while self.has_tokens() and self._tokens[self._position][1] in ("^", "_"):
      is_exponent = self._read_token()[1] == "^"
      size = self._read_argument()
      size = size if is_exponent else size._replace(digits=0)
      exponent = _sum(exponent, size) if exponent is not _ONE else size
    inside = self._read_factor(*self._read_token()) if self.has_tokens() else _ONE
    return _power(inside._replace(terms=_FUNCTION * inside.terms), exponent)
