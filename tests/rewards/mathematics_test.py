"""The mathematics grader: extraction, normal forms, equality, and completions that mean harm."""

import inspect
import json
import os
import pathlib
import random
import sys
import time

import pytest

from rlvr_jax.rewards import GraderPool, Outcome
from rlvr_jax.rewards.extraction import MAX_ANSWER, extract_answer
from rlvr_jax.rewards.graders import gsm8k
from rlvr_jax.rewards.mathematics import mathematics

LIMIT_S = 2.0  # of a processor
PATH = "mathematics"


@pytest.fixture(scope="module")
def pool():
  # What is limited here is processor time: a busy machine is no failure.
  with GraderPool(PATH, timeout_s=60.0, memory_mib=2048) as pool:
    yield pool


def _boxed(answer):
  return rf"So it is $\boxed{{{answer}}}$."


def _grade(completion, gold):
  return mathematics(completion, {"answer": gold})


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
def test_a_gold_that_cannot_be_parsed_is_compared_as_text(gold):
  assert _grade(f"#### {gold}", gold).outcome is Outcome.CORRECT
  for answer in ("5", "x+5", "1,2", r"\text{none of it}", r"\frac{1}{"):
    grade = _grade(f"#### {answer}", gold)
    assert grade.outcome is Outcome.WRONG and "only the same text counts" in grade.detail, grade


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
  texts = ["".join(draw.choices(pieces, k=draw.randint(1, 6))) for _ in range(120)]
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
  assert shared > 50


def test_no_text_raises():
  """An exception would be a crash, which is left out of the loss."""
  draw = random.Random(0)
  pieces = (
    r"1 2 0.5 10^{99} ( ) [ ] { } \{ \} | , ; : = < \ge \ne + - * / ^ _ ! ' % ° x y e i f( \pi"
    r" \infty \frac \frac{1}{2} \sqrt \sqrt[0]{2} \sin \log_2 \binom \cup \in \mathbb{R} \pm \mp"
    r" \land \lor \text{cm} \pmod7 \begin{pmatrix} \end{pmatrix} & \\ \overline{3} A. ½ ²"
  ).split()
  golds = [
    "(-\\infty,1)",
    "x<1",
    "x+1",
    "1,2",
    "x=1",
    "5",
    "\\frac{1\\pm x}{2}",
    "\\{1,2\\}",
    "1:2",
  ]
  for _ in range(900):
    text = "".join(draw.choices(pieces, k=draw.randint(1, 9)))
    gold = text if draw.random() < 0.2 else draw.choice(golds)
    if draw.random() < 0.2:
      text += "x<1"
    grade = _grade(_boxed(text), gold)
    assert grade.outcome in set(Outcome) - {Outcome.CRASHED}, (gold, text)
    # Nor is an exception taken for an answer that cannot be read.
    assert "in comparing the answer" not in grade.detail, (gold, text, grade.detail)
  assert _grade(_boxed(r"2\ge½!x<1"), r"(-\infty,1)").outcome is Outcome.WRONG


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
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 10])
def test_gsm8k_gold_answers(grader, every):
  problems = _gsm8k_problems()
  assert len(problems) == 8792
  for index, (solution, number) in enumerate(problems[::every]):
    grade = grader(solution, {"answer": number})
    assert (grade.outcome, grade.score) == (Outcome.CORRECT, 1.0), (solution, grade)
    assert grade.answer == number.replace(",", "").removeprefix("+")
    damaged = solution.rpartition("####")[0] + f"#### {_perturbed(number, index)}"
    grade = grader(damaged, {"answer": number})
    assert (grade.outcome, grade.score) == (Outcome.WRONG, 0.0), (damaged, grade)


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
# A right answer by the quick way, and one by values.
RIGHT = [("#### 5", "5"), (_boxed(r"\frac{1}{\sqrt{2}}"), r"\frac{\sqrt{2}}{2}")]


def _grades_after(pool, hostile, gold):
  completions = [hostile, *(completion for completion, _ in RIGHT)]
  references = [{"answer": answer} for answer in (gold, *(answer for _, answer in RIGHT))]
  return pool.grade(completions, references)


def _processor_seconds(pids):
  of_process = (pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in pids)
  ticks = sum(int(field) for stat in of_process for field in stat.split()[11:13])  # user, system
  return ticks / os.sysconf("SC_CLK_TCK")


def test_hostile_texts_cost_little(pool):
  before = pool.worker_pids()
  for name, completion in QUICK.items():
    spent = _processor_seconds(before)
    first, *others = _grades_after(pool, completion, "x^2+5")
    assert _processor_seconds(before) - spent < LIMIT_S, name
    assert first.outcome in (Outcome.WRONG, Outcome.UNPARSEABLE), (name, first)
    assert [grade.outcome for grade in others] == [Outcome.CORRECT] * 2, name
  assert pool.worker_pids() == before


def test_many_conditions_are_not_solved():
  spent = time.process_time()
  conditions = ",".join(f"x^8<{n % 9 + 1}" for n in range(160))
  assert mathematics(_boxed(conditions), {"answer": "(1,2)"}).outcome is Outcome.WRONG
  assert time.process_time() - spent < LIMIT_S


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
