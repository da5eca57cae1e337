"""The graders' verdicts on texts."""

import pytest

from rlvr_jax.data.reasoning_gym import TAKES_ONE_ANSWER
from rlvr_jax.rewards import Outcome, graders
from rlvr_jax.rewards.by_name import right_completion
from rlvr_jax.rewards.graders import gsm8k
from rlvr_jax.rewards.mathematics import mathematics


@pytest.mark.parametrize(
  ("completion", "answer"),
  [
    ("6 * 12 = 72\n#### 72", "72"),
    ("#### 1,234,567", "1234567"),
    ("#### 1234567", "1,234,567"),
    ("#### $72.00.", "72"),
    ("####-5", "-5"),
    ("#### -$1,000.50", "-1000.5"),
    ("#### $-5 apples", "-5"),
    ("#### 7, no: #### 8 (then\n9 follows)", "8"),  # the last mark wins over a later number
    ("#### 7 km/h\n#### Note 1", "7"),
    ("#### - 18", "-18"),
    ("#### 9 500", "9500"),
    ("#### 60 %", "60"),
    ("#### unknown. Perhaps 5", "5"),  # a mark without a number does not count
    ("She has 3 and then 72.", "72"),
    ("from 3-4", "4"),  # a dash
    ("(12)-4", "4"),
    ("x=-4", "-4"),
    (".5", "0.50"),
    ("0.1000000000000000000001", "0.1000000000000000000001"),
    ("1" * 5000, "1" * 5000),
    ("It is \u22123", "-3"),
    ("####\u20133", "-3"),
    ("from 3\u20134", "4"),  # a dash
    ("9{,}500", "9500"),
    (r"x = 1{,}\,009\,500", "1009500"),
    (r"9,\! 500", "9500"),
    ("9\u2009500.5", "9500.5"),
    ("9\u202f500", "9500"),
    ("9 500", "500"),  # may be two numbers
    ("3.\u00a0500", "500"),
    ("#### 72", 72),
    ("72", 72.0),
    ("-0.5", -0.5),
    ("72", "6 * 12 = 72\n#### 72"),
    ("-9500", "x = 1 #### \u22129{,}500"),
    ("18", "18."),
    ("$18", "$18 per day"),
  ],
)
def test_gsm8k_correct(completion, answer):
  grade = graders.gsm8k(completion, {"answer": answer})
  assert (grade.outcome, grade.score) == (Outcome.CORRECT, 1.0), grade


@pytest.mark.parametrize(
  ("completion", "answer"),
  [
    ("#### 72", "-72"),
    ("#### 72.01", "72"),
    ("1,2345", "12345"),  # not a thousands separator
    ("\u22123", "3"),
    ("9{,}500", "500"),
    (r"9\,500", "500"),
    ("#### - 18", "18"),
    ("#### 9 500", 500),
    ("72 #### 73", "72"),
    ("0.1000000000000000000001", "0.1"),  # equal as floats
  ],
)
def test_gsm8k_wrong(completion, answer):
  grade = graders.gsm8k(completion, {"answer": answer})
  assert (grade.outcome, grade.score) == (Outcome.WRONG, 0.0), grade


@pytest.mark.parametrize(
  ("texts", "answer"),
  [
    (["72", "#### $72.00.", "072", "+72"], "72"),
    (["-1,234.50", "-$1234.5"], "-1234.5"),
    (["0", "-0.00", ".0"], "0"),
    (["1" * 5000], "1" * 5000),
    (["0.1000000000000000000001"], "0.1000000000000000000001"),
  ],
)
def test_gsm8k_answers_for_votes(texts, answer):
  assert [graders.gsm8k(text, {"answer": "5"}).answer for text in texts] == [answer] * len(texts)


@pytest.mark.parametrize("completion", ["", "####", "no number here", "٣"])
def test_gsm8k_unparseable(completion):
  assert graders.gsm8k(completion, {"answer": "3"}).outcome is Outcome.UNPARSEABLE


@pytest.mark.parametrize(
  "line",
  ["1/3", "1e6", "1 million", "1k", "1 or 20", "1+3=5", "1 1/2", "1½", "1²", "1 half", "1,2345"],
)
def test_gsm8k_reads_one_number_after_the_mark_or_none(line):
  grades = [graders.gsm8k(f"#### {line}", {"answer": gold}) for gold in ("1", "3", "5", "20", "6")]
  assert {grade.outcome for grade in grades} == {Outcome.UNPARSEABLE}
  assert repr(line) in grades[0].detail


