"""A task of walks on a grid with walls. A walk visits goals in order; many answers are right."""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.seeded import make_seeded_task
from rlvr_jax.ops.checks import check_between, check_integer

CELLS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"  # in row-major order
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
  """Makes a task of walks that visit goals in order on a square grid; a response lists the cells.

  A cell is one character of `CELLS`. The question is the start, the goals in order, "|", the walls
  and "=". The response is the cells after the start. Each cell is a neighbor (above, below, left or
  right) of the previous cell, and the last cell is the last goal. Any walk that enters no wall and
  visits the goals in order is right if it has at most `longest` cells, and at most `slack` times
  the cells of a shortest walk. White space is ignored. Demonstrations have one line per goal, make
  detours, and may exceed the limit of `slack`.

  Args:
    width: width of the grid in cells, 3 … 8.
    walls: number of cells that cannot be entered, ≥ 0.
    goals: number of goals, ≥ 1.
    slack: most cells of a right walk, as a multiple of a shortest walk's cells, 1 … 60.
    longest: largest number of cells in a response.
    detour_share: probability in [0, 0.9] that a step of a demonstration goes to a random neighbor.
    train_size, warm_start_size, held_out_size, train_seed, warm_start_seed, held_out_seed: see
      `make_seeded_task` and `make_task`.
  Raises:
    ValueError: an argument is out of range, or no drawn problem satisfies the arguments.
  """
  check_integer("tour", "width", width, low=3, high=8)
  check_integer("tour", "goals", goals, low=1)
  check_integer("tour", "walls", walls, low=0, high=width**2 - goals - 1)
  check_between("tour", "slack", slack, low=1.0, high=60.0)
  check_integer("tour", "longest", longest, low=goals)
  check_between("tour", "detour_share", detour_share, low=0.0, high=0.9)
  draw = functools.partial(
    _draw_problem,
    width=width,
    walls=walls,
    goals=goals,
    slack=slack,
    longest=longest,
    detour_share=detour_share,
  )
  return make_seeded_task(
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


def _draw_problem(
  rng: random.Random,
  *,
  width: int,
  walls: int,
  goals: int,
  slack: float,
  longest: int,
  detour_share: float,
) -> Problem:
  for _ in range(_MAX_TRIES):
    blocked, start, *stops = _draw_cells(rng, width, walls, goals)
    rings_by_goal = [_rings(stop, width, blocked) for stop in stops]
    step_counts = [_step_count(*leg) for leg in zip([start, *stops], rings_by_goal, strict=False)]
    shortest = sum(longest + 1 if steps is None else steps for steps in step_counts)
    legs: list[list[int]] = []
    if shortest <= longest:
      legs = _draw_legs(rng, start, rings_by_goal, width, detour_share, longest)
    if legs:
      break
  else:
    raise ValueError(
      f"tour: with width = {width}, walls = {walls} and goals = {goals}, none of {_MAX_TRIES} drawn"
      f" problems got a walk of at most longest = {longest} cells; lower walls, goals or"
      " detour_share"
    )
  return Problem(
    question=f"{_letters([start, *stops])}|{_letters(sorted(blocked))}=",
    answer="",  # many answers are right
    solution="\n".join(map(_letters, legs)),
    reference={
      "dataset": "tour",
      "cells": CELLS[: width**2],
      "start": CELLS[start],
      "goals": _letters(stops),
      "walls": _letters(sorted(blocked)),
      "budget": min(int(slack * shortest), longest),
    },
  )


def _letters(cells: Iterable[int]) -> str:
  """The characters of cells."""
  return "".join(CELLS[cell] for cell in cells)


def _draw_cells(rng: random.Random, width: int, walls: int, goals: int) -> list:
  """Draws the walls, the start, and the goals, all different."""
  cells = rng.sample(range(width**2), walls + goals + 1)
  return [frozenset(cells[goals + 1 :]), *cells[: goals + 1]]


class _Grid(NamedTuple):
  """Neighbors of a grid's cells; a set of cells is an integer with one bit per cell."""

  neighbors: tuple[tuple[int, ...], ...]  # cell → its neighbors: above, below, left, right
  all: int
  first_column: int
  last_column: int


@functools.cache
def _grid(width: int) -> _Grid:
  def neighbors(cell: int) -> tuple[int, ...]:
    row, column = divmod(cell, width)
    positions = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return tuple(r * width + c for r, c in positions if 0 <= r < width and 0 <= c < width)

  first = sum(1 << row * width for row in range(width))
  cells = range(width**2)
  return _Grid(tuple(map(neighbors, cells)), (1 << width**2) - 1, first, first << width - 1)


def _rings(goal: int, width: int, walls: Collection[int]) -> list[int]:
  """Bit sets of the cells that are 0, 1, 2, … steps from a goal."""
  grid = _grid(width)
  unvisited = grid.all & ~sum(1 << cell for cell in walls)
  rings = []
  ring = 1 << goal
  while ring:
    rings.append(ring)
    unvisited &= ~ring
    rightwards = (ring & ~grid.last_column) << 1
    leftwards = (ring & ~grid.first_column) >> 1
    ring = (rightwards | leftwards | ring << width | ring >> width) & unvisited
  return rings


def _step_count(cell: int, rings: Sequence[int]) -> int | None:
  """The number of steps from a cell to the goal of `rings`; None if no path exists."""
  return next((steps for steps, ring in enumerate(rings) if ring >> cell & 1), None)


def _draw_legs(
  rng: random.Random,
  start: int,
  rings_by_goal: Sequence[Sequence[int]],
  width: int,
  detour_share: float,
  longest: int,
) -> list[list[int]]:
  """Draws the legs of a walk from goal to goal; [] if the walk needs more than `longest` cells.

  Args:
    rings_by_goal: `_rings` of each goal; the start must be connected to all goals.
  """
  grid = _grid(width)
  cell = start
  remaining = longest
  legs = []
  for rings in rings_by_goal:
    steps = _step_count(cell, rings) or 0
    reachable = sum(rings)
    legs.append(leg := list[int]())
    while steps and remaining:
      neighbors = [other for other in grid.neighbors[cell] if reachable >> other & 1]
      nearer = [other for other in neighbors if rings[steps - 1] >> other & 1]
      cell = rng.choice(neighbors if rng.random() < detour_share else nearer)
      steps += -1 if rings[steps - 1] >> cell & 1 else 1  # on a grid no other change is possible
      remaining -= 1
      leg.append(cell)
    if steps:
      return []
  return legs
