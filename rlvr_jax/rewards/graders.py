"""Graders of reasoning_gym and GSM8K, and what graders share: finding answers, parsing numbers."""

from __future__ import annotations

import decimal
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlvr_jax.rewards.outcome import Grade, Outcome

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_MARK = "####"  # GSM8K's convention: the final answer follows the last one

# Commas only as thousands separators; sign and $ in either order; a minus after a word or another
# number ("3-4") is an operator or a dash.
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_SIGN = r"(?:(?<![\w)])[-+]\$?|\$[-+]?)?"
NUMBER = rf"{_SIGN}(?:{DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_ANY_NUMBER = re.compile(NUMBER)
_ANSWER_MARKS = re.compile(rf"{ANSWER_MARK}|\\(?:boxed|fbox)")
_MARKED_NUMBER = re.compile(rf"{ANSWER_MARK}\s*({NUMBER})")


def opened_thought(prompt: str) -> str:
  """The start of a prompt's completions: "<think>" if the prompt ends with it, else ""."""
  return THINK_OPEN if prompt.rstrip().endswith(THINK_OPEN) else ""


def after_thinking(completion: str) -> str | None:
  """The text after the last "</think>" (all of it without one); None while a "<think>" is open."""
  rest = completion.rpartition(THINK_CLOSE)[2]
  return None if THINK_OPEN in rest else rest


def answer_part(completion: str) -> tuple[str | None, bool]:
  """(what `after_thinking` returns, or the content of its last answer tag; whether it is a tag's).

  A tag is "<answer>5</answer>", or "<answer>5" at the end. A box or "####" after it counts instead.
  """
  text = after_thinking(completion)
  _, tag, content = (text or "").rpartition("<answer>")
  inside, _, after = content.partition("</answer>")
  if not tag or not inside.strip() or _ANSWER_MARKS.search(after):
    return text, False
  return inside, True


def final_answer(completion: str) -> str:
  """The stripped text after the last "####", or all stripped text without one.

  Thoughts are left out; the answer is empty while a "<think>" is open. Of an answer tag only the
  content counts.
  """
  return (answer_part(completion)[0] or "").rpartition(ANSWER_MARK)[2].strip()


@functools.lru_cache(maxsize=64)
def _reasoning_gym_scorer(dataset: str, settings: str) -> Callable[[str, dict], float]:
  # Imported here: it takes a second, which the parent process and other graders need not spend.
  from reasoning_gym.factory import create_dataset

  return create_dataset(dataset, **json.loads(settings)).score_answer


def reasoning_gym(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Scores a completion by the dataset's own `score_answer`.

  Args:
    completion: the answer is the text after the last "####", otherwise all after any "</think>".
    reference: "dataset" (name), "settings" (its configuration fields; scoring reads some of them),
      "answer" and "metadata" (of the problem's entry).
  Returns:
    correct at score ≥ 1 (within 1e-9), wrong below, with the score kept; unparseable if empty.
    `answer` is the stripped text.
  """
  answer = final_answer(completion)
  if not answer:
    return Grade(Outcome.UNPARSEABLE, detail="empty answer")
  settings = json.dumps(reference.get("settings", {}), sort_keys=True)
  score_answer = _reasoning_gym_scorer(reference["dataset"], settings)
  entry = {"answer": reference["answer"], "metadata": reference["metadata"]}
  score = float(score_answer(answer, entry))
  outcome = Outcome.CORRECT if score >= 1 - 1e-9 else Outcome.WRONG
  return Grade(outcome, score, detail=answer, answer=answer)


def reasoning_gym_self_test() -> None:
  """Raises unless reasoning_gym is installed and tells a right answer from a wrong one."""
  reference = {"dataset": "gcd", "answer": "6", "metadata": {}}
  got = [reasoning_gym(text, reference).outcome for text in ("#### 6", "7")]
  if got != [Outcome.CORRECT, Outcome.WRONG]:
    raise RuntimeError(f"reasoning_gym graded the answers '6' and '7' to gcd = 6 as {got}")


def parse_number(text: str) -> decimal.Decimal:
  """A number as GSM8K writes it ("-$1,234.50") as an exact decimal.

  Raises:
    ValueError: the text is not one number.
  """
  if not _ANY_NUMBER.fullmatch(text):
    raise ValueError(f"{text!r} is not a number such as '72', '-1,234' or '$3.50'")
  return decimal.Decimal(text.replace(",", "").replace("$", ""))


def plain_decimal(value: decimal.Decimal) -> str:
  """The digits of a number, the same for equal numbers: "72" for 72, 072 and 72.00."""
  text = format(value, "f")
  if "." in text:
    text = text.rstrip("0").removesuffix(".")
  return "0" if text == "-0" else text


def _last_number(completion: str) -> str | None:
  text = answer_part(completion)[0] or ""
  found = _MARKED_NUMBER.findall(text) or _ANY_NUMBER.findall(text)
  return found[-1] if found else None


def gsm8k(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Compares the final number of a completion with the published one, exactly.

  Args:
    completion: its number is the last "#### number", otherwise the last number in the text; only
      what follows a "</think>" counts, and nothing while a "<think>" is open.
    reference: "answer", the final number as published (commas, sign and $ allowed).
  Returns:
    correct (score 1), wrong (0), or unparseable if the text has no number; `answer` is the number's
    digits, without commas, $ and trailing zeros.
  """
  number = _last_number(completion)
  if number is None:
    return Grade(Outcome.UNPARSEABLE, detail="no number")
  value = parse_number(number)
  outcome = Outcome.CORRECT if value == parse_number(reference["answer"]) else Outcome.WRONG
  score = float(outcome is Outcome.CORRECT)
  return Grade(outcome, score, detail=number, answer=plain_decimal(value))