@pytest.mark.parametrize(
  "answer",
  ["seven", "", "10:30", "1/2", "1 million", "3 or 4", True, None, float("nan"), [72], {"a": 72}],
)
@pytest.mark.parametrize("completion", ["7", "no answer"])
def test_gsm8k_bad_reference(completion, answer):
  with pytest.raises(ValueError, match=r"answer .* is not one number"):
    graders.gsm8k(completion, {"answer": answer})


def _spell_backward(completion, **settings):
  reference = {"dataset": "spell_backward", "answer": "tac", "metadata": {"word": "cat"}}
  return graders.reasoning_gym(completion, reference | {"settings": settings})


@pytest.mark.parametrize(
  "completion", ["tac", "  tac\n", "c a t\nt a c\n#### tac", "#### x #### tac "]
)
def test_reasoning_gym_correct(completion):
  grade = _spell_backward(completion, min_word_len=3)
  assert (grade.outcome, grade.score, grade.detail) == (Outcome.CORRECT, 1.0, "tac")
  assert grade.answer == "tac"


def test_reasoning_gym_keeps_the_partial_score():
  grade = _spell_backward("#### tab")
  assert grade.outcome is Outcome.WRONG
  assert grade.score == pytest.approx(2 / 3)


@pytest.mark.parametrize("completion", ["", "  \n", "tac ####", "tac #### \n"])
def test_reasoning_gym_unparseable(completion):
  assert _spell_backward(completion).outcome is Outcome.UNPARSEABLE


def test_reasoning_gym_scores_with_the_settings():
  """decimal_arithmetic tolerates one unit in the last place, and the places are a setting."""
  reference = {"dataset": "decimal_arithmetic", "answer": "1.500", "metadata": {}}
  for places, outcome in ((2, Outcome.CORRECT), (4, Outcome.WRONG)):
    settings = {"min_num_decimal_places": 1, "max_num_decimal_places": places}
    grade = graders.reasoning_gym("1.505", reference | {"settings": settings})
    assert grade.outcome is outcome, (places, grade)


def _graded(dataset, answer, text, metadata=()):
  reference = {"dataset": dataset, "answer": answer, "metadata": dict(metadata)}
  return graders.reasoning_gym(text, reference).outcome


@pytest.mark.parametrize(
  ("dataset", "answer", "text", "metadata"),
  [
    ("boxnet", None, "[3]", {"initial_state": {}}),
    ("game_of_life", "[[1]]", "{}", {}),
    ("prime_factorization", "2 × 3", "no answer", {}),
    ("coin_flip", "0.3125", "1e999", {}),
    ("coin_flip", "0.3125", "1" * 400, {}),
  ],
)
def test_an_answer_on_which_a_verifier_raises_is_wrong(dataset, answer, text, metadata):
  assert _graded(dataset, answer, text, metadata) is Outcome.WRONG


@pytest.mark.parametrize("text", ["nan", "NaN + 2i", "nanj", "inf", "-Infinity", "1e400", "many"])
def test_what_is_no_finite_number_is_wrong_where_one_is_asked(text):
  assert _graded("complex_arithmetic", "3.0 + 4.0i", text, {"result": (3, 4)}) is Outcome.WRONG
  assert _graded("complex_arithmetic", "3.0 + 4.0i", "3+4i", {"result": (3, 4)}) is Outcome.CORRECT
  assert _graded("spell_backward", "nan", "nan", {"word": "nan"}) is Outcome.CORRECT
  base_16 = {
    "source_base": 10,
    "target_base": 16,
    "source_repr": "6169184",
    "target_repr": "5e2260",
  }
  assert _graded("base_conversion", "5e2260", "5e2260", base_16) is Outcome.CORRECT


