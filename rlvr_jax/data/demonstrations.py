"""Step-by-step solutions of reasoning-gym problems, whose data sets have only answers.

Each function is named after its dataset and returns the solution of one entry, ending with
"#### answer". The text is terse, because a policy has to generate all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["chain_sum", "gcd", "letter_counting", "number_sorting", "spell_backward"]

Entry = Mapping[str, Any]  # "question", "answer" and "metadata", as reasoning-gym returns them


def _append_answer(steps: list[str], entry: Entry) -> str:
  return "\n".join([*steps, f"#### {entry['answer']}"])


def chain_sum(entry: Entry) -> str:
  """Writes running totals: 4 - 1 - 7 is "4-1=3", "3-7=-4"."""
  first, *rest = entry["metadata"]["expression"].split()
  total = int(first)
  steps = []
  for operator, term in zip(rest[::2], rest[1::2], strict=True):
    result = total + int(term) if operator == "+" else total - int(term)
    steps.append(f"{total}{operator}{term}={result}")
    total = result
  return _append_answer(steps, entry)


def gcd(entry: Entry) -> str:
  """Writes Euclid's algorithm step by step: "856%174=160", "174%160=14", ..."""
  first, *rest = entry["metadata"]["numbers"]
  steps = []
  divisor = first
  for number in rest:
    left, right = divisor, number
    while right:
      steps.append(f"{left}%{right}={left % right}")
      left, right = right, left % right
    divisor = left
  return _append_answer(steps, entry)


def letter_counting(entry: Entry) -> str:
  """Writes the running count after each word: "hundred 1", "thousand 2", ..."""
  letter = entry["metadata"]["target_letter"]
  steps = []
  count = 0
  for word in entry["metadata"]["span"]:
    count += word.lower().count(letter)
    steps.append(f"{word} {count}")
  return _append_answer(steps, entry)


def number_sorting(entry: Entry) -> str:
  """Writes a selection sort.

  A line has the next number of the sorted order, then the remaining numbers in input order.
  """
  remaining = list(entry["metadata"]["original_numbers"])
  steps = []
  for number in entry["metadata"]["sorted_numbers"]:
    remaining.remove(number)
    steps.append(f"{number} | {' '.join(remaining)}".rstrip())
  return _append_answer(steps, entry)


def spell_backward(entry: Entry) -> str:
  """Writes the letters separated by spaces, forward, then backward."""
  word = entry["metadata"]["word"]
  return _append_answer([" ".join(word), " ".join(reversed(word))], entry)
