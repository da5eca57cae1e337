"""Verdicts of answers as a careful human grader gives them, and one grade for one normal form."""

import functools
import pathlib
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.rewards import Outcome
from rlvr_jax.rewards.answers import parse_answer
from rlvr_jax.rewards.extraction import extract_answer
from rlvr_jax.rewards.mathematics import mathematics

# Lines of gold | answer | = or !; an answer after @ is the full completion, others are in a box.
VERDICTS = pathlib.Path(__file__).with_name("verdicts.txt").read_text(encoding="utf-8")


@functools.cache
def _verdicts():
  """Section → (gold, answer, whether it is right)."""
  sections = {}
  for line in VERDICTS.strip().splitlines():
    if line.startswith("# "):
      found = sections.setdefault(line[2:], [])
      continue
    left, _, verdict = line.rpartition(" | ")
    gold, _, answer = left.partition(" | ")
    found.append((gold, answer, verdict == "="))
  return sections


def _boxed(answer):
  return rf"So it is $\boxed{{{answer}}}$."


def _misjudged(gold, answer, right):
  """What is wrong with the grades of an answer; nothing if a careful human gives the same."""
  completions = [_boxed(answer), f"We get\n#### {answer}\n"]
  if answer.startswith("@"):
    completions = [answer[1:]]
  elif extract_answer(completions[0]) == extract_answer(completions[1]):
    completions = completions[:1]  # a grade depends on the completion by its answer alone
  for completion in completions:
    grade = mathematics(completion, {"answer": gold})
    if (grade.outcome is Outcome.CORRECT) is not right or grade.score != float(right):
      yield completion, grade
    if not grade.detail.startswith(grade.answer):
      yield "detail", grade
  for text in {gold, gold if answer.startswith("@") else answer}:
    yield from _misread(text)


@functools.cache
def _misread(text):
  """What is wrong with the normal form of a text, and with its grade if it is the gold answer."""
  wrong = []
  normal = str(parse_answer(text))
  if str(parse_answer(normal)) != normal:
    wrong.append(("normal form", normal, str(parse_answer(normal))))
  if mathematics(_boxed(text), {"answer": text}).outcome is not Outcome.CORRECT:
    wrong.append(("its own text", text))
  return wrong


@pytest.mark.parametrize("section", _verdicts())
def test_a_careful_human_grader(section):
  verdicts = _verdicts()[section]
  assert verdicts
  assert {case: found for case in verdicts if (found := [*_misjudged(*case)])} == {}


@pytest.mark.parametrize(
  "amount",
  ["5", r"\frac{1}{2}", r"9\pi", r"2\sqrt{3}", r"\frac{\pi}{2}", "x+1", "x=5", "(1,2)", "1,2"],
)
def test_the_own_text_of_an_amount_with_a_unit_is_right(amount):
  units = r"""
    \text{~m} \text{~m}^2 \text{~cm}^{3} \text{~m/s}^2 ~\mathrm{~m}~/~\mathrm{s}^{2} \,\mathrm{cm}^2
    \text{~square~meters} \text{~cubic~inches} \text{~square~units} \text{~per~hour} \text{~m/s}
    \text{~miles~per~hour} \text{~dollars~per~hour} \text{~people~per~square~mile} \%
  """.split()
  for unit in units:
    text = amount + unit.replace("~", " ")
    normal = str(parse_answer(text))
    assert str(parse_answer(normal)) == normal
    assert mathematics(_boxed(text), {"answer": text}).outcome is Outcome.CORRECT, (text, normal)


@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2, 3))])
def test_formulas_as_sympy_rewrites_them(seed):
  sympy = pytest.importorskip("sympy")
  draw = random.Random(seed)
  x, y = sympy.symbols("x y", real=True)
  leaves = [x, y, sympy.pi, sympy.E, sympy.sqrt(3), sympy.Rational(2, 7), sympy.Integer(-3)]

  def expression(depth):
    if not depth:
      return draw.choice(leaves)
    one, other = expression(depth - 1), expression(depth - 1)
    ways = (
      one + other, one * other, one - other, one / (other + 13), one**2, sympy.sin(one),
      sympy.exp(one), sympy.sqrt(one**2 + 2), sympy.log(one**2 + 2), 3 + sympy.I * one,
    )  # fmt: skip
    return draw.choice(ways)

  compared = 0
  while compared < 12:
    gold = expression(draw.randint(1, 3))
    if gold.is_Rational or gold == 0 or len(sympy.latex(gold)) > 150:
      continue
    compared += 1
    for rewritten in (sympy.expand(gold), sympy.factor(gold), sympy.together(gold)):
      texts = [
        sympy.latex(answer, ln_notation=True)
        for answer in (rewritten, rewritten * 1.01, rewritten + 1)
      ]
      grades = [
        mathematics(_boxed(text), {"answer": sympy.latex(gold, ln_notation=True)}) for text in texts
      ]
      outcomes = [grade.outcome for grade in grades]
      assert outcomes == [Outcome.CORRECT, Outcome.WRONG, Outcome.WRONG], (gold, texts)


