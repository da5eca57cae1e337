"""The mathematics grader: extraction, normal forms, equality, and completions that mean harm."""

import inspect
import json
import os
import pathlib
import random
import sys

import pytest

from rlvr_jax.rewards import GraderPool, Outcome
from rlvr_jax.rewards.answers import parse_answer
from rlvr_jax.rewards.extraction import MAX_ANSWER, extract_answer
from rlvr_jax.rewards.graders import gsm8k
from rlvr_jax.rewards.mathematics import mathematics, mathematics_self_test

LIMIT_S = 2.0
PATH = "mathematics"

# gold | answer | = or !
PAIRS = r"""
# numbers
5 | 5 | =
5 | 5.0 | =
5 | 05 | =
5 | +5 | =
-5 | - 5 | =
5 | -5 | !
0 | -0 | =
1234 | 1,234 | =
1,234,567 | 1234567 | =
1234 | 1{,}234 | =
10000 | 10\,000 | =
10000 | 10,\!000 | =
1/2 | 0.5 | =
\frac{1}{2} | 1/2 | =
\frac12 | \dfrac{1}{2} | =
\frac{2}{4} | \frac{1}{2} | =
\frac{-1}{2} | -\frac{1}{2} | =
\frac{1}{3} | 0.333333 | =
\frac{1}{3} | 0.33 | !
0.0000001 | 0 | !
3.14 | 3.1400 | =
3.14 | 3.15 | !
2\frac{1}{2} | 2.5 | =
2\frac12 | \frac52 | =
2 1/2 | 5/2 | =
-2\frac{1}{2} | -\frac{5}{2} | =
2\frac{1}{2} | 1 | !
0.\overline{3} | \frac{1}{3} | =
0.1\overline{6} | 1/6 | =
0.\overline{12} | 0.\overline{13} | !
1.2e-3 | 0.0012 | =
1.2\times10^{-3} | 1.2e-03 | =
10^3 | 1000 | =
10^{-3} | 0.001 | =
3\times 10^8 | 300000000 | =
2^{10} | 1024 | =
2^{10} | 1025 | !
123456789012345678901234567890 | 123456789012345678901234567891 | !
5! | 120 | =
\binom{5}{2} | 10 | =
101_2 | 101_{2} | =
101_2 | 101 | !
101 | 101_2 | =
11_2 | 11 | !
11_2 | 3 | !
101_2 | 101_3 | !
3:2 | 3:2 | =
3:2 | 2:3 | !
\sqrt{4} | 2 | =
300000000 | 3\times 10^8 | =
0.0012 | 1.2\cdot10^{-3} | =
-1500 | -1.5*10^{3} | =
1000 | 10^3 | =
5 | \frac{-10}{-2} | =
0.333 | 0.333\ldots | =
3 | 3^\text{rd} | =
21 | 21^{st} | =
22 | 22nd | =
4 | 4^{\text{th}} | =
4 | 5^{\text{th}} | !
5 | ５ | =
-12.5 | －１２．５ | =
(1,2) | （１，２） | =
# powers and roots
1024 | 2^{10} | =
1024 | 2^10 | =
1024 | 2^{11} | !
1/8 | 2^{-3} | =
\frac{8}{27} | \left(\frac{2}{3}\right)^3 | =
4 | (-2)^2 | =
4 | -2^2 | !
4 | \sqrt{16} | =
-4 | -\sqrt{16} | =
3 | \sqrt[3]{27} | =
\frac{1}{2} | \sqrt{\frac{1}{4}} | =
5 | \sqrt{25} | =
\sqrt{4},3 | 2, 3 | =
\sqrt{2} | \sqrt{3} | !
2^{9999} | 2^{9999} | =
0 | 0^{-1} | !
# no number but the way to one
391 | 17\cdot 23 | !
391 | 17 \times 23 | !
391 | x = 17*23 | !
391 | (17)(23) | !
391 | 17\cdot 23 = 391 | =
391 | 17\cdot 24 = 391 | !
391\text{ cm} | 17\cdot 23\text{ cm} | !
391,2 | 17\cdot 23, 2 | !
5 | 2+3 | !
5 | 7-2 | !
5 | 6=5 | !
5 | 2+3=6 | !
5 | m+n=5 | =
5 | m+n=6 | !
5 | x \approx 5 | =
5 | 5 \mod 7 | !
5 | \sqrt{26} | !
5 | \sqrt{16}+1 | !
8 | 2^{10}/2^{7} | !
5 | \lfloor 5.5 \rfloor | !
5 | 5,5 | !
5050 | \sum_{n=1}^{100} n | !
5040 | \prod_{n=1}^{7} n | !
120 | \binom{10}{3} | !
3628800 | 10! | !
3 | \log_2 8 | !
6 | \gcd(12, 18) | !
\frac{1}{2} | \int_0^1 x dx | !
\frac{17}{23} | \frac{17}{23} | =
\frac{\pi}{2} | \int_{-1}^1 \sqrt{1-x^2} dx | !
\sqrt{2} | \lim_{x\to 2} \sqrt{x} | !
\sum_{k=1}^n k | \sum_{k=1}^{n} k | =
\sum_{k=1}^n k | \sum_{j=1}^{n} j | !
\int x dx | \int e^{x^2}\sin(x^3)\ln(x) dx | !
\int x dx | \int x\,dx | =
2x | \frac{d}{dx}(x^2) | !
2x | \frac{d(x^2)}{dx} | !
2x | \frac{\mathrm{d}}{\mathrm{d}x}x^2 | !
\frac{dy}{dx} = 2x | 2x=\frac{dy}{dx} | =
\frac{d}{x+1} | \frac{d}{1+x} | =
\frac{dy}{dx} = 2x | \frac{dy}{dx}=2x | =
# money, percent, units, degrees
18 | $18 | =
18 | \$18.00 | =
-5 | -\$5 | =
1000 | \$1,000 | =
50 | 50\% | =
50\% | 50 | =
50\% | 0.5 | =
0.5 | 50\% | =
50\% | \frac12 | =
50\% | 5 | !
50\% | 60\% | !
0.05 | 0.05\% | !
0.05 | 5\% | =
0.5\% | 0.5 | =
12.5 | 12.5\% | =
5 | 500\% | =
5 | 5\% | =
12 | 12 apples | =
12 | 12 \text{ apples} | =
5 \text{ cm} | 5 | =
5 \text{ cm} | 5 centimeters | =
5 \text{ cm} | 5\text{ m} | !
5 cm | 5 kg | !
5 | 5\text{ cm} | =
5 \text{ cm} | 6 \text{ cm} | !
12 \text{ cm}^2 | 12 square centimeters | =
12 \text{ cm}^2 | 12 \text{ cm} | !
60 \text{ miles per hour} | 60 mi/h | =
2\sqrt{3}\text{ cm} | 2\sqrt{3} | =
2\sqrt{3} | \sqrt{12}\text{ cm} | =
90^\circ | 90 | =
90 | 90^{\circ} | =
90 | 90 degrees | =
90^\circ | 45^\circ | !
5m | 5 | !
16\sqrt{2} | 16\sqrt{2}\text{ units} | =
16\sqrt{2} | 16\sqrt{2}\text{ square units} | =
16\sqrt{2} | 16\sqrt{2}\text{ units}^2 | =
16\sqrt{2} | 16\sqrt{2}\text{ dollars} | =
16\sqrt2\text{ square units} | 16\sqrt{2} | =
9\pi | 9\pi\text{ sq. units} | =
9 | 9 sq. units | =
2\sqrt{5} | 2\sqrt{5} meters | =
12\pi | 12\pi\, cm^3 | =
12\pi\text{ cm}^3 | 12\pi m^3 | !
5\text{ cm} | 5\text{ units} | =
# words that change a number
5 | 5 \text{ million} | !
5 | 5 hundred | !
5 | 5\text{ squared} | !
25 | 25 units squared | =
5 | 5 factorial | !
5 | 5 minus three | !
5 | 5\text{ plus six} | !
3 | 3 over four | !
6 | 6\text{ hundredths} | !
6 | 6 fourth graders | =
6 | 6 times | =
6 | 6 one-dollar bills | =
4\text{ billion} | 4\text{ million} | !
4\text{ billion} | 4000 million dollars | =
5000000 | 5\text{ million} | =
5\text{ million} | 5,000,000\text{ people} | =
5\text{ million} | 5 | !
2\sqrt{3} | 2\sqrt{3}\text{ million} | !
# bases
11_{\text{two}} | 11 | !
11_{\text{two}} | 11_2 | =
101_2 | 101_{\text{two}} | =
1011_2 | (1011)_2 | =
1011_2 | 1011_{(2)} | =
1011_2 | 1011_{two} | =
1011_2 | 1011_{three} | !
1011_2 | 1011\text{ base two} | =
5m | 5m | =
# formulas
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt{2}} | =
\sqrt2 | \sqrt{2} | =
\sqrt{2} | 1.414 | !
\frac{\pi}{4} | \pi/4 | =
2\pi r | 2 r \pi | =
x+1 | 1+x | =
x^2-1 | (x-1)(x+1) | =
x^2-1 | (x-1)^2 | !
(x+1)^2 | x^2+2x+1 | =
\frac{x}{2} | 0.5x | =
x+1 | y+1 | !
|x| | x | !
\log_2 8 | 3 | =
\sin(\pi/6) | \frac12 | =
3+4i | 4i+3 | =
3+4i | 3-4i | !
e^{2x} | e^{x}e^{x} | =
\left(\frac{1}{2}\right)^3 | \frac{1}{8} | =
-x^2 | x^2 | !
\infty | -\infty | !
# names and equations
5 | x = 5 | =
x = 5 | 5 | =
x=5 | x = 5.0 | =
x=5 | y=5 | !
x=5 | 5=5 | !
x=5 | 2+3=5 | !
x=5 | m+n=5 | !
x=5 | 5=x | =
x=5 | 5=y | !
x=5 | x \approx 5 | =
5 | 5=x | =
x=1,y=2 | 1=x,2=y | =
2R | 2r | =
x=5 | x=6 | !
y = 2x+3 | 2x + 3 | =
y=2x+3 | y-2x=3 | =
y=2x+3 | y=3x+2 | !
2x+3 | y=2x+3 | =
f(x)=x^2 | x^2 | =
5 | 2+3=5 | =
5 | x = 2 + 3 = 5 | =
6 | x=5=6 | !
x=6 | x=5=6 | !
5 | x=2+4=5 | !
5 | a=b=5 | =
5\text{ cm} | x = 2+3 = 5\text{ cm} | =
5\text{ cm} | x = 2+3 = 5\text{ m} | !
2\sqrt{2} | x=5=2\sqrt{2} | !
2\sqrt{2} | 3=2\sqrt{2} | !
2\sqrt{2} | x=\sqrt{8}=2\sqrt{2} | =
4\pi | A=\pi r^2=4\pi | =
x+1 | y=5=x+1 | !
y=2x+3 | y=2(x+1)+1=2x+3 | =
x=1,y=2 | x=1=1,y=1+1=2 | =
x=1,y=2 | x=1=1,y=1+2=2 | !
x \le 5 | 5 \geq x | =
x<5 | x>5 | !
# lists, sets, tuples
1,2 | 2,1 | =
1, 2 | 1 and 2 | =
1,2 | 1,3 | !
1,2 | 1,2,3 | !
\{1,2,3\} | \{3, 2, 1\} | =
\{1,2,3\} | {1,2,3} | =
\{1,2,3\} | 1,2,3 | =
\{1,2\} | (1,2) | !
\{5\} | 5 | =
(1,2) | ( 1 , 2 ) | =
(1,2) | \left(1, 2\right) | =
(1,2) | (2,1) | !
(1,2) | 1,2 | =
(1,2) | \{1,2\} | !
(\frac12, 3) | (0.5, 3) | =
(1,2,3) | (1,2,4) | !
(1,2,3) | [1,2,3] | =
x=1,x=2 | 1, 2 | =
1,2 | x = 2 \text{ or } x = 1 | =
x=1,y=2 | y=2,x=1 | =
x=1,y=2 | x=2,y=1 | !
\pm 3 | 3,-3 | =
3,-3 | \pm 3 | =
\sqrt{2},-\sqrt2 | -\sqrt{2}, \sqrt{2} | =
(1,2),(3,4) | (3,4),(1,2) | =
(1,2),(3,4) | (2,1),(3,4) | !
\emptyset | \{\} | =
\emptyset | \{0\} | !
\emptyset | \text{no solution} | =
\emptyset | none | =
\text{no solutions} | \varnothing | =
\emptyset | \text{all} | !
\emptyset | 0<1 | !
\emptyset | 1<0 | !
\emptyset | x<x+1 | !
\mathbb{R} | 0<1 | !
(0,1) | 0<1 | !
(-\infty,\infty) | x<x+1 | !
\{1,2\} | \{1,1,2\} | =
\{1,1,2\} | \{2,1\} | =
\{1,2\} | \{1,1\} | !
1,1,2 | \{1,2\} | !
1,1,2 | \{1,1,2\} | =
# intervals
[1,2] | [1, 2] | =
[1,2] | (1,2) | !
[1,2) | [1,2] | !
(-\infty,3] | \left(-\infty, 3\right] | =
(-\infty, 3) | x<3 | =
(-2,-1)\cup(1,2) | x^4-5x^2+4<0 | =
(1,2)\cup(3,4) | (x-1)(x-2)(x-3)(x-4)<0 | =
(1,2) | 1<x<2 | =
x\in[1,2] | [1,2] | =
(-\infty,1)\cup(2,\infty) | (2,\infty) \cup (-\infty,1) | =
(-\infty,1)\cup(2,\infty) | (-\infty,1]\cup(2,\infty) | !
[0,\frac12] | [0, 0.5] | =
\mathbb{R} | (-\infty,\infty) | =
# matrices
\begin{pmatrix}1\\2\end{pmatrix} | \begin{bmatrix}1\\ 2\end{bmatrix} | =
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix}1&2\\3&4\end{pmatrix} | =
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix}1&2\\4&3\end{pmatrix} | !
\begin{pmatrix} 1/2 \\ 3 \end{pmatrix} | \begin{pmatrix} 0.5 \\ 3 \end{pmatrix} | =
(1,2) | \begin{pmatrix}1\\2\end{pmatrix} | =
\begin{pmatrix}1\\2\end{pmatrix} | (1, 2) | =
\begin{pmatrix}1\\2\end{pmatrix} | (2, 1) | !
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1&2\end{pmatrix} | !
# words and choices
12:30 | 12{:}30 | =
\text{does not exist} | DNE | =
\text{does not exist} | \text{none} | !
5 | \textbf{(A) }5 | =
5 | \textbf{(A)}\ 6 | !
5 | (A) 5 | =
\text{(B) } 5 | B | =
\text{(B) } 5 | \textbf{(B)} | =
\text{(B) } 5 | 5 | =
\text{(B) } 5 | \text{(B) }5 | =
\text{(B) } 5 | \text{(A) }5 | !
\text{(B) } 5 | C | !
\text{(B) } 5 | \text{(B) }6 | !
B | \textbf{(B) }5 | =
B | \textbf{(A) }5 | !
b | \text{B} | !
b | \text{b} | =
x | \text{X} | !
\text{x} | X | =
10:30 a.m. | \text{10:30 AM} | =
10:30\text{ p.m.} | 10:30 am | !
B | (B) | =
\text{(B)} | B | =
B | \textbf{(B)} | =
B | B. | =
B | C | !
\text{Evelyn} | Evelyn | =
\text{Evelyn} | evelyn | =
\text{east} | \text{seat} | !
east | seat | !
\text{Monday} | \text{ monday} | =
\text{yes} | No | !
\text{yes} | Yes | =
\text{ice cream} | icecream | =
\text{ice cream} | \text{scream} | !
\text{St. Mary} | St Mary | =
\text{July 4} | 4 | !
AB | \text{AB} | =
"""


