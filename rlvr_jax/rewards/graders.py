"""Graders of reasoning_gym and GSM8K; functions with which all graders find answers and numbers."""

from __future__ import annotations

import decimal
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlvr_jax.rewards.outcome import Grade, Outcome

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_MARK = "####"  # GSM8K's convention: the final answer follows the last mark

# Commas only separate thousands. Sign and $ may be in either order. A minus after a word or a
# number, as in "3-4", is an operator or a dash.
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_SIGN = r"(?:(?<![\w)])[-+]\$?|\$[-+]?)?"
NUMBER = rf"{_SIGN}(?:{DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_ANY_NUMBER = re.compile(NUMBER)
_ANSWER_MARKS = re.compile(rf"{ANSWER_MARK}|\\(?:boxed|fbox)")
_MARKED_NUMBER = re.compile(rf"[-+]?[ \t]*{NUMBER}")
_MINUS = str.maketrans("\u2212\u2013", "--")
# Other forms of the comma between digits: {,} and thin spaces, also LaTeX's thin spaces.
_SEPARATORS = re.compile(
  r"(?<=[0-9])(?:,|\{,\}|\\[,;:!] ?|\\ |[\u2009\u202f\u00a0])+(?=[0-9]{3}(?![0-9]))"
)
_SPACES = re.compile(r"(?<=[0-9]) (?=[0-9]{3}(?![0-9]))")  # in "9 500", which may be two numbers
_NUMERALS = re.compile(  # words that make another number of the one before them
  r"\b(?:hundred|thousand|lakh|crore|million|billion|trillion|dozen|hal[fv]e?|third|quarter|pi)s?\b"
  r"|(?<![A-Za-z])(?:[kKMB]|bn|mn)\b|π|√"
)


def thought_prefix(prompt: str) -> str:
  """The start of a prompt's completions: "<think>" if the prompt ends with it, else ""."""
  return THINK_OPEN if prompt.rstrip().endswith(THINK_OPEN) else ""


def strip_thought(completion: str) -> str | None:
  """Removes the text up to the last "</think>", if any; returns None while a "<think>" is open."""
  answer = completion.rpartition(THINK_CLOSE)[2]
  return None if THINK_OPEN in answer else answer


def find_answer_part(completion: str) -> tuple[str | None, bool]:
  """Finds the part of a completion that has the answer.

  The part is the content of the last answer tag, "<answer>5</answer>" or "<answer>5" at the end.
  Without a tag, or with a box or "####" after the tag, the part is all text that `strip_thought`
  returns.

  Returns:
    (the part, or None while a "<think>" is open; whether the part is the content of a tag).
  """
  text = strip_thought(completion)
  _, tag, content = (text or "").rpartition("<answer>")
  inside, _, after = content.partition("</answer>")
  if not tag or not inside.strip() or _ANSWER_MARKS.search(after):
    return text, False
  return inside, True


def extract_final_answer(completion: str) -> str:
  """Extracts the stripped text after the last "####"; without a "####", all stripped text.

  Thoughts are ignored; the answer is empty while a "<think>" is open. If there is an answer tag,
  only its content counts.
  """
  return (find_answer_part(completion)[0] or "").rpartition(ANSWER_MARK)[2].strip()


# Some verifiers of reasoning_gym compute with the answer. They accept NaN for any number, or fail.
_NUMERIC = re.compile(r"[-+*/.,%$() \d]*\d(?:[-+*/.,%$() \d]|[eEij](?![a-zA-Z]))*", re.ASCII)
_NOT_FINITE = re.compile(r"(?<![a-z])(?:nan|inf(?:inity)?)(?![a-ik-z])|\de\+?\d{3}", re.IGNORECASE)
_TRUTH = re.compile(r"\b(?:true|false)\b", re.IGNORECASE)
_TOLERANCE = 0.01  # relative; larger than the verifiers' tolerances, except in the last digit


