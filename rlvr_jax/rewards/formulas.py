r"""Formulas as trees: LaTeX or plain text → tree → value; equality by values.

Two formulas are equal if their values agree to about 30 digits, plus the digits of the longest
number or power in them. Formulas of constants are compared once, formulas with variables at several
points. Nothing is simplified or multiplied out, so that the number of operations grows only with
the length of the text.
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
_WITH_EXPONENT = re.compile(
  rf"[+-]?{_DECIMAL}[eE][+-]?[0-9]{{1,3}}"
)  # in a formula, e is a constant
_TOKEN = re.compile(
  r"\s*(?:(?P<periodic>(?P<start>[0-9]*\.[0-9]*)\\(?:overline|bar|dot)\s?\{?(?P<period>[0-9]+)\}?)"
  r"|(?P<mixed>(?<![\^_])[0-9]+(?: ?\\frac ?\{ ?[0-9]+ ?\} ?\{ ?0*[1-9][0-9]* ?\}"
  r"| [0-9]+ ?/ ?0*[1-9][0-9]*(?![0-9.])))"
  rf"|(?P<number>{_DECIMAL})"
  r"|(?P<derivative>\\frac\{d[a-z]\}\{d[a-z]\})|\\text\s?\{\s?(?P<word>[A-Za-z ]+?)\s?\}"
  r"|(?P<symbol>\\[A-Za-z]+|\\.|log(?![a-z])|.))",
  re.DOTALL,
)
# Evaluating one of these takes up to minutes, and may be what the problem asks for.
_UNEVALUATED = re.compile(
  r"\\(?:sum|prod|i{0,3}nt|oint|lim)(?![A-Za-z])"
  r"|\\frac\{(?:d|\\partial)(?![-+]|[A-Za-z]\})[^{}]*\}\{(?:d|\\partial) ?[A-Za-z]"
)
_MAX_DEPTH = 40  # of nested brackets, roots, powers …
_BRACKETS = {"(": ")", "[": "]", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_ROUNDING = {r"\lfloor": "floor", r"\lceil": "ceil"}
FUNCTIONS = (
  "sinh cosh tanh sin cos tan cot sec csc arcsin arccos arctan asin acos atan log ln lg exp"
).split()
_INVERTIBLE = "sin cos tan cot sec csc sinh cosh tanh".split()  # by an exponent of -1
_OF_REALS = ("factorial", "binomial", "floor", "ceil")
_GREEK = (
  "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho"
  " sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell pi infty"
).split()
_COMMANDS = {f"\\{name}" for name in ("frac", "binom", "sqrt", *FUNCTIONS, *_GREEK)}
_OPAQUE = "fgh"  # letters that are functions where a bracket follows, unless they occur bare too

_MAX_MAGNITUDE = 1200  # of the logarithm to base 2 of numbers that are evaluated
_MAX_CONSTANT = 8192  # the same limit without variables, if all operations are in _RATIONAL
_RATIONAL = ("+", "-", "*", "/", "^")  # other operations take seconds at that precision
_MAX_EXPONENT = 10**5  # of 2 in any number, such as a product of many
_PRECISION = 160  # bits, beside those of the magnitude
_MAX_GAMMA = 400  # bits; above it only integers have factorials, since others take seconds
_AGREE = 100  # bits
_POINTS, _ENOUGH = 16, 2  # points that are tried, and that must be in the domain of both formulas
_SCALES = (1, Fraction(1, 4), 6, Fraction(1, 20), 40, 2, Fraction(1, 8), 100)


class Node(NamedTuple):
  """A node of a formula: an operation on other nodes, a number (a Fraction), or a name."""

  kind: str
  args: tuple[Any, ...]


class UndefinedError(ArithmeticError):
  """A formula has no value at a point, or its value is too large or too small."""


class _SyntaxError(ValueError):
  """A text is no formula."""


def _number(value: Fraction | int) -> Node:
  return Node("number", (Fraction(value),))


_E = Node("constant", ("e",))
_ANY_BASE = Node("any base", ())
_BASES = {r"\log": _number(10), r"\lg": _number(10), "log": _ANY_BASE}  # log(x) may be ln x too


@functools.lru_cache(maxsize=1024)
def parse_formula(text: str) -> Node | None:
  """Parses a formula without relations; None if the text is not a formula that can be evaluated."""
  if _UNEVALUATED.search(text):
    return None
  try:
    reader = _Reader(text)
    node = reader.read()
    reader.expect("")
  except _SyntaxError:
    return None
  return node


class _Reader:
  """Parses tokens from left to right; `_depth` and `_bars` count open groups and open bars |."""

  def __init__(self, text: str):
    self._tokens = list(_TOKEN.finditer(text.strip()))[::-1]  # the next one is last
    self._depth = 0
    self._bars = 0

  def _peek(self) -> str:
    """The next symbol; "" before a number, a word, or the end."""
    return (self._tokens[-1]["symbol"] or "") if self._tokens else ""

  def _take(self, *symbols: str) -> str:
    """Takes and returns the next symbol if it is one of `symbols`; else returns ""."""
    symbol = self._peek()
    if not symbol or symbol not in symbols:
      return ""
    self._tokens.pop()
    return symbol

  def expect(self, symbol: str) -> None:
    """Takes `symbol`, or the end for ""; raises _SyntaxError if there is another token."""
    if self._take(symbol) != symbol or (not symbol and self._tokens):
      raise _SyntaxError(f"{symbol!r} is missing")

  def read(self, level: int = 0) -> Node:
    """Reads a formula up to an operator that binds no tighter than `level`.

    Level 1 has + and -, level 2 the signs of products and quotients, level 3 products without a
    sign, as in 2x or 2(x+1), and level 4 operators after a factor, such as "^".
    """
    if self._take("+"):
      return self.read(level)
    node = Node("-", (self.read(max(level, 2)),)) if self._take("-") else self._read_atom()
    while True:
      if level < 4 and (sign := self._take("^", "!", "°", "%", r"\%")):
        node = _power(node, self.read(4)) if sign == "^" else _apply_sign(node, sign)
      elif level < 3 and self._starts_factor():
        is_number = not self._peek()
        factor = self.read(3)
        if is_number and node.kind == factor.kind == "number":
          raise _SyntaxError("two numbers in a row")  # "7 2" is neither 72 nor 14
        node = Node("*", (node, factor))
      elif level < 2 and (sign := self._take("*", r"\cdot", r"\times", "/", r"\div")):
        node = Node("/" if sign in ("/", r"\div") else "*", (node, self.read(2)))
      elif level < 1 and (sign := self._take("+", "-")):
        term = self.read(1)
        node = Node("+", (node, Node("-", (term,)) if sign == "-" else term))
      else:
        return node

  def _starts_factor(self) -> bool:
    symbol = self._peek()
    if symbol == "|":
      return not self._bars
    known = symbol.isalpha() or symbol in _BRACKETS or symbol in _COMMANDS
    return known or bool(self._tokens and not symbol)

  def _read_atom(self) -> Node:
    """Reads a number, a name, a group in brackets, or a command with its arguments."""
    if not self._tokens:
      raise _SyntaxError("a factor is missing")
    self._depth += 1
    if self._depth > _MAX_DEPTH:
      raise _SyntaxError("nested too deeply")
    token = self._tokens.pop()
    symbol = token["symbol"]
    node = self._read_symbol(symbol) if symbol else self._read_token(token)
    self._depth -= 1
    return node

  def _read_token(self, token: re.Match[str]) -> Node:
    if word := token["word"] or token["derivative"]:
      return self._read_name(word)
    if token["mixed"]:
      whole, top, bottom = map(int, re.findall("[0-9]+", token["mixed"]))
      return _number(whole + Fraction(top, bottom))
    if token["periodic"]:
      decimals, period = token["start"].partition(".")[2], token["period"]
      ninths = 10 ** len(decimals) * (10 ** len(period) - 1)
      return _number(Fraction(f"0{token['start']}0") + Fraction(int(period), ninths))
    return _number(Fraction(token["number"].replace(",", "")))

  def _read_symbol(self, symbol: str) -> Node:
    if symbol in _BRACKETS:
      bars, self._bars = self._bars, 0
      inside = self.read()
      self.expect(_BRACKETS[symbol])
      self._bars = bars
      return Node(_ROUNDING[symbol], (inside,)) if symbol in _ROUNDING else inside
    if symbol == "|":
      self._bars += 1
      inside = self.read()
      self.expect("|")
      self._bars -= 1
      return Node("fabs", (inside,))
    if symbol in (r"\frac", r"\binom"):
      return Node("/" if symbol == r"\frac" else "binomial", (self._read_atom(), self._read_atom()))
    if symbol == r"\sqrt":
      degree = _number(2)
      if self._take("["):
        degree = self.read()
        self.expect("]")
      return Node("root", (self._read_atom(), degree))
    if symbol == "log" or symbol[1:] in FUNCTIONS:
      return self._read_function(symbol.removeprefix("\\"), _BASES.get(symbol, _E))
    if symbol.isalpha() or symbol in _COMMANDS:
      return self._read_name(symbol)
    raise _SyntaxError(f"{symbol!r} is not part of a formula")

  def _read_name(self, name: str) -> Node:
    while sign := self._take("_", "'"):
      name += sign + (str(self._read_atom()) if sign == "_" else "")
    if name[0] in _OPAQUE and self._peek() == "(":
      return Node("opaque", (name, self._read_atom()))
    return Node("constant" if name in ("e", "i", r"\pi", r"\infty") else "name", (name,))

  def _read_function(self, name: str, base: Node) -> Node:
    r"""Reads the exponent, the base and the argument after \sin or \log."""
    exponent = None
    while sign := self._take("^", "_"):
      if sign == "^":
        exponent = self.read(4)
      else:
        base = self._read_atom()
    if exponent == Node("-", (_number(1),)):
      if name not in _INVERTIBLE:
        raise _SyntaxError(f"an inverse of {name}")
      name, exponent = f"arc{name}", None
    inside = self._read_function_argument()
    if name in ("log", "ln", "lg"):
      node = Node("/", (Node("log", (inside,)), Node("log", (base,))))
    elif name == "exp":
      node = _power(_E, inside)
    else:
      node = Node(name.replace("arc", "a"), (inside,))
    return _power(node, exponent) if exponent else node

  def _read_function_argument(self) -> Node:
    r"""Reads (…), or factors up to the next function or bracket: \sin 2x\cos x."""
    if self._peek() in (*_BRACKETS, "|"):
      return self._read_atom()
    inside = self.read(3)
    while self._starts_factor() and not (
      self._peek() in _BRACKETS or self._peek()[1:] in FUNCTIONS
    ):
      inside = Node("*", (inside, self.read(3)))
    return inside


def _apply_sign(node: Node, sign: str) -> Node:
  if sign == "!":
    return Node("factorial", (node,))
  return Node("*", (node, Node("degree", ()) if sign == "°" else _number(Fraction(1, 100))))


def _power(base: Node, exponent: Node) -> Node:
  """base^exponent; for an exponent p/q with integers p and odd q, the p-th power of a real root."""
  if exponent.kind == "/" and all(map(_is_integer, exponent.args)):
    top, bottom = exponent.args
    if bottom.args[0] % 2:
      return Node("^", (Node("root", (base, bottom)), top))
  return Node("^", (base, exponent))


def _is_integer(node: Node) -> bool:
  return node.kind == "number" and node.args[0].denominator == 1


def plain_number(text: str) -> Fraction | None:
  r"""Parses a plain number: "-1,234.5", "3/4", r"\frac{3}{4}", "2 1/2", r"3\times10^8" …

  A single power or root of a number or a fraction is a plain number if it is rational: r"2^{10}"
  and r"\sqrt{16}" are plain numbers, "2^{3^2}" and "27^{2/3}" are not.

  Returns:
    The exact value; None if the text is not a plain number.
  """
  if _WITH_EXPONENT.fullmatch(text):
    return Fraction(text.replace(",", "").replace(".e", "e"))
  node = parse_formula(text) if re.search("[0-9]", text) else None
  return _plain_value(node) if node else None


def _plain_value(node: Node) -> Fraction | None:
  if node.kind == "number":
    return node.args[0]
  if node.kind in ("^", "root"):
    is_plain = _is_ratio(node.args[0]) and _is_literal(node.args[1])
  else:
    is_plain = node.kind == "-" or (node.kind in ("/", "*") and _is_literal(node.args[0]))
  if not is_plain:
    return None
  values = [_plain_value(part) for part in node.args]
  first, last = values[0], values[-1]
  if first is None or last is None:
    return None
  if node.kind == "-":
    return -first
  if node.kind == "/":
    return first / last if _is_literal(node.args[1]) and last else None
  if node.kind == "*":  # 3\times10^8
    power = node.args[1]
    is_scientific = power.kind == "^" and power.args[0] == _number(10)
    return first * last if is_scientific else None
  if last.denominator > 1 or not first:
    return None
  if node.kind == "root":
    return _exact_root(first, int(last))
  bits = max(first.numerator.bit_length(), first.denominator.bit_length())
  return first ** int(last) if bits * abs(last) <= _MAX_MAGNITUDE else None


def _is_literal(node: Node) -> bool:
  return node.kind == "number" or (node.kind == "-" and node.args[0].kind == "number")


def _is_ratio(node: Node) -> bool:
  """Whether a node is a number or a fraction of numbers, possibly with a sign."""
  inside = node.args[0] if node.kind == "-" else node
  return _is_literal(inside) or (inside.kind == "/" and all(map(_is_literal, inside.args)))


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
  """The root of a number if it is rational, else None."""
  if not 2 <= degree <= 9 or (value < 0 and degree % 2 == 0):
    return None
  mp = load_mpmath()
  with mp.workprec(_PRECISION + _MAX_MAGNITUDE):
    parts = abs(value.numerator), value.denominator
    root = Fraction(*(int(mp.nint(mp.root(part, degree))) for part in parts))
  root = -root if value < 0 else root
  return root if root**degree == value else None


def names_in(node: Node, kinds: tuple[str, ...] = ("name", "opaque")) -> frozenset[str]:
  """The names of a formula's variables, and of its functions such as f."""
  inside = [names_in(part, kinds) for part in node.args if isinstance(part, Node)]
  own = node.args[:1] if node.kind in kinds else ()
  return frozenset(own).union(*inside)