def _pairs():
  section = ""
  for line in PAIRS.strip().splitlines():
    if line.startswith("#"):
      section = line[2:]
    else:
      left, _, verdict = line.rpartition(" | ")
      gold, _, answer = left.partition(" | ")
      yield pytest.param(gold, answer, verdict == "=", id=f"{section}: {left}")


@pytest.fixture(scope="module")
def pool():
  with GraderPool(PATH, timeout_s=LIMIT_S, memory_mib=2048) as pool:
    yield pool


def _boxed(answer):
  return rf"So it is $\boxed{{{answer}}}$."


def _grade(completion, gold):
  return mathematics(completion, {"answer": gold})


@pytest.mark.parametrize(("gold", "answer", "equal"), list(_pairs()))
def test_pairs(gold, answer, equal):
  for completion in (_boxed(answer), f"We get\n#### {answer}\n"):
    grade = _grade(completion, gold)
    assert grade.outcome is (Outcome.CORRECT if equal else Outcome.WRONG), grade
    assert grade.score == float(equal)
    assert grade.answer and grade.detail.startswith(grade.answer)
  for text in (gold, answer):  # the normal form of a normal form is itself, and it is right
    normal = str(parse_answer(text))
    assert str(parse_answer(normal)) == normal
    assert _grade(_boxed(text), text).outcome is Outcome.CORRECT