@pytest.mark.parametrize(
  ("dataset", "answer", "right", "wrong"),
  [
    ("coin_flip", "0.3125", ["0.3125", "5/16", "0.31251"], ["0", "-0", "0.3", "0.", "3"]),
    ("coin_flip", "0.0009765625", ["1/1024"], ["0", "0.0"]),
    ("game_of_life_halting", "False", ["False", "false."], ["True", "x", "0", "True or False"]),
    ("game_of_life_halting", "True", ["True"], ["False", "nan", "no answer"]),
  ],
)
def test_a_prefix_or_any_text_is_not_the_answer(dataset, answer, right, wrong):
  assert {_graded(dataset, answer, text) for text in right} == {Outcome.CORRECT}
  assert {_graded(dataset, answer, text) for text in wrong} == {Outcome.WRONG}


@pytest.mark.slow
def test_verifiers_that_take_one_answer_for_every_problem_are_known():
  """Of datasets whose own answers differ; and none crashes, or refuses its own answer."""
  factory = pytest.importorskip("reasoning_gym.factory")
  texts = "0 1 -1 nan inf 1e999 x yes True False None [] [3] {} () nanj 1/0".split()
  constant, refused = [], []
  for name in sorted(factory.DATASETS.keys() - {"composite"}):
    problems = factory.create_dataset(name, seed=7, size=8)
    references = [{"dataset": name, **problems[i]} for i in range(8)]
    answers = {reference["answer"] for reference in references}
    for text in [*texts, *answers]:
      outcomes = {
        graders.reasoning_gym(f"#### {text}", reference).outcome for reference in references
      }
      if outcomes == {Outcome.CORRECT} and len(answers) > 1:
        constant.append((name, text))
    for reference in references:
      if reference["answer"] is not None:
        grade = graders.reasoning_gym(f"#### {reference['answer']}", reference)
        refused += [] if grade.outcome is Outcome.CORRECT else [(name, reference["answer"])]
  assert ({name for name, _ in constant}, refused) == (set(TAKES_ONE_ANSWER), [])


def test_self_test():
  graders.reasoning_gym_self_test()


@pytest.mark.parametrize(
  ("prompt", "opened"),
  [
    ("<|user|>1+1?<|assistant|><think>\n", "<think>"),
    ("Reason first.\n<think>", "<think>"),
    ("assistant\n<think>\n\n</think>\n\n", ""),
    ("Write <think> and </think> around your thoughts.", ""),
    ("Begin with <think>.", ""),
    ("1+1?", ""),
  ],
)
def test_whether_a_prompt_has_opened_a_thought(prompt, opened):
  assert graders.thought_prefix(prompt) == opened


@pytest.mark.parametrize(
  ("completion", "outcome"),
  [
    ("<think>it is 7", Outcome.UNPARSEABLE),
    ("<think>maybe 7\n#### 7\nWait,", Outcome.UNPARSEABLE),
    ("<think>#### 7</think>", Outcome.UNPARSEABLE),
    ("<think>#### 7</think> 8", Outcome.WRONG),
    ("<think>#### 8</think> 7", Outcome.CORRECT),
    ("<think>8</think> so\n#### 7", Outcome.CORRECT),
  ],
)
def test_thoughts_are_no_answers(completion, outcome):
  assert graders.gsm8k(completion, {"answer": "7"}).outcome is outcome
  reference = {"dataset": "gcd", "answer": "7", "metadata": {}}
  assert graders.reasoning_gym(completion, reference).outcome is outcome


@pytest.mark.parametrize("text", ["#### --5", "#### - -5", "#### +-5", "#### -$-5"])
def test_gsm8k_does_not_read_two_signs(text):
  assert gsm8k(text, {"answer": "5"}).outcome is Outcome.UNPARSEABLE
  with pytest.raises(ValueError, match="is not one number"):
    gsm8k("5", {"answer": text})


@pytest.mark.parametrize(
  ("name", "answer"),
  [
    ("gsm8k", 1e22),
    ("gsm8k", 5e-07),
    ("gsm8k", "She has 72.\n#### 72"),
    ("mathematics", r"We have $2x=10$, so the answer is $\boxed{5}$."),
    ("mathematics", "2 + 1 = 3.\n#### 3"),
    ("mathematics", "x" * 2000 + "\n#### 3"),
    ("mathematics", r"\frac12"),
  ],
)
def test_a_reference_that_is_a_solution_has_a_right_completion(name, answer):
  grade = {"gsm8k": gsm8k, "mathematics": mathematics}[name]
  reference = {"answer": answer}
  assert grade(right_completion(name, reference), reference).outcome is Outcome.CORRECT
