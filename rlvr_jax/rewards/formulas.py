r"""Formulas as trees: LaTeX or plain text → tree → exact or numeric value; equality by values.

Formulas without variables are equal if their values agree: exactly where both are rational, else to
some 30 digits, beside those of the largest and the smallest number in them. Formulas of variables
are equal if their values agree at several points. Nothing is simplified or multiplied out, so that
the cost of a comparison grows with the length of the text alone.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from rlvr_jax.rewards.graders import DIGITS

_DECIMAL = rf"(?:{DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_TOKEN = re.compile(
  r"\s*(?:(?P<periodic>[0-9]*\.[0-9]*\\(?:overline|bar|dot)\s?(?:\{[0-9]+\}|[0-9]))"
  r"|(?P<mixed>[0-9]+ [0-9]+ ?/ ?[0-9]+(?![0-9.]))"
  rf"|(?P<number>{_DECIMAL}(?:[eE][+-]?[0-9]{{1,3}}(?![0-9A-Za-z.]))?)"
  r"|\\frac\{d(?P<of>[a-z])\}\{d(?P<by>[a-z])\}|\\text\s?\{\s?(?P<word>[A-Za-z ]+?)\s?\}"
  r"|(?P<symbol>\\[A-Za-z]+|\\.|.))",
  re.DOTALL,
)
# Evaluating these takes up to minutes, and may be the question itself.
_UNEVALUATED = re.compile(
  r"\\(?:sum|prod|i{0,3}nt|oint|lim)(?![A-Za-z])"
  r"|\\frac\{(?:d|\\partial)(?:(?![-+]|[A-Za-z]\})[^{}]*)\}\{(?:d|\\partial) ?[A-Za-z]"
)
_MAX_DEPTH = 40  # of nested brackets, roots, powers …
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor",
            r"\lceil": r"\rceil"}  # fmt: skip
FUNCTIONS = ("sinh cosh tanh sin cos tan cot sec csc arcsin arccos arctan log ln lg exp max min"
             " gcd lcm").split()  # fmt: skip
_FUNCTIONS = {f"\\{name}" for name in FUNCTIONS}
_GREEK = {
  f"\\{name}" for name in (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi"
    " rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
  ).split()
}  # fmt: skip
_TIMES, _OVER = ("*", r"\cdot", r"\times"), ("/", r"\div")
_OPAQUE = "fgh"  # letters that are functions where a bracket follows

_EXACT_BITS = 20_000  # larger rational numbers are not evaluated
_MAX_MAGNITUDE = 4000  # … nor real ones with a logarithm to base 2 beyond this
_PRECISION = 160  # bits, beside those of the magnitude
_AGREE = 100  # bits
_POINTS, _ENOUGH = 9, 3  # points that are tried, and that must be in the domain of both formulas
_SCALES = (1, 1, Fraction(1, 4), 6, 2, Fraction(1, 20), 40)


class Node(NamedTuple):
  """A node of a formula: an operation and its operands, a number or a name."""

  kind: str
  args: tuple[Any, ...]


class UndefinedError(ArithmeticError):
  """A formula has no value at a point, or one that is too large."""


class _SyntaxError(ValueError):
  """A text is no formula."""


@functools.lru_cache(maxsize=1024)
def parse_formula(text: str) -> Node | None:
  """Parses a formula without relations; None if the text is none, or has what is not evaluated."""
  if _UNEVALUATED.search(text):
    return None
  try:
    reader = _Reader(text)
    node = reader.read_sum()
    reader.expect("")
  except _SyntaxError:
    return None
  return node


class _Reader:
  """Reads tokens, (kind, text), from left to right."""

  def __init__(self, text: str):
    self._tokens: list[tuple[str, str]] = []
    for match in _TOKEN.finditer(text.strip()):
      kind = match.lastgroup or ""
      derivative = f"d{match['of']}/d{match['by']}"
      self._tokens.append(("word", derivative) if kind == "by" else (kind, match[kind]))
    self._depth = 0
    self._bars = 0  # open ones

  def _next(self) -> tuple[str, str]:
    return self._tokens[0] if self._tokens else ("", "")

  def _peek(self) -> str:
    kind, text = self._next()
    return text if kind == "symbol" else ""

  def _take(self, *symbols: str) -> str:
    """Takes the next token if it is one of these symbols; returns it, else ""."""
    if self._peek() in symbols and self._peek():
      return self._tokens.pop(0)[1]
    return ""

  def expect(self, symbol: str) -> None:
    """Takes a symbol, or "" for the end; raises if another token is next."""
    if symbol == self._next()[1]:
      del self._tokens[:1]
    else:
      raise _SyntaxError(f"{self._next()[1]!r} where {symbol!r} is expected")

  def read_sum(self) -> Node:
    """Reads terms up to a closing bracket, a comma, or the end."""
    total = self._read_product()
    while sign := self._take("+", "-"):
      term = self._read_product()
      total = Node("+", (total, Node("-", (term,)) if sign == "-" else term))
    return total

  def _read_product(self) -> Node:
    product = self._read_signed(self._read_factors)
    while sign := self._take(*_TIMES, *_OVER):
      factor = self._read_signed(self._read_factors)
      product = Node("/" if sign in _OVER else "*", (product, factor))
    return product

  def _read_signed(self, read: Callable[[], Node]) -> Node:
    negative = False
    while sign := self._take("+", "-"):
      negative ^= sign == "-"
    return Node("-", (read(),)) if negative else read()

  def _read_factors(self) -> Node:
    """Reads factors without a sign between them, as in 2x or 2(x+1), and mixed numbers."""
    product = self._read_factor()
    while self._starts_factor():
      is_number = self._next()[0] in ("number", "mixed", "periodic")
      if is_number and product.kind == "number":
        raise _SyntaxError("two numbers in a row")  # "7 2" is neither 72 nor 14
      is_fraction = self._peek() == r"\frac"
      factor = self._read_factor()
      if is_fraction and _is_integer(product) and all(map(_is_integer, factor.args)):
        product = Node("number", (product.args[0] + Fraction(*(a.args[0] for a in factor.args)),))
      else:
        product = Node("*", (product, factor))
    return product

  def _starts_factor(self) -> bool:
    kind, text = self._next()
    if kind != "symbol":
      return bool(kind)
    if text == "|":
      return not self._bars
    return text.isalpha() or text in _CLOSING or text in _ATOMS

  def _read_factor(self) -> Node:
    self._depth += 1
    if self._depth > _MAX_DEPTH:
      raise _SyntaxError("nested too deeply")
    node = self._read_atom()
    while sign := self._take("^", "!", "°", r"\%", "%"):
      if sign == "^":
        node = Node("^", (node, self._read_script()))
      elif sign == "!":
        node = Node("!", (node,))
      else:
        per = Node("degrees", ()) if sign == "°" else Node("number", (Fraction(1, 100),))
        node = Node("*", (node, per))
    self._depth -= 1
    return node

  def _read_script(self) -> Node:
    return self._read_signed(self._read_argument)

  def _read_argument(self) -> Node:
    """Reads what a command or "^" applies to: a group, or one symbol."""
    self._depth += 1
    if self._depth > _MAX_DEPTH:
      raise _SyntaxError("nested too deeply")
    node = self._read_atom()
    self._depth -= 1
    return node

  def _read_atom(self) -> Node:
    kind, text = self._next()
    if not kind:
      raise _SyntaxError("a factor is missing")
    del self._tokens[0]
    if kind in ("number", "mixed", "periodic"):
      return Node("number", (_read_number(kind, text),))
    if kind == "word":
      return self._read_name(text) if len(text) == 1 else Node("name", (text,))
    if text in _CLOSING:
      bars, self._bars = self._bars, 0
      inside = self.read_sum()
      self.expect(_CLOSING[text])
      self._bars = bars
      rounding = {r"\lfloor": "floor", r"\lceil": "ceil"}.get(text)
      return Node(rounding, (inside,)) if rounding else inside
    if text == "|":
      self._bars += 1
      inside = self.read_sum()
      self.expect("|")
      self._bars -= 1
      return Node("abs", (inside,))
    if text in (r"\frac", r"\binom"):
      arguments = (self._read_argument(), self._read_argument())
      return Node("/" if text == r"\frac" else "binom", arguments)
    if text == r"\sqrt":
      degree = Node("number", (Fraction(2),))
      if self._take("["):
        degree = self.read_sum()
        self.expect("]")
      return Node("root", (self._read_argument(), degree))
    if text in _FUNCTIONS:
      return self._read_function(text[1:])
    if text in (r"\pi", r"\infty"):
      return Node("constant", (text[1:],))
    if text.isalpha() or text in _GREEK:
      return self._read_name(text)
    raise _SyntaxError(f"{text!r} is not part of a formula")

  def _read_name(self, name: str) -> Node:
    while sign := self._take("_", "'"):
      name += sign
      if sign == "_":
        name += str(self._read_argument())
    if name[0] in _OPAQUE and self._peek() == "(":
      return Node("opaque", (name, self._read_atom()))
    return Node("constant" if name in ("e", "i") else "name", (name,))

  def _read_function(self, name: str) -> Node:
    base = exponent = None
    while sign := self._take("^", "_"):
      if sign == "^":
        exponent = self._read_script()
      else:
        base = self._read_argument()
    if name in ("max", "min", "gcd", "lcm"):
      closing = _CLOSING.get(self._take("(", r"\{", "{"), "")
      arguments = [self.read_sum()]
      while self._take(","):
        arguments.append(self.read_sum())
      self.expect(closing)
      return Node(name, tuple(arguments))
    if exponent == Node("-", (Node("number", (Fraction(1),)),)):
      name, exponent = f"arc{name}", None
    inside = self._read_function_argument()
    if name in ("log", "lg", "ln"):
      ten = Node("number", (Fraction(10),))
      default = ten if name == "lg" else Node("constant", ("e",))
      node = Node("log", (inside, base or default))
    elif name == "exp":
      node = Node("^", (Node("constant", ("e",)), inside))
    else:
      node = Node(name, (inside,))
    return Node("^", (node, exponent)) if exponent else node

  def _read_function_argument(self) -> Node:
    """Reads (…), or factors up to the next function or bracket: \\sin 2x\\cos x."""
    if self._peek() in _CLOSING or self._peek() == "|":
      return self._read_atom()
    inside = self._read_signed(self._read_factor)
    while self._starts_factor() and self._peek() not in (*_CLOSING, *_FUNCTIONS):
      inside = Node("*", (inside, self._read_factor()))
    return inside


_ATOMS = {r"\frac", r"\binom", r"\sqrt", r"\pi", r"\infty", *_FUNCTIONS, *_GREEK}


def _is_integer(node: Node) -> bool:
  return node.kind == "number" and node.args[0].denominator == 1


def _read_number(kind: str, text: str) -> Fraction:
  if kind == "mixed":
    whole, fraction = text.split(" ", 1)
    top, bottom = fraction.split("/")
    if not int(bottom):
      raise _SyntaxError("a zero below a fraction")
    return int(whole) + Fraction(int(top), int(bottom))
  if kind == "periodic":
    start, _, period = re.sub(r"[{}\s]|\\overline|\\bar|\\dot", "|", text, count=1).partition("|")
    period = re.sub("[^0-9]", "", period)
    decimals = start.partition(".")[2]
    ninths = 10 ** len(decimals) * (10 ** len(period) - 1)
    return Fraction(f"0{start}0") + Fraction(int(period), ninths)
  return Fraction(text.replace(",", "").replace(".e", "e").rstrip("."))


def plain_number(text: str) -> Fraction | None:
  r"""Parses a plain number: "-1,234.5", "3/4", r"\frac{3}{4}", "2 1/2", r"3\times10^8" …

  One power or root of a plain number is a plain number if it is rational: r"2^{10}", r"\sqrt{16}".

  Returns:
    The exact value; None if the text is not a plain number.
  """
  if not re.search("[0-9]", text):
    return None
  node = parse_formula(text)
  if node is None or not _is_plain(node):
    return None
  try:
    value = _Evaluator({}, is_real=True).evaluate(node)
  except UndefinedError:
    return None
  return value if isinstance(value, Fraction) else None


def _is_plain(node: Node) -> bool:
  if node.kind == "-":
    return _is_plain(node.args[0])
  if node.kind == "/":
    return all(map(_is_literal, node.args))
  if node.kind == "*":  # 3\times10^8
    power = node.args[1]
    ten = Node("number", (Fraction(10),))
    return (
      _is_literal(node.args[0]) and power.kind == "^" and power.args[0] == ten and _is_plain(power)
    )
  if node.kind in ("^", "root"):
    return _is_plain(node.args[0]) and _is_integer(_without_sign(node.args[1]))
  return node.kind == "number"


def _without_sign(node: Node) -> Node:
  return node.args[0] if node.kind == "-" else node


def _is_literal(node: Node) -> bool:
  return _without_sign(node).kind == "number"


def names_in(node: Node) -> frozenset[str]:
  """The variables of a formula."""
  if node.kind in ("name", "opaque"):
    inner = names_in(node.args[1]) if node.kind == "opaque" else frozenset()
    return inner | {node.args[0]}
  parts = (names_in(part) for part in node.args if isinstance(part, Node))
  return frozenset().union(*parts)


def _has_constant(node: Node, name: str) -> bool:
  return node == Node("constant", (name,)) or any(
    _has_constant(part, name) for part in node.args if isinstance(part, Node)
  )


@functools.cache
def _load_mpmath() -> Any:
  """Imports mpmath."""
  # GMP aborts the process when memory runs out; Python's own integers raise MemoryError.
  os.environ.setdefault("MPMATH_NOGMPY", "1")
  try:
    import mpmath
  except ImportError as error:
    raise ImportError(
      'the mathematics grader needs mpmath, a part of the extra math: pip install -e ".[math]"'
    ) from error
  return mpmath.mp


class _Evaluator:
  """Evaluates formulas at one point; notes how large and how small their numbers are."""

  def __init__(self, values: Mapping[str, Fraction], *, is_real: bool):
    self._values = values
    self._is_real = is_real
    self.magnitude = 0.0

  def evaluate(self, node: Node) -> Any:
    """The value: a Fraction where it is exact, else mpf or mpc; raises UndefinedError."""
    if node.kind == "number":
      self.magnitude = max(self.magnitude, min(_MAX_MAGNITUDE, _bits(node.args[0])))
      return node.args[0]
    if node.kind == "name":
      return self._values[node.args[0]]
    if node.kind == "constant":
      if node.args[0] == "infty":
        raise UndefinedError("infinity is not a value")
      mp = _load_mpmath()
      return {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1)}[node.args[0]]
    if node.kind == "degrees":
      return _load_mpmath().pi / 180
    if node.kind == "opaque":  # any function that is not linear
      argument = self._float(self.evaluate(node.args[1]))
      return _load_mpmath().cos(argument * self._float(self._values[node.args[0]]) + 1)
    arguments = [self.evaluate(part) for part in node.args]
    try:
      value = self._apply(node.kind, arguments)
    except (ZeroDivisionError, ValueError, OverflowError, TypeError) as error:
      raise UndefinedError(str(error)) from error
    self._note(value)
    return value

  def _note(self, value: Any) -> None:
    """Raises for a value that is too large; notes its magnitude."""
    if isinstance(value, Fraction):
      if _bits(value) > _EXACT_BITS:
        raise UndefinedError("the number is too large")
    elif not _load_mpmath().isfinite(value):
      raise UndefinedError("the value is not finite")

  def _float(self, value: Any) -> Any:
    """An exact value as mpf; others as they are."""
    if not isinstance(value, Fraction):
      return value
    self._note_magnitude(_bits(value))
    return _load_mpmath().mpf(value.numerator) / value.denominator

  def _note_magnitude(self, bits: float) -> None:
    if abs(bits) > _MAX_MAGNITUDE:
      raise UndefinedError("the number is too large or too small")
    self.magnitude = max(self.magnitude, abs(bits))

  def _apply(self, kind: str, arguments: list[Any]) -> Any:
    if kind in ("+", "-", "*", "/"):
      if not all(isinstance(argument, Fraction) for argument in arguments):
        arguments = [self._float(argument) for argument in arguments]
      if kind == "-":
        return -arguments[0]
      a, b = arguments
      return a + b if kind == "+" else a * b if kind == "*" else a / b
    if kind == "^":
      return self._power(*arguments)
    if kind == "root":
      return self._power(arguments[0], 1 / arguments[1])
    if kind == "abs":
      return abs(arguments[0])
    if kind in ("floor", "ceil"):
      value = arguments[0]
      return Fraction((math.floor if kind == "floor" else math.ceil)(value))
    if kind in ("!", "binom"):
      return self._combine(kind, arguments)
    if kind in ("max", "min"):
      return (max if kind == "max" else min)(arguments)
    if kind in ("gcd", "lcm"):
      function = math.gcd if kind == "gcd" else math.lcm
      return Fraction(function(*(_integer(argument) for argument in arguments)))
    return self._function(kind, [self._float(argument) for argument in arguments])

  def _power(self, base: Any, exponent: Any) -> Any:
    if not base:
      if exponent.real > 0 if not isinstance(exponent, Fraction) else exponent > 0:
        return Fraction(0)
      raise UndefinedError("a power of 0")
    if isinstance(exponent, Fraction):
      if exponent.denominator == 1 and isinstance(base, Fraction):
        if _bits(base) * abs(exponent) > _EXACT_BITS:
          raise UndefinedError("the power is too large")
        return base**exponent.numerator
      if isinstance(base, Fraction) and (root := _exact_root(base, exponent.denominator)):
        return self._power(root, Fraction(exponent.numerator))
      base = self._float(base)
      if (
        exponent.denominator % 2 and exponent.denominator > 1 and not _is_complex(base) and base < 0
      ):
        power = self._power(-base, exponent)
        return -power if exponent.numerator % 2 else power
    base, exponent = self._float(base), self._float(exponent)
    if self._is_real and not _is_complex(base) and base < 0 and not _is_whole(exponent):
      raise UndefinedError("an even root of a negative number")
    mp = _load_mpmath()
    bits = abs(mp.re(exponent)) * abs(mp.log(abs(base), 2))
    self._note_magnitude(float(bits) if bits < 10**9 else math.inf)
    return mp.power(base, exponent)

  def _combine(self, kind: str, arguments: list[Any]) -> Any:
    """A factorial or a binomial coefficient, exact for integers."""
    mp = _load_mpmath()
    if all(isinstance(argument, Fraction) and argument.denominator == 1 for argument in arguments):
      integers = [int(argument) for argument in arguments]
      if not all(0 <= integer <= 2000 for integer in integers):
        raise UndefinedError("a factorial of a large or a negative number")
      return Fraction((math.factorial if kind == "!" else math.comb)(*integers))
    floats = [self._float(argument) for argument in arguments]
    if any(abs(argument) > 300 for argument in floats):
      raise UndefinedError("a factorial of a large number")
    return mp.gamma(floats[0] + 1) if kind == "!" else mp.binomial(*floats)

  def _function(self, kind: str, arguments: list[Any]) -> Any:
    mp = _load_mpmath()
    value = arguments[0]
    if kind == "log":
      if any(self._is_real and not _is_complex(a) and a <= 0 for a in arguments):
        raise UndefinedError("a logarithm of a negative number")
      return mp.log(value) / mp.log(arguments[1])
    if kind in ("sinh", "cosh", "tanh") and abs(value) > _MAX_MAGNITUDE / 2:
      raise UndefinedError("the value is too large")
    if self._is_real and kind in ("arcsin", "arccos") and abs(value) > 1:
      raise UndefinedError(f"{kind} of a number beyond 1")
    result = getattr(mp, kind.replace("arc", "a"))(value)
    if abs(result) > mp.mpf(2) ** (mp.prec // 2):
      raise UndefinedError("a pole")
    return result


def _bits(value: Fraction) -> int:
  return max(value.numerator.bit_length(), value.denominator.bit_length())


def _is_complex(value: Any) -> bool:
  return hasattr(value, "imag") and bool(value.imag)


def _is_whole(value: Any) -> bool:
  return not _is_complex(value) and value == int(value)


def _integer(value: Any) -> int:
  if isinstance(value, Fraction) and value.denominator == 1:
    return int(value)
  raise UndefinedError("not an integer")


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
  """The real root of a rational number if it is rational, else None."""
  if degree > 64 or (value < 0 and degree % 2 == 0):
    return None
  roots = []
  for integer in (abs(value.numerator), value.denominator):
    root = _integer_root(integer, degree)
    if root**degree != integer:
      return None
    roots.append(root)
  return Fraction(*roots) * (-1 if value < 0 else 1)


def _integer_root(integer: int, degree: int) -> int:
  if degree == 2:
    return math.isqrt(integer)
  root = 1 << -(-integer.bit_length() // degree)  # not below the root; by Newton's method
  while True:
    smaller = ((degree - 1) * root + integer // root ** (degree - 1)) // degree
    if smaller >= root:
      return root
    root = smaller


def evaluate_at(node: Node, values: Mapping[str, Fraction], *, is_real: bool = True) -> Any:
  """The value at a point: a Fraction where it is exact, else a number of mpmath.

  Raises:
    UndefinedError: there is no value, or only one that is too large to be computed.
  """
  with _load_mpmath().workprec(_PRECISION):
    return _Evaluator(values, is_real=is_real).evaluate(node)


def _values(
  nodes: tuple[Node, ...], values: Mapping[str, Fraction], is_real: bool
) -> tuple[list[Any], int]:
  """Values at a point, None where there is none, and the bits of precision beside _AGREE."""
  mp = _load_mpmath()
  magnitude = 0
  while True:
    results: list[Any] = []
    seen = 0.0
    with mp.workprec(_PRECISION + 2 * magnitude):
      for node in nodes:
        evaluator = _Evaluator(values, is_real=is_real)
        try:
          results.append(evaluator.evaluate(node))
        except UndefinedError:
          results.append(None)
        seen = max(seen, evaluator.magnitude)
    if seen <= magnitude + 16:
      return results, magnitude
    magnitude = math.ceil(seen)


def _agree(a: Any, b: Any, magnitude: int) -> bool:
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    return a == b
  mp = _load_mpmath()
  with mp.workprec(_PRECISION + 2 * magnitude):
    a, b = (
      mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value
      for value in (a, b)
    )
    return bool(abs(a - b) <= mp.mpf(2) ** -(_AGREE + magnitude) * max(1, abs(a)))


def points(names: frozenset[str], sign: str) -> Iterator[dict[str, Fraction]]:
  """Points at which formulas are compared: the same for the same names.

  Args:
    names: variables.
    sign: "any", "positive" or "integer" (from 1).
  """
  for index in range(_POINTS):
    point = {}
    for name in sorted(names):
      draw = hashlib.sha256(f"{index} {name}".encode()).digest()
      # The denominator is even, so that powers of -1 have no real value there.
      value = Fraction(2 * draw[0] + 1, 256) * _SCALES[index % len(_SCALES)]
      if sign == "integer":
        value = Fraction(draw[0] % 9 + 1)
      elif sign == "any" and draw[1] % 2:
        value = -value
      point[name] = value
    yield point


def fold_case(*nodes: Node) -> tuple[Node, ...]:
  """Writes variables in lower case, unless two of a formula would become one: R is r."""
  names = [names_in(node) for node in nodes]
  if len(set(names)) == 1 or any(len({n.lower() for n in each}) < len(each) for each in names):
    return nodes
  return tuple(map(_lower, nodes))


def _lower(node: Node) -> Node:
  if node.kind == "name":
    return Node("name", (node.args[0].lower(),))
  return Node(node.kind, tuple(_lower(a) if isinstance(a, Node) else a for a in node.args))


def common_values(gold: Node, answer: Node) -> list[tuple[Any, Any, int]]:
  """Values of both formulas at points of the gold formula's domain; [] if they cannot be compared.

  Variables are real. They are positive only if each formula has no value at some other points, as
  roots and logarithms have none; then integers, as in (-1)^n.
  """
  names = names_in(gold) | names_in(answer)
  is_real = bool(names) and not any(_has_constant(node, "i") for node in (gold, answer))
  if not names:
    (a, b), magnitude = _values((gold, answer), {}, is_real)
    return [] if a is None or b is None else [(a, b, magnitude)]
  for sign in ("any", "positive", "integer"):
    found = [_values((gold, answer), point, is_real) for point in points(names, sign)]
    gold_fails = any(a is None for (a, _), _ in found)
    answer_is_narrower = any(a is not None and b is None for (a, b), _ in found)
    if answer_is_narrower and not gold_fails:
      return []
    pairs = [(a, b, bits) for (a, b), bits in found if a is not None and b is not None]
    if not answer_is_narrower and len(pairs) >= _ENOUGH:
      return pairs
  return []


def same_ratio(pairs: list[tuple[Any, Any, int]]) -> Any:
  """The constant ratio of the second values to the first ones; None if it varies, or is 0."""
  mp = _load_mpmath()
  bits = max((magnitude for *_, magnitude in pairs), default=0)
  with mp.workprec(_PRECISION + 2 * bits):
    floats = [(mp.convert(a), mp.convert(b)) for a, b, _ in pairs]
    tiny = mp.mpf(2) ** -(_AGREE + bits)
    if not floats or any(abs(a) < tiny or abs(b) < tiny for a, b in floats):
      return None
    ratios = [b / a for a, b in floats]
    return ratios[0] if all(_agree(ratios[0], ratio, bits) for ratio in ratios) else None


def formulas_match(gold: str, answer: str) -> bool:
  """Whether two formulas are equal; False if one is no formula or has no value."""
  nodes = parse_formula(gold), parse_formula(answer)
  if nodes[0] is None or nodes[1] is None:
    return False
  pairs = common_values(*fold_case(nodes[0], nodes[1]))
  return bool(pairs) and all(_agree(*pair) for pair in pairs)


def is_constant(text: str) -> bool:
  """Whether a text is a formula without variables."""
  node = parse_formula(text)
  return node is not None and not names_in(node)


def evaluate_formula(text: str) -> Any:
  """The real value of a formula without variables, a Fraction or mpf; None for other formulas."""
  node = parse_formula(text)
  if node is None or names_in(node):
    return None
  try:
    value = evaluate_at(node, {}, is_real=False)
  except UndefinedError:
    return None
  return None if _is_complex(value) else value.real if hasattr(value, "imag") else value