@pytest.mark.parametrize(
  ("completion", "answer"),
  [
    (r"\boxed{5}", "5"),
    (r"a \boxed{\frac{1}{2}} b \fbox{7}", "7"),
    (r"\boxed{\boxed{5}}", r"\boxed{5}"),
    (r"\boxed{\{1\}} #### 3", r"\{1\}"),
    (r"\boxed{1} and $\boxed{2}$", "1, 2"),
    (r"$x=\boxed{1}$ or $x = \boxed{2}$", "1, 2"),
    (r"first \boxed{1}, then the rest \boxed{2}", "2"),
    (r"\boxed{2} and \boxed{3", None),  # cut off
    (r"\boxed{5} wait \boxed{7", None),
    (r"\boxed{5} no, it is \boxed", None),
    (r"\boxed{5", None),
    (r"\boxed{5 wait \boxed{7}", "7"),
    (r"$\boxed{5}$" "\n\n" r"$\boxed{5}$", "5"),  # repeated
    (r"$\boxed{5}$" "\n\n" r"$\boxed{6}$", "5, 6"),
    (r"\boxed{x<1} \text{ or } \boxed{x>2}", "x<1 or x>2"),
    (r"$x=\boxed{1}, y=\boxed{2}$", "1, 2"),
    (r"\boxed{}", None),
    (r"so \boxed 5.", "5"),
    (r"so $\boxed5$", "5"),
    (r"so \boxed -1/2", "-1/2"),
    (r"\boxed{\boxed 5}", r"\boxed 5"),
    (r"put it in a \boxed and write 3", "3"),
    ("72 #### 18", "18"),
    ("####\n18 dollars\nbye", "18 dollars"),
    ("5 ####", None),
    (r"<think> \boxed{3}", None),
    (r"<think>maybe \boxed{5}. Wait,", None),
    (r"<think>\boxed{3}</think> \boxed{4}", "4"),
    (r"\boxed{3}</think> The answer is 4.", "4"),
    (r"\boxed{3}</think>", None),
    ("</think> 4 <think> 5", None),
    ("The answer is $5.50.", "$5.50"),
    ("The final answer is: $\\frac{1}{2}$. I hope it is correct.", "$\\frac{1}{2}$"),
    ("**Answer:** 12 apples\nThat was 3.", "12 apples"),
    ("The answer is therefore 7 apples in total.", "7"),
    ("The answer is not 5", "not 5"),
    ("The answer isn't 5.", "n't 5"),
    ("The answer is 5, not 6.", "5, not 6"),
    ("The answer is not 5 but 6.", "6"),
    ("The answer is 5, which is not prime.", "5"),
    ("The answer is between 3 and 5", "between 3 and 5"),
    ("The answer is, as all of us have seen, surely not 5", None),
    ("So the difference between 3 and 8 is 5.", "5"),
    ("The answer is the set $\\{1,2\\}$.", "$\\{1,2\\}$"),
    ("The answers are $x=1$ and $x=2$.", "$x=1$ and $x=2$"),
    ("The answer is 2\\sqrt{3}\\text{ cm}.", "2\\sqrt{3}\\text{ cm}"),
    ("Answer: x + 3", "x + 3"),
    ("Answer: (B)", "(B)"),
    ("The answer is Evelyn.", "Evelyn"),
    ("The answer:\n\n42", "42"),
    ("The answer cannot be found, whatever one may try to do.", None),
    ("She has 3 and then 72.", "72"),
    ("5 cost $15, so one costs $3", "$3"),
    ("so we get \\(x^2\\).", "\\(x^2\\)"),
    ("x^2+1", "x^2+1"),
    ("3/4", "3/4"),
    ("Evelyn", "Evelyn"),
    ("no number here", None),
    (" \n", None),
  ],
)
def test_extraction(completion, answer):
  assert extract_answer(completion) == answer
  grade = _grade(completion, "-17")
  assert grade.outcome is (Outcome.UNPARSEABLE if answer is None else Outcome.WRONG)
  assert bool(grade.answer) == (answer is not None)


