"""Walks on a grid with walls that visit goals in order: many right answers to every problem."""

from __future__ import annotations

import collections
import functools
import random
import string
from collections.abc import Collection

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.seeded import seeded_task
from rlvr_jax.data.task_utils import check_size, check_within

CELLS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"  # row by row
_MAX_TRIES = 1000


def tour(
  *,
  width: int = 8,
  walls: int = 12,
  goals: int = 4,
  slack: float = 1.5,
  longest: int = 60,
  detour_share: float = 0.15,
  train_size: int = 1_000_000,
  warm_start_size: int = 4096,
  held_out_size: int = 256,
  train_seed: int = 1,
  warm_start_seed: int = 2,
  held_out_seed: int = 3,
) -> Task:
  """Visit goals in order on a square grid; the response lists the cells walked.

  A cell is one character of `CELLS`. The question is the start, the goals in order, "|", the walls
  and "=". The response is the cells after the start, to neighbors above, below, left or right, and
  ends on the last goal. Any such walk counts if it has at most `slack` times the cells of a
  shortest one. Demonstrations make detours, and may exceed that.

  Args:
    width: of the grid, 3 … 8.
    walls: cells that cannot be entered, ≥ 0.
    goals: ≥ 1.
    slack: 1 … 60.
    longest: cells of a response, at most.
    detour_share: probability in [0, 0.9] that a step of a demonstration goes anywhere.
    train_size, warm_start_size, held_out_size, train_seed, warm_start_seed, held_out_seed: see
      `seeded_task`.
  Raises:
    ValueError: an argument is out of range, or no problem fits them.
  """
  # Over 60 lines: more than half is its arguments and what they mean.
  check_within("width", width, 3, 8)
  check_size("goals", goals, minimum=1)
  check_within("walls", walls, 0, width**2 - goals - 1)
  check_within("slack", slack, 1.0, 60.0)
  check_size("longest", longest, minimum=goals)
  check_within("detour_share", detour_share, 0.0, 0.9)
  draw = functools.partial(
    _problem,
    width=width,
    walls=walls,
    goals=goals,
    slack=slack,
    longest=longest,
    detour_share=detour_share,
  )
  return seeded_task(
    "tour",
    draw,
    "tour",
    train_size=train_size,
    warm_start_size=warm_start_size,
    held_out_size=held_out_size,
    train_seed=train_seed,
    warm_start_seed=warm_start_seed,
    held_out_seed=held_out_seed,
  )


def _problem(
  number: random.Random,
  *,
  width: int,
  walls: int,
  goals: int,
  slack: float,
  longest: int,
  detour_share: float,
) -> Problem:
  for _ in range(_MAX_TRIES):
    blocked, start, *stops = _places(number, width, walls, goals)
    towards = [_distances(stop, width, blocked) for stop in stops]
    legs = zip([start, *stops], towards, strict=False)
    shortest = sum(distances.get(cell, longest + 1) for cell, distances in legs)
    walk = (
      _walk(number, start, towards, width, detour_share, longest) if shortest <= longest else []
    )
    if walk:
      break
  else:
    raise ValueError(
      f"tour: no problem with width = {width}, walls = {walls} and goals = {goals} has a walk of at"
      f" most longest = {longest} cells in {_MAX_TRIES} tries; lower walls or goals"
    )
  name = lambda cells: "".join(CELLS[cell] for cell in cells)
  return Problem(
    question=f"{name([start, *stops])}|{name(sorted(blocked))}=",
    answer="",  # many are right
    solution=name(walk),
    reference={
      "dataset": "tour",
      "cells": CELLS[: width**2],
      "start": CELLS[start],
      "goals": name(stops),
      "walls": name(sorted(blocked)),
      "budget": min(int(slack * shortest), longest),
    },
  )


def _places(number: random.Random, width: int, walls: int, goals: int) -> list:
  """Walls, the start, and the goals: all different."""
  drawn = number.sample(range(width**2), walls + goals + 1)
  return [frozenset(drawn[goals + 1 :]), *drawn[: goals + 1]]


def _neighbors(cell: int, width: int) -> list[int]:
  row, column = divmod(cell, width)
  beside = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
  return [r * width + c for r, c in beside if 0 <= r < width and 0 <= c < width]


def _distances(goal: int, width: int, walls: Collection[int]) -> dict[int, int]:
  """Steps to a goal from every cell that has a way to it."""
  found, queue = {goal: 0}, collections.deque([goal])
  while queue:
    cell = queue.popleft()
    for other in _neighbors(cell, width):
      if other not in found and other not in walls:
        found[other] = found[cell] + 1
        queue.append(other)
  return found


def _walk(
  number: random.Random,
  start: int,
  towards: list[dict[int, int]],
  width: int,
  detour_share: float,
  longest: int,
) -> list[int]:
  """A walk from the start through the goals; [] if it takes more than `longest` cells."""
  cell, walk = start, list[int]()
  for distances in towards:
    while distances[cell] and len(walk) < longest:
      beside = [other for other in _neighbors(cell, width) if other in distances]
      nearer = [other for other in beside if distances[other] < distances[cell]]
      cell = number.choice(beside if number.random() < detour_share else nearer)
      walk.append(cell)
    if distances[cell]:
      return []
  return walk