def _has_i(node: Node) -> bool:
  return node == Node("constant", ("i",)) or any(
    _has_i(part) for part in node.args if isinstance(part, Node)
  )


def _change(node: Node, change: Callable[[Node], Node]) -> Node:
  """The formula with each of its leaves replaced by `change(leaf)`."""
  if not any(isinstance(part, Node) for part in node.args):
    return change(node)
  parts = (_change(part, change) if isinstance(part, Node) else part for part in node.args)
  return Node(node.kind, tuple(parts))


def _lower(node: Node) -> Node:
  return Node("name", (node.args[0].lower(),)) if node.kind == "name" else node


def _as_factors(node: Node, names: frozenset[str]) -> Node:
  """Turns calls of functions with these names into products: h(a+b)^2 is h times (a+b)^2."""
  parts = [_as_factors(part, names) if isinstance(part, Node) else part for part in node.args]
  inside = node.args[0] if node.kind in ("^", "factorial") else node
  if inside.kind != "opaque" or inside.args[0] not in names:
    return Node(node.kind, tuple(parts))
  if inside is node:
    return Node("*", (Node("name", (parts[0],)), parts[1]))
  name, factor = parts[0].args
  return Node("*", (name, Node(node.kind, (factor, *parts[1:]))))


@functools.cache
def load_mpmath() -> Any:
  """Imports mpmath's context `mp`, with Python's integers; raises ImportError if it is missing."""
  # GMP aborts the process when memory runs out; Python's own integers raise MemoryError.
  os.environ.setdefault("MPMATH_NOGMPY", "1")
  try:
    import mpmath
  except ImportError as error:
    raise ImportError(
      'the mathematics grader needs mpmath: pip install "rlvr_jax[math]"'
    ) from error
  return mpmath.mp