@pytest.mark.parametrize(
  "gold", ["7/2", "$3.5$", r"\boxed{\frac{7}{2}}", "some steps: 9\n#### 3.50", 3.5]
)
def test_gold_spellings(gold):
  assert _grade(_boxed(r"3\frac{1}{2}"), gold).outcome is Outcome.CORRECT
  assert _grade(_boxed("9"), gold).outcome is Outcome.WRONG


@pytest.mark.parametrize(
  ("gold", "said"),
  [("", "is empty"), (r"\boxed{}", "is empty"), ("1+" * 600, "empty or has over")],
)
def test_unparseable_gold_is_the_graders_fault(gold, said):
  for completion in (_boxed("x+5"), "no number here", "", _boxed("5" * 2 * MAX_ANSWER)):
    grade = _grade(completion, gold)
    assert grade.outcome is Outcome.CRASHED and said in grade.detail and not grade.answer


@pytest.mark.parametrize("gold", [r"\frac{\sqrt{x}", r"k \in \mathbb Z", r"A \to B", r"2 \pm"])
def test_a_gold_that_math_verify_cannot_read_is_compared_as_text(gold):
  assert _grade(f"#### {gold}", gold).outcome is Outcome.CORRECT
  for answer in ("5", "x+5", "1,2", r"\text{none of it}", r"\frac{1}{"):
    grade = _grade(f"#### {answer}", gold)
    assert grade.outcome is Outcome.WRONG and "only the same text counts" in grade.detail, grade


