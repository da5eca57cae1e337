"""The bound on what a formula costs, unread."""

import math
import time

import pytest

from rlvr_jax.rewards.formula_size import formula_size

INTERVALS = r"\cup".join(f"({i},{i + 1}]" for i in range(0, 180, 3))


@pytest.mark.parametrize(
  ("formula", "size"),
  [
    ("x", 1),
    ("123", 1),
    ("2x+3", 2),
    (r"(x-1)(x+2)(x^2+x+1)", 12),
    ("(x+y)^{4}", 5),  # monomials
    ("(x+y+z)^{2}", 6),
    (r"x^{2n}y", 2),
    (r"\frac{a}{b}", 1),
    (r"\frac{1}{x+1}", 6),
    (r"\sqrt{2}+\sqrt[3]{5}", 4),
    (r"\sin x\cos y+\cos x\sin y", 32),
    (r"\sin^2x", 10),
    (r"\log_2(x+1)", 8),
    ("x<2", 8),
    ("x^2-3x+2<0", 16),
    ("x^{30}-3x^{21}+x-1<0", 200),
    (r"(1,2)\cup(3,4)", 4),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 4),
    (r"|x|", 2),
    ("9^{9999}", 1),
    ("9^{99999}", math.inf),
    (r"(9^{9999})^{9999}=5", math.inf),
    ("9^{9^{9^{9}}}", math.inf),
    ("e^{e^{e^{99}}}", math.inf),
    (r"9^{99\cdot99\cdot99\cdot99}", math.inf),
    (r"2^{\binom{9999}{5000}}", math.inf),
    (r"\binom{10^9}{5\cdot10^8}", math.inf),
    ("99999!", math.inf),
    ("(n+2)!", 2),
    ("(n+99)!", math.inf),
    (r"\binom{n+1}{5}", 3),
    (r"\binom{1999}{n}", math.inf),
    (r"\binom{n}{99}", math.inf),
    (r"\sqrt{9^{9999}+1}", math.inf),
    ("(99!)!", math.inf),
    ("(" * 30 + "x" + ")" * 30, math.inf),
    ("", 1),
    (")x(", 1),
  ],
)
def test_size(formula, size):
  assert formula_size(formula) == pytest.approx(size)


@pytest.mark.parametrize(
  "formula",
  [
    "(x+y+z+w)^{99}",
    "((x+1)^{10}+1)^{10}",
    r"\sqrt{1+" * 20 + "x" + "}" * 20,
    r"\sin(" * 6 + "x" + ")" * 6,
    INTERVALS,
    "+".join(rf"\frac{{1}}{{x+{i}}}" for i in range(1, 20)),
    "+".join(rf"\sin({i}x)\cos({i}x)" for i in range(1, 13)),
    "+".join(f"x^{{{i}}}" for i in range(60)) + "<0",
    "".join(rf"(1+\sqrt{{{i}}})" for i in range(2, 12)),
    "|x+" * 8 + "1" + "|" * 8,
    "x^{20}-3x^{11}+x-1<0",
    r"\sqrt{x^{12}-3x+1}<x^5+1",
  ],
)
def test_what_takes_seconds_is_large(formula):
  assert formula_size(formula) > 100


@pytest.mark.parametrize("piece", r"( ) ^ \frac \sqrt[ \sin^ _ | ! 9".split())
def test_any_text_has_a_size_at_once(piece):
  began = time.process_time()
  for text in (piece * 1000, "x" + piece * 1000, (piece + "x") * 500, piece + "{", "é\0" + piece):
    assert formula_size(text) >= 0
  assert time.process_time() - began < 1