# Spellings that a policy may choose among, of a number @.
SPELLINGS = (
  "@", " @ ", "@.0", "@.", "0@", "+@", "$@$", r"\(@\)", r"\text{@}", r"\left(@\right)", "(@)",
  r"\{@\}", "[@]", "x=@", "@=x", "x = @", r"x \approx @", r"\$ @", r"\$@", "@°", r"@^\circ",
  r"@\text{ cm}", "@ cm", "@ apples", r"@\text{ K}", "@ K", "@K", r"@\%", "@ dozen",
  "@ cents", "@ radians", "at most @", r"\text{less than } @", "about @", "@ a.m.", "@:30",
  "1 to @", r"\textbf{(B) }@", "(B) @", "@ 2", r"@\,2", r"@\;345", r"@\,345", "@,345", "@_2",
  "@, 7", "7 and @", "a=@, b=7", "b=7, a=@", r"\{x \mid x<@\}", "x<@", r"\sqrt{@}", r"2^{@}", "@m",
  "@ m", r"@\pi", r"@\text{ at most}", "ABC @", "@/1", r"\frac{@}{1}", r"\frac@2", r"@\approx @.0",
)  # fmt: skip
QUICK_GOLDS = ("72", r"7\text{ cm}", r"\$7", "x=7", "(7,7)", "7_2", "ABC")
# The same ways through the grader; with those from a=7 on each spelling is compared by values.
SLOW_GOLDS = (
  "7", "12345", "7 cents", r"7^\circ", r"7\text{ K}", r"\{7\}", r"\text{(B) }7", r"7\%", "B",
  r"\angle ABC",
  "a=7,b=7",   r"7\pi", "7,7", "7m", "x<7", "xy", "7:30", "7:30 a.m.", r"\sqrt{7}", "[7,8)", "1:7",
  r"\frac{7\pi}{180}",   r"\log_2 7",
)  # fmt: skip
LETTERS = (
  "ABC",
  "CBA",
  "A B C",
  r"\text{ABC}",
  "abc",
  "xy",
  "yx",
  r"\text{xy}",
  "x y",
  "B",
  "b",
  "(B)",
)


@pytest.mark.parametrize(
  "gold", [*QUICK_GOLDS, *(pytest.param(gold, marks=pytest.mark.slow) for gold in SLOW_GOLDS)]
)
def test_one_normal_form_one_grade(gold):
  """Whatever the spelling; and the normal form of a normal form is itself, with the same grade."""
  graded = {}
  spelled = [
    spelling.replace("@", number) for spelling in SPELLINGS for number in ("7", "12", "72")
  ]
  for text in (gold, *spelled, *(f"{each}, 7" for each in spelled), *LETTERS):
    grade = mathematics(rf"\boxed{{{text}}}", {"answer": gold})
    assert grade.outcome in (Outcome.CORRECT, Outcome.WRONG), (text, grade)
    assert graded.setdefault(grade.answer, grade.outcome) is grade.outcome, text
    again = mathematics(rf"\boxed{{{grade.answer}}}", {"answer": gold})
    assert (again.answer, again.outcome) == (grade.answer, grade.outcome), text
  assert len(set(graded.values())) == 2  # some are right, some are wrong


@settings(max_examples=12, derandomize=True, deadline=None)
@given(
  gold=st.sampled_from(QUICK_GOLDS),
  pairs=st.lists(st.tuples(*[st.sampled_from(SPELLINGS)] * 2), min_size=20, max_size=20),
)
def test_one_normal_form_one_grade_for_spellings_within_spellings(gold, pairs):
  graded = {}
  for outer, inner in pairs:
    for number in ("7", "72", "12"):
      text = outer.replace("@", inner.replace("@", number))
      grade = mathematics(rf"\boxed{{{text}}}", {"answer": gold})
      assert graded.setdefault(grade.answer, grade.outcome) is grade.outcome, text


@pytest.mark.parametrize(
  "gold", [r"\log_2 3", r"\log_2 x", r"\sqrt{2}", "x^2+5", r"e^{2}", r"\ln 2+\ln 3"]
)
def test_a_huge_or_long_number_costs_little(gold):
  mathematics(r"\boxed{\frac{1}{\sqrt{2}}}", {"answer": r"\frac{\sqrt{2}}{2}"})  # imports mpmath
  began = time.process_time()
  for answer in (
    "1e400",
    "1e-400",
    "10^{999}",
    "10^{12}",
    r"10^{999}\log 2",
    r"10^{9}\ln 3+x",
    "2^{8000}" + r"+e^i\ln 3" * 90,
    *(f"1,2{sign * 300}" for sign in "°€¢"),
    "9" * 900,
  ):
    grade = mathematics(rf"\boxed{{{answer}}}", {"answer": gold})
    assert grade.outcome is Outcome.WRONG, (answer, grade)
  assert time.process_time() - began < 1.5