def test_a_missing_reference_raises():
  with pytest.raises(KeyError, match="answer"):
    mathematics("5", {})


@pytest.mark.parametrize(
  ("gold", "answers", "normal"),
  [
    ("8", ["0.5", r"\frac12", "50/100", r"\dfrac{1}{2}", "x = 1/2", r"\frac12\text{ cm}"], "1/2"),
    (r"8\text{ cm}", ["5 cm", r"5.0\text{ centimeters}"], r"5\text{ cm}"),
    ("y=8", ["x=5", "x = 5.0"], "x=5"),
    ("8,9", ["2,1", r"\{1, 2\}", "(1,2)", r"x=1 \text{ or } x=2", r"\left\{2,1\right\}"], "1, 2"),
    ("(8,9)", ["1, 2", r"\left(1,\, 2\right)"], "(1, 2)"),
    ("8", [r"\text{Evelyn}", "evelyn", "$Evelyn$."], r"\text{evelyn}"),
    (r"\text{yes}", ["Yes", "yes.", r"\text{ yes }"], r"\text{yes}"),
    ("8", [r"2 \pi r", r"$2\pi r$", r"\displaystyle 2\pi  r"], r"2\pi r"),
  ],
)
def test_equal_answers_are_one_vote(gold, answers, normal):
  votes = [_grade(_boxed(answer), gold).answer for answer in answers]
  assert votes == [normal] * len(answers)


