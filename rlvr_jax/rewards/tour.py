"""Grader of the task `tour`: a walk on a grid that visits goals in order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlvr_jax.rewards.outcome import Grade, Outcome


def tour(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Checks a walk, one character per cell.

  Args:
    completion: the cells after the start; white space is left out.
    reference: "cells" (the names of a square grid's cells, row by row), "start", "goals" (in
      order), "walls", and "budget", the most cells that a walk may have.
  Returns:
    correct (score 1) if every cell is beside the one before and not a wall, the goals are visited
    in order, the last cell is the last goal, and there are at most "budget"; wrong (0) otherwise;
    unparseable if there is no cell, or another character.
  """
  walk, cells = "".join(completion.split()), reference["cells"]
  if not walk or set(walk) - set(cells):
    return Grade(Outcome.UNPARSEABLE, detail="not a list of cells")
  problem = _problem_of(walk, reference)
  if problem:
    return Grade(Outcome.WRONG, detail=problem, answer=walk)
  return Grade(Outcome.CORRECT, 1.0, answer=walk)


def _problem_of(walk: str, reference: Mapping[str, Any]) -> str:
  """What is wrong with a walk; "" if nothing is."""
  cells, left = reference["cells"], list(reference["goals"])
  width = math.isqrt(len(cells))
  at = divmod(cells.index(reference["start"]), width)
  for step, name in enumerate(walk, start=1):
    to = divmod(cells.index(name), width)
    if abs(to[0] - at[0]) + abs(to[1] - at[1]) != 1:
      return f"cell {step} is not beside the one before"
    if name in reference["walls"]:
      return f"cell {step} is a wall"
    at = to
    if left and name == left[0]:
      left.pop(0)
  if left:
    return f"{len(left)} goals are not visited in order"
  if walk[-1] != reference["goals"][-1]:
    return "the walk does not end on the last goal"
  if len(walk) > reference["budget"]:
    return f"{len(walk)} cells, {reference['budget']} are allowed"
  return ""
