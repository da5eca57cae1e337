"""Grader of the task `tour`: a walk on a grid that visits its goals in order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlvr_jax.rewards.outcome import Grade, Outcome


def tour(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Checks a walk, one character per cell.

  Args:
    completion: the cells after the start; white space is ignored.
    reference: "cells" (the names of a square grid's cells, row by row), "start", "goals" (in
      order), "walls", and "budget" (maximum number of cells in a walk).
  Returns:
    correct (score 1) if every cell is adjacent to the previous one and not a wall, the goals are
    visited in order, the last cell is the last goal, and the walk has at most "budget" cells; wrong
    (0) otherwise; unparseable if the completion has no cell, or a character that names no cell.
  """
  walk = "".join(completion.split())
  if not walk or set(walk) - set(reference["cells"]):
    return Grade(Outcome.UNPARSEABLE, detail="not a list of cells")
  mistake = _describe_mistake(walk, reference)
  if mistake:
    return Grade(Outcome.WRONG, detail=mistake, answer=walk)
  return Grade(Outcome.CORRECT, 1.0, answer=walk)


def _describe_mistake(walk: str, reference: Mapping[str, Any]) -> str:
  """The first mistake in a walk; "" if the walk is correct."""
  cells = reference["cells"]
  remaining_goals = list(reference["goals"])
  width = math.isqrt(len(cells))
  position = divmod(cells.index(reference["start"]), width)
  for step, name in enumerate(walk, start=1):
    target = divmod(cells.index(name), width)
    if abs(target[0] - position[0]) + abs(target[1] - position[1]) != 1:
      return f"cell {step} is not adjacent to the previous one"
    if name in reference["walls"]:
      return f"cell {step} is a wall"
    position = target
    if remaining_goals and name == remaining_goals[0]:
      remaining_goals.pop(0)
  if remaining_goals:
    return f"{len(remaining_goals)} goals are not visited in order"
  if walk[-1] != reference["goals"][-1]:
    return "the walk does not end on the last goal"
  if len(walk) > reference["budget"]:
    return f"{len(walk)} cells, at most {reference['budget']} are allowed"
  return ""
