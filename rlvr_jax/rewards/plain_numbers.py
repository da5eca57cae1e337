r"""Exact values of numbers as mathematical answers write them: decimals, fractions, powers, roots.

The functions take text from `answers.strip_formatting`.
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
_MAX_POWER_BITS = 3300  # larger powers, of over 1000 digits, are not evaluated
_MAX_ROOT_BITS = 120  # roots of larger numbers are not evaluated


def parse_plain_number(text: str) -> Fraction | None:
  r"""Parses a plain number: "-1,234.5", "3/4", r"\frac{3}{4}", "2 1/2", r"3\times10^8" …

  One power or root of a plain number is a plain number if it is rational: r"2^{10}", r"\sqrt{16}".

  Returns:
    The exact value; None if the text is not a plain number.
  """
  if match := _PLAIN.fullmatch(text):
    value = _parse_decimal(match[2])
  elif match := _QUOTIENT.fullmatch(text):
    top, bottom = (_parse_decimal(term) for term in match.groups()[1:] if term is not None)
    if not bottom:
      return None
    value = top / bottom
  elif match := _SCIENTIFIC.fullmatch(text):
    power = int((match[3] or match[4]).replace(" ", ""))
    value = _parse_decimal(match[2] or "1") * Fraction(10) ** power
  elif (match := _MIXED.fullmatch(text)) and _QUOTIENT.fullmatch(match[3]):
    value = Fraction(match[2]) + (parse_plain_number(match[3]) or 0)
  elif match := _PERIODIC.fullmatch(text):
    _, integer, start, period = match.groups()
    ninths = 10 ** len(start) * (10 ** len(period) - 1)
    value = _parse_decimal(f"{integer}.{start}0") + Fraction(int(period), ninths)
  elif (match := _POWER.fullmatch(text)) or (match := _ROOT.fullmatch(text)):
    power_or_root = _parse_power(match) if match.re is _POWER else _parse_root(match)
    if power_or_root is None:
      return None
    value = power_or_root
  else:
    return None
  return -value if match[1] == "-" else value


def _parse_power(match: re.Match[str]) -> Fraction | None:
  base = parse_plain_number(match[2] or match[3])
  exponent = int((match[4] or match[5]).replace(" ", ""))
  if base is None or (not base and exponent <= 0):
    return None
  bits = max(base.numerator.bit_length(), base.denominator.bit_length())
  return base**exponent if bits * abs(exponent) <= _MAX_POWER_BITS else None


def _parse_root(match: re.Match[str]) -> Fraction | None:
  radicand = parse_plain_number(match[3])
  if radicand is None or radicand < 0:
    return None
  degree = int(match[2] or 2)
  roots = []
  for integer in (radicand.numerator, radicand.denominator):
    if integer.bit_length() > _MAX_ROOT_BITS:
      return None
    candidates = range(2 << integer.bit_length() // degree)
    root = bisect.bisect_left(candidates, integer, key=lambda x: x**degree)
    if root**degree != integer:
      return None
    roots.append(root)
  return Fraction(*roots)


def _parse_decimal(text: str) -> Fraction:
  return Fraction(re.sub(r"[,\s]", "", text).rstrip("."))