def _is_finite(answer: str, gold: str) -> bool:
  """Whether an answer has a finite number; always True if the gold answer is not a number."""
  if not _NUMERIC.fullmatch(gold) or answer == gold:  # 5e260 may be a hexadecimal number
    return True
  return any(map(str.isdigit, answer)) and not _NOT_FINITE.search(answer)


def _may_be_right(answer: str, gold: str) -> bool:
  """Whether an answer that a verifier accepts may be right.

  Some verifiers accept any prefix of a number, or any text in place of true or false.
  """
  if answer == gold:
    return True
  if _TRUTH.fullmatch(gold):
    return {word.lower() for word in _TRUTH.findall(answer)} == {gold.lower()}
  value = _read_quotient(answer) if _NUMERIC.fullmatch(gold) else None
  expected = _read_quotient(gold)
  if value is None or expected is None:
    return True
  last_place = 10.0 ** -len(gold.partition(".")[2]) if "." in gold else 1.0
  return abs(value - expected) <= max(_TOLERANCE * abs(expected), last_place)


def _read_quotient(text: str) -> float | None:
  """The value of a number such as "0.5", "1,000" or "1/2"; None for any other text."""
  numerator, _, denominator = text.replace(",", "").partition("/")
  try:
    return float(numerator) / float(denominator or 1)
  except (ValueError, OverflowError, ZeroDivisionError):
    return None


@functools.lru_cache(maxsize=64)
def _load_reasoning_gym_scorer(dataset: str, settings: str) -> Callable[[str, dict], float]:
  # Imported here because the import takes a second; the parent process and other graders skip it.
  try:
    from reasoning_gym.factory import create_dataset
  except ImportError as error:
    raise ImportError(
      f'the grader reasoning_gym needs {error.name}: pip install "rlvr_jax[reasoning-gym]"'
    ) from error
  return create_dataset(dataset, **json.loads(settings)).score_answer