class _Evaluator:
  """Evaluates formulas at one point; `magnitude`: bits of their longest number or power."""

  def __init__(self, values: Mapping[str, Fraction], *, is_real: bool):
    self._mp = load_mpmath()
    self._values = values
    self._is_real = is_real
    self.magnitude = 0

  def evaluate(self, node: Node) -> Any:
    """The value, mpf or mpc; raises UndefinedError if there is none."""
    mp = self._mp
    if node.kind in ("number", "name"):
      value = node.args[0] if node.kind == "number" else self._values[node.args[0]]
      self._note(max(value.numerator.bit_length(), value.denominator.bit_length()))
      return mp.mpf(value.numerator) / value.denominator
    if node.kind == "constant":
      if node.args[0] == r"\infty":
        raise UndefinedError("infinity is no number")
      return {"e": +mp.e, r"\pi": +mp.pi, "i": mp.mpc(0, 1)}[node.args[0]]
    if node.kind == "degree":
      return mp.pi / 180
    if node == _ANY_BASE:
      raise UndefinedError("a logarithm of unknown base")
    arguments = [self.evaluate(part) for part in node.args if isinstance(part, Node)]
    try:
      value = self._apply(node, arguments)
    except (ArithmeticError, TypeError, ValueError, mp.NoConvergence) as error:
      raise UndefinedError(str(error)) from error
    if not mp.isfinite(value) or (self._is_real and mp.im(value)):
      raise UndefinedError("the value is not finite, or not real")
    if value and abs(mp.mag(value)) > _MAX_EXPONENT:
      raise UndefinedError("a number is too large or too small")
    return value

  def _note(self, bits: Any) -> None:
    if abs(bits) > (_MAX_MAGNITUDE if self._values else _MAX_CONSTANT):
      raise UndefinedError("a number is too large or too small")
    self.magnitude = max(self.magnitude, math.ceil(abs(bits)))

  def _note_power(self, base: Any, exponent: Any) -> None:
    with self._mp.workprec(_PRECISION):
      self._note(exponent * self._mp.log(abs(base), 2))

  def _apply(self, node: Node, arguments: list[Any]) -> Any:
    mp = self._mp
    a, b = arguments[0], arguments[-1]
    if mp.prec > _PRECISION + 2 * _MAX_MAGNITUDE and (
      node.kind not in _RATIONAL or (node.kind == "^" and not mp.isint(b))
    ):
      raise UndefinedError("a number is too large or too small")
    if node.kind == "+":
      return a + b
    if node.kind == "-":
      return -a
    if node.kind == "*":
      return a * b
    if node.kind == "/":
      return a / (b if abs(b) > mp.mpf(2) ** (-mp.prec // 2) else 0)
    if node.kind == "root":
      if b.imag:
        raise UndefinedError("the degree of a root is not real")
      if a.imag == 0 and a.real < 0 and b.real % 2 == 1:
        return -mp.root(-a.real, int(b.real))
      if not a:
        return a
      self._note_power(a, 1 / b.real)
      return mp.power(a, 1 / b.real)
    if node.kind == "^":
      if not a:
        return a if mp.re(b) > 0 else 1 / a
      self._note_power(a, b.real)
      return mp.power(a, b)
    if node.kind == "opaque":  # any function that is not linear
      a = a * mp.mpf(self._values[node.args[0]].numerator) / 256 + 1
      self._note(max(0, mp.mag(a), abs(a.imag)))
      return mp.cos(a)
    if max(map(abs, arguments)) > _MAX_MAGNITUDE / 4 and node.kind not in ("log", "fabs", "floor"):
      raise UndefinedError("the argument of a function is too large")
    if node.kind in _OF_REALS:
      if any(argument.imag for argument in arguments):
        raise UndefinedError("the argument of a function is not real")
      arguments = [argument.real for argument in arguments]
    if node.kind in ("factorial", "binomial") and mp.prec > _MAX_GAMMA:
      arguments = [int(argument) if mp.isint(argument) else mp.nan for argument in arguments]
    value = getattr(mp, node.kind)(*arguments)
    if value:
      self._note(max(0, mp.mag(value)))
    if abs(value) > mp.mpf(2) ** (mp.prec // 2):
      raise UndefinedError("a pole")
    return value


def _evaluate_all(
  nodes: tuple[Node, ...], values: Mapping[str, Fraction], is_real: bool
) -> tuple[list[Any], int]:
  """The values of formulas at a point, None where undefined; and the precision used, in bits."""
  precision = _PRECISION
  while True:
    results: list[Any] = []
    magnitude = 0
    with load_mpmath().workprec(precision):
      for node in nodes:
        evaluator = _Evaluator(values, is_real=is_real)
        try:
          results.append(evaluator.evaluate(node))
        except UndefinedError:
          results.append(None)
        magnitude = max(magnitude, evaluator.magnitude)
    needed = _PRECISION + 2 * magnitude
    if needed <= precision + 32:
      return results, precision
    precision = needed


def evaluate_at(node: Node, values: Mapping[str, Fraction], *, is_real: bool = True) -> Fraction:
  """The real value of a formula at a point, to about 50 digits.

  Raises:
    UndefinedError: there is no real value, or it is too large or too small.
  """
  (value,), _ = _evaluate_all((node,), values, is_real)
  if value is None or value.imag:
    raise UndefinedError("there is no real value")
  sign, mantissa, exponent, _ = value.real._mpf_
  return Fraction(-mantissa if sign else mantissa) * Fraction(2) ** exponent


def evaluate_formula(text: str) -> Fraction | None:
  """The real value of a formula without variables; None for other formulas."""
  node = parse_formula(text)
  try:
    return None if node is None or names_in(node) else evaluate_at(node, {}, is_real=False)
  except UndefinedError:
    return None


def is_constant(text: str) -> bool:
  """Whether a text is a formula without variables."""
  node = parse_formula(text)
  return node is not None and not names_in(node)


def _points(names: frozenset[str], sign: str) -> Iterator[dict[str, Fraction]]:
  """Points at which formulas are compared; `sign`: "any", "positive" or "integer" (positive)."""
  for index in range(_POINTS):
    point = {}
    for name in sorted(names):
      draw = hashlib.sha256(f"{index} {name}".encode()).digest()
      # The denominator is even, so that powers of -1 have no real value there.
      value = Fraction(2 * draw[0] + 1, 256) * _SCALES[index % len(_SCALES)]
      if sign == "integer":
        value = Fraction(draw[0] % 9 + 1)
      point[name] = -value if sign == "any" and draw[1] % 2 else value
    yield point


def _values_agree(gold: Node, answer: Node, agree: Callable[[Any, Any, int], bool]) -> bool:
  """Whether `agree(gold value, answer value, bits of precision)` holds at all points.

  Points where the gold formula has no value do not count. Variables are real. R means r unless a
  formula has both, and h(a) means h·a if h also occurs as a variable. Points of any sign are tried
  first. If they do not decide because the gold formula has no value at some of them, as with roots
  and logarithms, positive points are tried, and then positive integers, as needed for (-1)^n.
  """
  names = [names_in(node) for node in (gold, answer)]
  if names[0] != names[1] and all(len({n.lower() for n in each}) == len(each) for each in names):
    gold, answer = _change(gold, _lower), _change(answer, _lower)
  if bare := names_in(gold, ("name",)) | names_in(answer, ("name",)):
    gold, answer = _as_factors(gold, bare), _as_factors(answer, bare)
  variables = names_in(gold) | names_in(answer)
  is_real = bool(variables) and not (_has_i(gold) or _has_i(answer))
  for sign in ("any", "positive", "integer"):
    defined = []
    for point in _points(variables, sign) if variables else [{}]:
      (a, b), precision = _evaluate_all((gold, answer), point, is_real)
      defined.append((a is not None, b is not None))
      if all(defined[-1]) and not agree(a, b, precision):
        return False
    if (True, False) not in defined and defined.count((True, True)) >= min(_ENOUGH, len(defined)):
      return True
    if all(a for a, _ in defined):
      break
  return False


def _agree(a: Any, b: Any, precision: int) -> bool:
  mp = load_mpmath()
  with mp.workprec(precision):
    bits = _AGREE + (precision - _PRECISION) // 2
    return bool(abs(a - b) <= mp.mpf(2) ** -bits * max(1, abs(a)))


def formulas_match(gold: str, answer: str) -> bool:
  """Whether two formulas are equal; False if a text is not a formula or has no value."""
  gold_node, node = parse_formula(gold), parse_formula(answer)
  if gold_node is None or node is None:
    return False
  if "log" not in re.sub(r"\\[A-Za-z]+", "", gold + answer):
    return _values_agree(gold_node, node, _agree)
  return any(
    _values_agree(_with_base(gold_node, base), _with_base(node, base), _agree)
    for base in (_E, _number(10))
  )


def _with_base(node: Node, base: Node) -> Node:
  """The formula with `base` for logarithms of unknown base, such as the plain text log(x)."""
  return _change(node, lambda leaf: base if leaf == _ANY_BASE else leaf)


def constant_ratio(gold: Node, answer: Node) -> Any:
  """The ratio of the second formula to the first, if it is constant; 0 otherwise."""
  mp = load_mpmath()
  ratios: list[Any] = []

  def agree(a: Any, b: Any, precision: int) -> bool:
    with mp.workprec(precision):
      if min(abs(a), abs(b)) < mp.mpf(2) ** -_AGREE:
        return False
      ratios.append(b / a)
    return _agree(ratios[0], ratios[-1], precision)

  return ratios[0] if _values_agree(gold, answer, agree) else 0