@pytest.mark.parametrize(
  ("gold", "answers"),
  [
    ("(1,2)", ["(1,2)", "(2,1)", "[1,2]", r"\{1,2\}", "(1,2,3)"]),
    ("5", ["5", "-5", "6", r"5\%", r"\text{five}", "5,6"]),
    ("x=5", ["x=5", "y=5", "5x"]),
    (r"5\text{ cm}", [r"5\text{ cm}", r"5\text{ m}", "5"]),
    (r"\text{east}", [r"\text{east}", r"\text{seat}", "e"]),
  ],
)
def test_different_answers_are_different_votes(gold, answers):
  assert len({_grade(_boxed(answer), gold).answer for answer in answers}) == len(answers)


def test_equal_votes_have_equal_grades():
  """Of random texts, whose normal forms often coincide."""
  draw = random.Random(0)
  pieces = r"1 2 0.5 \frac12 , x = ( ) \{ \} % \text{~cm} - + $ \text{or} [ ] cm ~cm _2 ~and~ ~ ."
  pieces += r" \text{(B)~} (B)~ B 5 =5 \text{b} th ^{st} \cdot \times10^2 \to none"
  pieces = [piece.replace("~", " ") for piece in pieces.split(" ")]
  texts = ["".join(draw.choices(pieces, k=draw.randint(1, 6))) for _ in range(200)]
  shared = 0
  golds = ["1", "1,2", "(1,2)", "x=1", r"2\text{ cm}", r"50\%", "x+1", "1_2", "5", r"\{1,2\}"]
  golds += [r"\{1,1\}", r"\text{(B) }1", "B", "b", r"\emptyset", r"A \to B"]
  for gold in golds:
    outcomes = {}
    for text in texts:
      grade = _grade(_boxed(text), gold)
      assert grade.outcome is not Outcome.CRASHED, (gold, text, grade)
      if grade.answer:
        shared += grade.answer in outcomes
        assert outcomes.setdefault(grade.answer, grade.outcome) is grade.outcome, (gold, text)
  assert shared > 100


