r"""Exact values of numbers as mathematical answers write them: decimals, fractions, powers, roots.

The functions take text that `answers.strip_formatting` returned.
"""

from __future__ import annotations

import bisect
import re
from fractions import Fraction

from rlvr_jax.rewards.graders import DIGITS

_DECIMAL = rf"(?:{DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_TERM = rf"\{{\s?([+-]?\s?{_DECIMAL})\s?\}}"
_SIGN = r"([+-]?)\s?"
_PLAIN = re.compile(rf"{_SIGN}({_DECIMAL}(?:[eE][+-]?[0-9]{{1,3}})?)")
_QUOTIENT = re.compile(rf"{_SIGN}(?:\\frac\s?{_TERM}\s?{_TERM}|({_DECIMAL})\s?/\s?({_DECIMAL}))")
_SCIENTIFIC = re.compile(
  rf"{_SIGN}(?:({_DECIMAL})\s?(?:\\times|\\cdot|\*)\s?)?"
  r"10\s?\^\s?(?:([0-9]{1,3})|\{\s?([+-]?\s?[0-9]{1,3})\s?\})"
)
_MIXED = re.compile(rf"{_SIGN}([0-9]+)(?:\s?(?=\\frac)|\s)([^-].*)")
_PERIODIC = re.compile(rf"{_SIGN}([0-9]*)\.([0-9]*)\\(?:overline|bar)\s?\{{?([0-9]+)\}}?")
_POWER = re.compile(
  rf"{_SIGN}(?:({_DECIMAL})|\(\s?([^()]+)\s?\))\s?\^\s?(?:([0-9]+)|\{{\s?([+-]?\s?[0-9]+)\s?\}})"
)
_ROOT = re.compile(rf"{_SIGN}\\sqrt\s?(?:\[\s?([2-9])\s?\]\s?)?\{{(.+)\}}")
_MAX_POWER_BITS = 3300  # larger powers, of over 1000 digits, are not computed
_MAX_ROOT_BITS = 120  # roots of larger numbers are not computed


def parse_plain_number(text: str) -> Fraction | None:
  r"""The value of "-1,234.5", "3/4", r"\frac{3}{4}", "2 1/2", r"3\times10^8" …; None for others.

  One power or root of a plain number counts as one if it is rational: r"2^{10}", r"\sqrt{16}".
  """
  if match := _PLAIN.fullmatch(text):
    value = _decimal(match[2])
  elif match := _QUOTIENT.fullmatch(text):
    top, bottom = (_decimal(term) for term in match.groups()[1:] if term is not None)
    if not bottom:
      return None
    value = top / bottom
  elif match := _SCIENTIFIC.fullmatch(text):
    power = int((match[3] or match[4]).replace(" ", ""))
    value = _decimal(match[2] or "1") * Fraction(10) ** power
  elif (match := _MIXED.fullmatch(text)) and _QUOTIENT.fullmatch(match[3]):
    value = Fraction(match[2]) + (parse_plain_number(match[3]) or 0)
  elif match := _PERIODIC.fullmatch(text):
    _, integer, start, period = match.groups()
    ninths = 10 ** len(start) * (10 ** len(period) - 1)
    value = _decimal(f"{integer}.{start}0") + Fraction(int(period), ninths)
  elif (match := _POWER.fullmatch(text)) or (match := _ROOT.fullmatch(text)):
    computed = _power(match) if match.re is _POWER else _root(match)
    if computed is None:
      return None
    value = computed
  else:
    return None
  return -value if match[1] == "-" else value


def _power(match: re.Match[str]) -> Fraction | None:
  base = parse_plain_number(match[2] or match[3])
  exponent = int((match[4] or match[5]).replace(" ", ""))
  if base is None or (not base and exponent <= 0):
    return None
  bits = max(base.numerator.bit_length(), base.denominator.bit_length())
  return base**exponent if bits * abs(exponent) <= _MAX_POWER_BITS else None


def _root(match: re.Match[str]) -> Fraction | None:
  inside = parse_plain_number(match[3])
  if inside is None or inside < 0:
    return None
  degree, roots = int(match[2] or 2), []
  for integer in (inside.numerator, inside.denominator):
    if integer.bit_length() > _MAX_ROOT_BITS:
      return None
    candidates = range(2 << integer.bit_length() // degree)
    root = bisect.bisect_left(candidates, integer, key=lambda x: x**degree)
    if root**degree != integer:
      return None
    roots.append(root)
  return Fraction(*roots)


def _decimal(text: str) -> Fraction:
  return Fraction(re.sub(r"[,\s]", "", text).rstrip("."))
