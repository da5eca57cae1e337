r"""Verdicts of answers as a careful human grader gives them, and one grade for one normal form."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.rewards import Outcome
from rlvr_jax.rewards.mathematics import mathematics

# gold | answer | = or !; an answer after @ is the full completion, others are in a box
VERDICTS = r"""
# names
x=1, y=2 | (1,2) | =
x=1, y=2 | (2,1) | !
x=1, y=2 | 1,2 | =
x=1, y=2 | 2,1 | !
x=1, y=2 | y=2, x=1 | =
x=1, y=2 | y=1, x=2 | !
x=1, y=2 | x=2, y=1 | !
x=1, y=2 | \{1,2\} | !
x=1, y=2 | x=1, 2 | =
x=1, y=2 | 1, x=2 | !
x=1, y=2 | 1 \text{ and } 2 | =
x=1, y=2 | (1,2,3) | !
a=3,b=4 | 3,4 | =
a=3,b=4 | 4,3 | !
a=3,b=4 | a=4,b=3 | !
a=3,b=4 | b=4,a=3 | =
a=3,b=4 | c=3,d=4 | !
x=1,x=2 | 2,1 | =
x=1,x=2 | x=2,x=1 | =
3,4 | b=4,a=3 | =
(1,2) | x=1,y=2 | =
(1,2) | y=2,x=1 | =
(1,2) | x=2,y=1 | !
(1,2,3) | x=1,z=3,y=2 | =
# letters
ABC | ABC | =
ABC | \text{ABC} | =
ABC | A B C | =
ABC | CBA | !
ABC | BAC | !
ABC | DEF | !
ABC | \text{CBA} | !
ABC | A,B,C | !
AB | BA | !
AB, CD | CD, AB | =
AB, CD | BA, DC | !
(AB, CD) | (AB, DC) | !
\text{ABC} | CBA | !
cat | act | !
cat | CAT | =
xy | yx | =
abc | cab | =
lwh | hwl | =
xy | xz | !
2ab | 2ba | =
\angle ABC | \angle CBA | =
\angle ABC | \angle BAC | !
\triangle ABC | \triangle BCA | =
\triangle ABC | \triangle DEF | !
\overline{AB} | \overline{BA} | =
\overrightarrow{AB} | \overrightarrow{BA} | !
# money
\$5 | 5 | =
\$5 | \$5.00 | =
\$5 | 5 dollars | =
\$5 | 5\text{ cents} | !
\$5 | 500\text{ cents} | =
\$5 | 5¢ | !
\$5 | €5 | !
$5 | 5 cents | !
50\text{ cents} | \$0.50 | =
50\text{ cents} | \$50 | !
5 | \$5 | =
\$5 | \$5 per hour | =
\$5 per hour | 5 dollars per hour | =
\$5 per hour | 5 | =
£5 | 5 pounds | =
5000 | \$5K | =
\$5\text{ million} | \$5M | =
\$5, \$6 | 6, 5 | =
\$5 | \$6 | !
# angles and temperatures
30^\circ | 30 | =
30^\circ | 30\text{ degrees} | =
30^\circ | 30\text{ radians} | !
30^\circ | 30 radians | !
30^\circ | 30\text{ rad} | !
30^\circ | \frac{\pi}{6} | =
30^\circ | \frac{\pi}{6}\text{ radians} | =
30^\circ | \frac{\pi}{3} | !
\frac{\pi}{6} | 30^\circ | =
\frac{\pi}{6} | 30 | !
\frac{\pi}{6} | 60° | !
30^\circ, 60^\circ | 60°, 30° | =
25^\circ C | 25 | =
25^\circ\text{C} | 25°C | =
25^\circ\text{C} | 25 degrees Celsius | =
25^\circ\text{C} | 25^\circ | =
25^\circ\text{C} | 25^\circ\text{F} | !
# words that change a number
5 | 5 dozen | !
60 | 5 dozen | =
5\text{ dozen} | 60 | =
5 | 5\text{ K} | !
5 | 5 K | !
5 | 5K | !
5000 | 5\text{ K} | =
5000 | 5K | =
300\text{ K} | 300 | =
300\text{ K} | 300 kelvin | =
300\text{ K} | 300 K | =
300 | 300 kelvin | =
5 | 5 tens | !
5m | 5 m | =
# bounds
5 | \text{at most }5 | !
5 | \text{at most 5} | !
5 | at most 5 | !
5 | \text{less than } 5 | !
5 | 5\text{ at most} | !
5 | at least 5 | !
5 | over 5 | !
5 | almost 5 | !
5 | @The answer is at most 5. | !
5 | @The answer is less than 5. | !
5 | @The answer is more than 5 apples. | !
5 | @So she has no more than 5. | !
5 | about 5 | =
5 | \text{approximately } 5 | =
5 | exactly 5 | =
\text{at most }5 | at most 5 | =
\text{at most }5 | 5 | !
x \leq 5 | at most 5 | =
x \leq 5 | at least 5 | !
x < 5 | less than 5 | =
5 | n<=5 | !
5 | n>=5 | !
5 | n!=5 | !
5 | n != 5 | !
5 | x\not=5 | !
5 | x≠5 | !
120 | 5!=120 | =
(-\infty,5] | x<=5 | =
[5,\infty) | x >= 5 | =
(-\infty,5] | x>=5 | !
x \neq 5 | x != 5 | =
# percents
5\% | 5 | =
5\% | 5 percent | =
5\% | 0.05 | =
5\% | 5 percent per year | =
5\% | \$5 | !
5\% | 5 cents | !
5\% | 5^\circ | !
50\% | 50 cm | !
20\% | 20 minutes | !
# neighbors of a number in running text
5 | @I get 5 dozen. | !
60 | @I get 5 dozen. | =
5 | @They sold 5 thousand. | !
5000 | @They sold 5 thousand. | =
5 | @The total is $5$ million | !
5 | @so we need 5 or more. | !
5 | @it takes 5 at most | !
5 | @It is −5 | !
-5 | @It is −5 | =
5 | @It is minus 5 | !
-5 | @It is negative 5 | =
5 | @It is half of 5 | !
\$5 | @It costs 5 cents. | !
30^\circ | @The angle is 30 radians. | !
3 | @It is \frac{1}{3} | !
3 | @It is \sqrt{3} | !
3 | @It is 5^3 | !
345 | @It is 12 345. | !
2 | @The ratio is 1 to 2. | !
5 | @So 2 + 3 = 5. | =
5 | @It is **5**. | =
# equations to be solved
5 | 2x=5 | !
5 | -x=5 | !
5 | x^2=5 | !
5 | 1/x=5 | !
2 | \log x=2 | !
5 | x=5 | =
5 | f(2)=5 | =
5 | m+n=5 | =
# roundings
2\sqrt{3} | 2\sqrt{3}\approx 3.46 | =
2\sqrt{3} | x = 2\sqrt{3}\approx 3.46 | =
2\sqrt{3} | \sqrt{12} = 2\sqrt{3} \approx 3.464 | =
2\sqrt{3} | 2\sqrt{3}\approx 5 | !
2\sqrt{3} | 3\sqrt{2}\approx 4.24 | !
2\sqrt{3} | 3.46 | !
2\sqrt{3} | x \approx 3.46 | !
3.46 | 2\sqrt{3}\approx 3.46 | =
\pi | \pi \approx 3.14 | =
\frac{1}{3} | \frac13 \approx 0.33 | =
\frac{1}{3} | \frac13 \approx 0.4 | !
2\sqrt{3}\text{ cm} | 2\sqrt{3}\approx 3.46\text{ cm} | =
# sets
\{x \mid x<3\} | \{x \mid x<3\} | =
\{x \mid x<3\} | x<3 | =
x<3 | \{x \mid x<3\} | =
x<3 | \{x : x > 3\} | !
(-\infty,3) | \{x \mid x<3\} | =
(-\infty,3) | \{x \in \mathbb{R} \mid x<3\} | =
(-\infty,3) | \{x \mid x \leq 3\} | !
(-\infty,3) | \{x \in \mathbb{Z} \mid x<3\} | !
\mathbb{R} | \text{all real numbers} | =
\mathbb{R} | all reals | =
\mathbb{R} | ℝ | =
\mathbb R | x \in \mathbb{R} | =
\text{all real numbers} | (-\infty,\infty) | =
(-\infty,\infty) | \text{all real numbers} | =
\mathbb{R} | \text{all integers} | !
# ratios and times
1:2 | 1 to 2 | =
1:2 | 1\text{ to }2 | =
1:2 | 2 to 1 | !
1:2 | @The answer is 1 to 2. | =
1:2:3 | 1 to 2 to 3 | =
1:2 | 2:4 | =
8:30 a.m. | 8:30 a.m. | =
8:30 a.m. | @The answer is 8:30 a.m. | =
8:30 a.m. | @So the train arrives at 8:30 a.m. | =
8:30\text{ a.m.} | 8:30 AM | =
8:30\text{ a.m.} | 08:30 am | =
8:30 a.m. | 8:30 | =
8:30 | 8:30 a.m. | =
8:30 a.m. | 8:30 p.m. | !
8:30 | 4:15 | !
5 p.m. | 5:00 p.m. | =
# spaces
12345 | 12\;345 | =
12345 | 12\,345 | =
12345 | 12 345 | =
12345 | 12\ 345 | =
12345 | 12~345 | =
12345 | 1234\,5 | !
12345 | 1 2345 | !
1234567 | 1\,234\,567 | =
12 | 1\,2 | !
12 | 1 2 | !
72 | 7 2 | !
72 | @#### 7 2 | !
14 | 7 2 | !
x+72 | x+7 2 | !
3.141592 | 3.141\,592 | =
\log_2 3 | \log_2\,3 | =
\log_2 3 | \log_{23} | !
# tags
5 | @<answer>5</answer> | =
5 | @<answer> 5 </answer> since 2 + 3 | =
5 | @It is 7. <answer>The answer is $5$.</answer> | =
5 | @<think>6</think><answer>5 | =
5 | @<answer>6</answer> | !
5 | @<answer>6</answer> no: \boxed{5} | =
5 | @<answer>\boxed{5}</answer> | =
\text{Monday} | @<answer>Monday</answer> | =
\mathbb{R} | @<answer>all real numbers</answer> | =
5 | @<answer></answer> 5 | =
5 | @<think><answer>5</answer> | !
# huge numbers
\log_2 3 | 1e400 | !
\log_2 3 | 10^{999} | !
\log_2 3 | 10^{9} | !
\log_2 3 | \frac{\ln 3}{\ln 2} | =
\log_2 3 | 1.58496250072115618145373894394781650875981440769248 | !
\log_2 x | 10^{999} | !
\log_2 x | \frac{\ln x}{\ln 2} | =
x | 10^{9}\log 2 + x | !
\sqrt{2} | 10^{999} | !
10^{100}+1 | 10^{100} | !
10^{100}+1 | 1+10^{100} | =
"""


def _verdicts():
  section = ""
  for line in VERDICTS.strip().splitlines():
    if line.startswith("# "):
      section = line[2:]
      continue
    left, _, verdict = line.rpartition(" | ")
    gold, _, answer = left.partition(" | ")
    completion = answer[1:] if answer.startswith("@") else rf"So it is $\boxed{{{answer}}}$."
    yield pytest.param(gold, completion, verdict == "=", id=f"{section}: {left}")


@pytest.mark.parametrize(("gold", "completion", "right"), list(_verdicts()))
def test_a_careful_human_grader(gold, completion, right):
  grade = mathematics(completion, {"answer": gold})
  assert (grade.outcome is Outcome.CORRECT) is right, grade


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
QUICK_GOLDS = (
  "72", "7", "12345", r"7\text{ cm}", "7 cents", r"\$7", r"7^\circ", "x=7", "(7,7)",
  r"7\text{ K}", "7_2", r"\{7\}", "ABC", r"\text{(B) }7", r"7\%", "B", r"\angle ABC",
)  # fmt: skip
# math-verify compares each spelling with these.
SLOW_GOLDS = (
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
def test_a_huge_number_costs_little(gold):
  mathematics(r"\boxed{\frac{1}{\sqrt{2}}}", {"answer": r"\frac{\sqrt{2}}{2}"})  # imports sympy
  began = time.process_time()
  for answer in (
    "1e400",
    "1e-400",
    "10^{999}",
    "10^{12}",
    r"10^{999}\log 2",
    r"10^{9}\ln 3+x",
    "9" * 900,
  ):
    grade = mathematics(rf"\boxed{{{answer}}}", {"answer": gold})
    assert grade.outcome is Outcome.WRONG, (answer, grade)
  assert time.process_time() - began < 4