def test_self_test():
  mathematics_self_test()


# --- GSM8K ---


def _gsm8k_problems():
  shared = os.environ.get("RLVR_SHARED")
  if not shared:
    pytest.skip("RLVR_SHARED is not set: the published data sets lie in its data folder")
  files = sorted((pathlib.Path(shared) / "data" / "gsm8k").glob("*.jsonl"))
  rows = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
  return [(row["answer"], row["answer"].rpartition("####")[2].strip()) for row in rows]


def _perturbed(number, index):
  """A number near by: one more, the other sign, a digit more or less, a half more."""
  digits = number.replace(",", "")
  negated = digits[1:] if digits.startswith("-") else f"-{digits}"
  shorter = digits[:-1] if len(digits.strip("-")) > 1 else f"{digits}1"
  others = [str(int(digits) + 1), negated, shorter, f"{digits}7", f"{digits}.5"]
  other = others[index % len(others)]
  return other if float(other) != float(digits) else str(int(digits) + 1)


@pytest.mark.parametrize("grader", [gsm8k, mathematics])
def test_gsm8k_gold_answers(grader):
  problems = _gsm8k_problems()
  assert len(problems) == 8792
  for index, (solution, number) in enumerate(problems):
    grade = grader(solution, {"answer": number})
    assert (grade.outcome, grade.score) == (Outcome.CORRECT, 1.0), (solution, grade)
    assert grade.answer == number.replace(",", "").removeprefix("+")
    damaged = solution.rpartition("####")[0] + f"#### {_perturbed(number, index)}"
    grade = grader(damaged, {"answer": number})
    assert (grade.outcome, grade.score) == (Outcome.WRONG, 0.0), (damaged, grade)


def test_gsm8k_through_the_pool(pool):
  problems = _gsm8k_problems()[:500]
  damaged = [f"#### {_perturbed(number, i)}" for i, (_, number) in enumerate(problems)]
  references = [{"answer": number} for _, number in problems]
  right = pool.grade([solution for solution, _ in problems], references)
  wrong = pool.grade(damaged, references)
  assert {grade.outcome for grade in right} == {Outcome.CORRECT}
  assert {grade.outcome for grade in wrong} == {Outcome.WRONG}
  assert [grade.answer for grade in right] == [n.replace(",", "") for _, n in problems]


# --- Hostile completions ---

