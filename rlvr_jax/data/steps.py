"""A task of sums and products in worked steps. Responses differ in length and share some lines."""

from __future__ import annotations

import functools
import random

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.seeded import make_seeded_task
from rlvr_jax.ops.checks import check_between, check_integer

_ERRORS = (-10, -2, -1, 1, 2, 10)


def steps(
  *,
  terms: int = 10,
  product_share: float = 0.2,
  wrong_step_share: float = 0.05,
  train_size: int = 1_000_000,
  warm_start_size: int = 4096,
  held_out_size: int = 256,
  train_seed: int = 1,
  warm_start_seed: int = 2,
  held_out_seed: int = 3,
) -> Task:
  """Makes a task of sums, worked out step by step; terms are digits or products of two digits.

  "3+4*5+6=" is worked out as "4*5=20", "3+20=23", "23+6=29", "#### 29". Some steps of
  demonstrations are wrong, and later steps continue from the wrong result. So a policy that
  imitates demonstrations is only sometimes right, and can learn to solve every problem. Only the
  number after "####" is graded.

  Args:
    terms: number of terms in a sum, ≥ 2.
    product_share: probability in [0, 1] that a term is a product.
    wrong_step_share: probability in [0, 1] that a step of a demonstration is wrong.
    train_size, warm_start_size, held_out_size, train_seed, warm_start_seed, held_out_seed: see
      `make_seeded_task` and `make_task`.
  Raises:
    ValueError: an argument is out of range, or there are too few different questions.
  """
  check_integer("steps", "terms", terms, low=2)
  check_between("steps", "product_share", product_share, low=0.0, high=1.0)
  check_between("steps", "wrong_step_share", wrong_step_share, low=0.0, high=1.0)
  draw = functools.partial(
    _draw_problem, terms=terms, product_share=product_share, wrong_step_share=wrong_step_share
  )
  return make_seeded_task(
    "steps",
    draw,
    "gsm8k",
    train_size=train_size,
    warm_start_size=warm_start_size,
    held_out_size=held_out_size,
    train_seed=train_seed,
    warm_start_seed=warm_start_seed,
    held_out_seed=held_out_seed,
  )


def _draw_problem(
  rng: random.Random, *, terms: int, product_share: float, wrong_step_share: float
) -> Problem:
  factors_by_term = []
  for _ in range(terms):
    num_factors = 2 if rng.random() < product_share else 1
    factors_by_term.append([rng.randint(1, 9) for _ in range(num_factors)])
  expression = "+".join("*".join(map(str, factors)) for factors in factors_by_term)
  answer = sum(
    factors[0] * factors[-1] if len(factors) > 1 else factors[0] for factors in factors_by_term
  )
  lines = []

  def write_step(text: str, value: int) -> int:
    if rng.random() < wrong_step_share:
      value = max(value + rng.choice(_ERRORS), 0)
    lines.append(f"{text}={value}")
    return value

  total = None
  for factors in factors_by_term:
    value = factors[0]
    if len(factors) > 1:
      value = write_step(f"{factors[0]}*{factors[1]}", factors[0] * factors[1])
    total = value if total is None else write_step(f"{total}+{value}", total + value)
  return Problem(
    question=f"{expression}=",
    answer=str(answer),
    solution="\n".join([*lines, f"#### {total}"]),
    reference={"dataset": "steps", "answer": str(answer)},
  )