def reasoning_gym(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Scores a completion by the dataset's own `score_answer`.

  Args:
    completion: the answer is the text after the last "####", or, without a "####", all text after
      any "</think>".
    reference: "dataset" (name), "settings" (the dataset's configuration fields; scoring reads some
      of them), "answer" and "metadata" (of the problem's entry).
  Returns:
    correct at score ≥ 1 (within 1e-9), wrong below, in both cases with the dataset's score;
    unparseable if the answer is empty. The grade's `answer` is the stripped text of the answer. An
    answer is wrong with score 0 in three cases: the dataset's code fails on the answer; the answer
    has no finite number although the problem's answer is a number; or the dataset accepts the
    answer although its number or truth value differs from that of the problem's answer.
  """
  answer = extract_final_answer(completion)
  if not answer:
    return Grade(Outcome.UNPARSEABLE, detail="empty answer")
  settings = json.dumps(reference.get("settings", {}), sort_keys=True)
  score_answer = _load_reasoning_gym_scorer(reference["dataset"], settings)
  entry = {"answer": reference["answer"], "metadata": reference["metadata"]}
  gold = str(entry["answer"])
  problem = "" if _is_finite(answer, gold) else "not a finite number"
  try:
    score = 0.0 if problem else float(score_answer(answer, entry))
  except MemoryError:
    raise
  except Exception as error:  # with other answers it works: a run's start tries the problem's own
    score, problem = 0.0, f"{type(error).__name__}: {error}"
  is_correct = score >= 1 - 1e-9
  if is_correct and not _may_be_right(answer, gold):
    score, problem, is_correct = 0.0, f"the dataset takes it, but not for {gold}", False
  detail = f"{answer} ({problem})" if problem else answer
  return Grade(Outcome.CORRECT if is_correct else Outcome.WRONG, score, detail, answer)


def reasoning_gym_self_test() -> None:
  """Raises an error unless reasoning_gym is installed and distinguishes right and wrong answers."""
  reference = {"dataset": "gcd", "answer": "6", "metadata": {}}
  outcomes = [reasoning_gym(text, reference).outcome for text in ("#### 6", "7")]
  if outcomes != [Outcome.CORRECT, Outcome.WRONG]:
    raise RuntimeError(
      "the self-test of reasoning_gym failed: for a greatest common divisor of 6, the answers 6 and"
      f" 7 must be graded correct and wrong, but were graded {outcomes}"
    )


def _unify_signs(text: str) -> str:
  """Writes minus signs as "-", and separators of thousands as commas."""
  return _SEPARATORS.sub(",", text.translate(_MINUS))


def _to_decimal(number: str) -> decimal.Decimal:
  """The exact value of a match of `NUMBER`."""
  return decimal.Decimal(re.sub(r"[,$\s]", "", number))


def _parse_line(line: str) -> decimal.Decimal | None:
  """The number at the beginning of a line; None without one, or if the line has another number."""
  line = _SPACES.sub(",", _unify_signs(line))
  number = _MARKED_NUMBER.match(line)
  rest = line[number.end() :] if number else ""
  if number is None or any(map(str.isnumeric, rest)) or _NUMERALS.search(rest):
    return None
  try:
    return _to_decimal(number[0])
  except decimal.InvalidOperation:  # two signs
    return None


def _parse_gold(answer: Any) -> decimal.Decimal:
  """The value of a reference's answer: a number in JSON, or a text that `gsm8k` describes.

  Raises:
    ValueError: the answer is not one number.
  """
  if isinstance(answer, str):
    value = _parse_line(answer.rpartition(ANSWER_MARK)[2].strip())
  else:
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    value = decimal.Decimal(str(answer)) if is_number else None
  if value is None or not value.is_finite():
    raise ValueError(
      f"the reference's answer {answer!r:.200} is not one number, such as 72, '-1,234', '$3.50' or"
      " '… #### 72'"
    )
  return value


def format_decimal(value: decimal.Decimal) -> str:
  """Formats a number so that equal numbers have the same text: "72" for 72, 072 and 72.00."""
  text = format(value, "f")
  if "." in text:
    text = text.rstrip("0").removesuffix(".")
  return "0" if text == "-0" else text


def _find_last_number(completion: str) -> tuple[decimal.Decimal | None, str]:
  """(a completion's final number, or None; the text that it was read from, "" if there is none)."""
  text = find_answer_part(completion)[0] or ""
  lines = [part.strip().partition("\n")[0] for part in text.split(ANSWER_MARK)[1:]]
  if marked := [line for line in lines if _MARKED_NUMBER.match(_unify_signs(line))]:
    return _parse_line(marked[-1]), marked[-1]
  numbers = _ANY_NUMBER.findall(_unify_signs(text))
  return (_to_decimal(numbers[-1]), numbers[-1]) if numbers else (None, "")


def gsm8k(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Compares the final number of a completion exactly with the published number.

  Args:
    completion: a text. Its final number follows the last "####" that stands directly before a
      number. This number must be the only number on its line; words such as a unit may follow.
      Without such a mark the answer is the last number in the text. Only the text after any
      "</think>" counts, and nothing counts while a "<think>" is open.
    reference: "answer": a number in JSON; a text with the final number as published (commas, sign
      and $ allowed; words such as a unit may follow); or a solution with such a number after its
      last "####".
  Returns:
    correct (score 1), wrong (0), or unparseable if the text has no number. `answer` is the number
    without commas, $ and trailing zeros.
  Raises:
    ValueError: the reference's answer is not one number.
  """
  gold = _parse_gold(reference["answer"])
  value, text = _find_last_number(completion)
  if value is None:
    problem = f"{text!r:.200} after {ANSWER_MARK!r} is not one number" if text else "no number"
    return Grade(Outcome.UNPARSEABLE, detail=problem)
  outcome = Outcome.CORRECT if value == gold else Outcome.WRONG
  score = float(outcome is Outcome.CORRECT)
  return Grade(outcome, score, detail=text, answer=format_decimal(value))