QUICK = {
  "10,000 braces": _boxed("{" * 10_000 + "5" + "}" * 10_000),
  "450 braces": _boxed("{" * 450 + "x" + "}" * 450),
  "450 parentheses": _boxed("(" * 450 + "x" + ")" * 450),
  "a megabyte of boxes": r"\boxed{" * 140_000,
  "a megabyte of braces": "{" * 10**6,
  "a megabyte in a box": _boxed("1" * 10**6),
  "a megabyte of digits": "1" * 10**6,
  "a megabyte of groups": "1" + ",111" * 250_000,
  "a megabyte of answers": "answer is " * 100_000,
  "a megabyte of dollars": "$ " * 500_000,
  "a megabyte of opened formulas": r"\(" * 500_000,
  "a megabyte of marks": "#" * 10**6,
  "a long list": _boxed("1," * 480 + "1"),
  "a long name": _boxed("a " * 450 + "="),
  "many units": _boxed("5" + " a" * 450),
  "nested text": _boxed(r"\text{" * 140 + "6" + "}" * 140),
  "fractions of nothing": _boxed(r"\frac" * 180),
  "a division by zero": _boxed(r"\frac{1}{0}"),
  "a nul": _boxed("\0"),
  "half a character": _boxed("\ud800"),
  "other digits": _boxed("٣"),
  "many scales": _boxed("5" + " million" * 120),
  "an inequality of degree 40": _boxed("x^{40}-3x^{21}+x-1<0"),
  "many negations": "not " * 2000 + "5",
  "many percent signs": "The answer is apples" + "%" * 2000,
  "many units in text": "The answer is apples" + r"\text{a}" * 2000,
  "a huge power": _boxed("10^{10^{10}}"),
  "a tower": _boxed("9^{9^{9^{9}}}"),
  "a huge denominator": _boxed("10^{-10^{10}}"),
  "a huge sum": _boxed(r"\sum_{i=1}^{10^{8}} i!"),
  "a huge product": _boxed(r"\prod_{k=1}^{10^9} k"),
  "a huge factorial": _boxed("(10^{8})!"),
  "a tower of factorials": _boxed("((((9!)!)!)!)!"),
  "a binomial": _boxed(r"\binom{10^9}{5\cdot 10^8}"),
  "an integral": _boxed(r"\int_0^\infty \frac{\sin(x^{100})}{e^{x^x}+\log x}dx"),
  "an expansion": _boxed("(x+1)^{100000}"),
  "an expansion of four": _boxed("(x+y+z+1)^{999}"),
  "a smaller one": _boxed("(x+y+z+w)^{99}"),
  "a power of a power": _boxed("(9^{9999})^{9999}=5"),
  "an exponent of its own": _boxed(r"2^{\binom{9999}{5000}}"),
  "nested radicals": _boxed(r"\sqrt{1+" * 40 + "x" + "}" * 40),
  "nested sines": _boxed(r"\sin(" * 20 + "x" + ")" * 20),
  "60 intervals": _boxed(r"\cup".join(f"({i},{i + 1}]" for i in range(0, 180, 3))),
  "400 powers": _boxed("^".join(["x"] * 400)),
  "900 bars": _boxed("|" * 900),
  "nested sums": _boxed("(" * 200 + "x+" + "1)" * 200),
  "nested fractions": _boxed(r"\frac{1}{1+" * 80 + "x" + "}" * 80),
  "boxes far apart": r"\boxed{1}" + " " * 90_000 + r"\boxed{2}",
  "boxes in boxes": r"\boxed{" * 10_000 + "1" + "}" * 10_000,
}
# A right answer by the quick way, and one by math-verify.
RIGHT = [("#### 5", "5"), (_boxed(r"\frac{1}{\sqrt{2}}"), r"\frac{\sqrt{2}}{2}")]


def _grades_after(pool, hostile, gold):
  completions = [hostile, *(completion for completion, _ in RIGHT)]
  references = [{"answer": answer} for answer in (gold, *(answer for _, answer in RIGHT))]
  return pool.grade(completions, references)


def test_hostile_texts_cost_little(pool):
  before = pool.worker_pids()
  for name, completion in QUICK.items():
    first, *others = _grades_after(pool, completion, "x^2+5")
    assert first.outcome in (Outcome.WRONG, Outcome.UNPARSEABLE), (name, first)
    assert [grade.outcome for grade in others] == [Outcome.CORRECT] * 2, name
  assert pool.worker_pids() == before


def test_running_out_of_stack_is_the_completions_fault():
  nested, gold = _boxed("(" * 450 + "x" + ")" * 450), {"answer": "x"}
  assert mathematics(nested, gold).outcome is Outcome.CORRECT
  limit = sys.getrecursionlimit()
  sys.setrecursionlimit(len(inspect.stack()) + 200)
  try:
    grade = mathematics(nested, gold)
  finally:
    sys.setrecursionlimit(limit)
  assert grade.outcome is Outcome.UNPARSEABLE and "RecursionError" in grade.detail, grade


def test_long_answers_are_no_answers():
  nines = "9" * MAX_ANSWER
  assert _grade(_boxed(nines), nines).outcome is Outcome.CORRECT
  assert _grade(_boxed(nines + "9"), nines).outcome is Outcome.UNPARSEABLE
