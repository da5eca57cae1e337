"""A curriculum: samples problems, or parts such as levels, by estimates of their solve rates."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlvr_jax.data.mixture import join_parts, order_seed
from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.sources import Change, Chosen, Concatenated, shuffle_endlessly
from rlvr_jax.ops.checks import check_between, check_choice

_MAX_PROBLEMS = 1_000_000  # each has an estimate
WEIGHTS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
  "learnable": lambda rate: 4 * rate * (1 - rate),
  "hard": lambda rate: 1 - rate,
}


def curriculum(
  *,
  parts: Mapping[str, Mapping[str, Any]],
  by: str = "problem",
  weight: str = "learnable",
  rate: float = 0.5,
  first: float = 0.5,
  floor: float = 0.05,
  seed: int = 0,
) -> Task:
  """Makes a task that samples problems by estimates of their solve rates.

  By default, problems with an estimate near 1/2 are sampled most often.

  With by = "problem" a cell is one problem; with by = "part" a cell is all problems of a part, such
  as a level. Every cell has an estimate p of its solve rate, initially `first`. A group of rollouts
  with the solve rate s updates it: p ← p + rate·(s − p). A batch samples cells with probabilities
  in proportion to max(w(p), floor), where `weight` chooses the function w. With by = "problem", no
  problem repeats within a batch. With by = "part", a part's problems come in a random order. When
  all have come once, they come in another order.

  Estimates are updated when sampling moves on to the next policy, so that all batches for a policy
  are drawn from the same estimates. The estimates are saved with every checkpoint, so a resumed run
  is bit-exact. In asynchronous runs, timing decides which policy samples a batch, so two
  asynchronous runs may differ.

  Args:
    parts: one or more parts, as for `mixture`.
    by: "problem" or "part".
    weight: "learnable", w(p) = 4·p·(1 − p); or "hard", w(p) = 1 − p.
    rate: step size of an estimate, in (0, 1]; with 1, only the last group counts.
    first: estimate of a cell before its first sample, in [0, 1].
    floor: lower bound of a weight, in (0, 1]; with 1, sampling is uniform.
    seed: seed of the parts' orders and, together with the run's seed, of the samples.
  Raises:
    ValueError: a number or name is not allowed, a part is not a task or is empty, or `by` is
      "problem" and there are more than 1 000 000 problems.
  Source: learnable: "Learning to Reason at the Frontier of Learnability" (arXiv:2502.12272); hard:
    "Kimi k1.5: Scaling Reinforcement Learning with LLMs" (arXiv:2501.12599), §2.3.
  """
  if not parts:
    raise ValueError("parts is empty: give at least one, {label: {'name': …, 'kwargs': …}}")
  check_choice("curriculum", "by", by, ("problem", "part"))
  check_choice("curriculum", "weight", weight, WEIGHTS)
  check_between("curriculum", "rate", rate, low=0.0, high=1.0, open_low=True)
  check_between("curriculum", "first", first, low=0.0, high=1.0)
  check_between("curriculum", "floor", floor, low=0.0, high=1.0, open_low=True)
  task, train = join_parts("curriculum", parts)
  if by == "problem" and len(task.train) > _MAX_PROBLEMS:
    raise ValueError(
      f"the parts have {len(task.train)} problems, but by = 'problem' allows at most"
      f" {_MAX_PROBLEMS}, since every problem has an estimate of its solve rate; set by = 'part',"
      " or lower train_size"
    )
  settings = Settings(by, weight, rate, first, floor, seed)
  return dataclasses.replace(task, train=Curriculum(dict(zip(parts, train, strict=True)), settings))


@dataclasses.dataclass(frozen=True)
class Settings:
  """Arguments of `curriculum`, without the parts."""

  by: str
  weight: str
  rate: float
  first: float
  floor: float
  seed: int


class Curriculum(Concatenated):
  """The problems of all parts, concatenated, and the settings by which they are sampled."""

  def __init__(self, parts: Mapping[str, Any], settings: Settings):
    """Initializes the curriculum; `parts` maps labels to sources, none of which is empty."""
    super().__init__(list(parts.values()))
    self.parts, self.settings = parts, settings

  def map(self, change: Change) -> Curriculum:
    """The problems, each passed through `change` when it is read."""
    parts = {label: source.map(change) for label, source in self.parts.items()}
    return Curriculum(parts, self.settings)

  def where(self, condition: Callable[[Problem], bool]) -> Curriculum:
    """The curriculum of the problems that meet a condition; drops parts without such problems."""
    parts = {label: Chosen.where(condition, source) for label, source in self.parts.items()}
    return Curriculum({label: source for label, source in parts.items() if source}, self.settings)


class _Drawn(NamedTuple):
  """A draw whose solve rates are not known yet."""

  version: int  # of the policy that samples it
  applied: int  # number of observed draws that its estimates have
  cells: list[int]
  metrics: dict[str, float]


class CurriculumDraws:
  """The draws of a curriculum, and the estimates by which problems are sampled."""

  def __init__(self, source: Curriculum, *, batch_size: int, seed: int):
    """Initializes the draws; arguments as in `problem_batches`.

    Raises:
      ValueError: `by` is "problem", and there are fewer problems than a batch takes.
    """
    self._source, self._batch_size, self._seed = source, batch_size, seed
    self._settings = source.settings
    self._by_part = self._settings.by == "part"
    cells = len(source.parts) if self._by_part else len(source)
    if not self._by_part and cells < batch_size:
      raise ValueError(
        f"a batch takes {batch_size} different problems, but the curriculum has only {cells}; lower"
        " config.batch.prompts, or set config.task.kwargs.by = 'part'"
      )
    seeds = [(part, order_seed(self._settings.seed, label)) for label, part in source.parts.items()]
    self._orders = [shuffle_endlessly(*pair) for pair in seeds] if self._by_part else []
    self._estimates = np.full(cells, self._settings.first, np.float32)
    self._visits = np.zeros(cells, np.int32)
    # (version, cells, solve rates) of observed draws, from number `_first` on; the estimates have
    # those before number `_applied`. Earlier ones are kept while the state of an open draw, which
    # was taken before they were applied, lacks them.
    self._observed: list[list[Any]] = []
    self._first = self._applied = 0
    self._drawn: dict[int, _Drawn] = {}

  def draw(self, draw: int, version: int) -> list[Problem]:
    """Samples the problems of a draw, see `Draws`.

    First, the method updates the estimates by the observed solve rates of earlier policies. It does
    not use solve rates of the current policy, so a draw does not depend on the progress of grading.
    """
    for earlier, cells, rates in self._since(self._applied):
      if earlier >= version:
        break
      for cell, rate in zip(cells, rates, strict=True):
        step = np.float32(self._settings.rate) * (np.float32(rate) - self._estimates[cell])
        self._estimates[cell] += step
      self._applied += 1
    cells = self._sample_cells(draw)
    problems = [self._next_problem(cell) for cell in cells]
    self._drawn[draw] = _Drawn(version, self._applied, cells, self._metrics(cells))
    return problems

  def observe(
    self, draw: int, solve_rates: np.ndarray, state: dict[str, Any]
  ) -> tuple[dict[str, Any], dict[str, float]]:
    drawn = self._drawn.pop(draw)
    pairs = [
      (cell, float(rate))
      for cell, rate in zip(drawn.cells, solve_rates, strict=True)
      if rate == rate
    ]
    self._observed.append([drawn.version, [c for c, _ in pairs], [rate for _, rate in pairs]])
    found = {**state, "observed": self._since(state.get("applied", self._applied))}
    lacked = min([self._applied, *(other.applied for other in self._drawn.values())])
    self._observed = self._since(lacked)
    self._first = max(lacked, self._first)
    return found, drawn.metrics

  def _since(self, number: int) -> list[list[Any]]:
    """The observed draws from a number on."""
    return self._observed[max(number - self._first, 0) :]

  def get_state(self) -> dict[str, Any]:
    arrays = {"estimates": _encode(self._estimates), "visits": _encode(self._visits)}
    return {**arrays, "applied": self._applied, "observed": self._since(self._applied)}

  def set_state(self, state: dict[str, Any]) -> None:
    self._estimates = _decode(state["estimates"], np.float32)
    self._visits = _decode(state["visits"], np.int32)
    self._observed = list(state["observed"])
    self._first = self._applied = state.get("applied", 0)

  def _sample_cells(self, draw: int) -> list[int]:
    """Samples the cells of a draw."""
    s = self._settings
    weights = np.maximum(WEIGHTS[s.weight](self._estimates.astype(np.float64)), s.floor)
    rng = np.random.default_rng((s.seed, self._seed, draw))
    if self._by_part:
      ends = np.cumsum(weights)
      chosen = np.searchsorted(ends, rng.random(self._batch_size) * ends[-1], side="right")
      return np.minimum(chosen, len(ends) - 1).tolist()
    # Gumbel top-k samples without repetition (arXiv:1903.06059).
    keys = np.log(weights) + rng.gumbel(size=len(weights))
    return np.argsort(-keys, kind="stable")[: self._batch_size].tolist()

  def _next_problem(self, cell: int) -> Problem:
    visit = int(self._visits[cell])
    self._visits[cell] += 1
    return self._orders[cell][visit] if self._by_part else self._source[cell]

  def _metrics(self, cells: Sequence[int]) -> dict[str, float]:
    """Metrics of a draw.

    If cells are parts: each part's share of the draw, and its estimate. If cells are problems: the
    mean estimate of the drawn problems, and the share of all problems that were ever drawn.
    """
    if not self._by_part:
      return {
        "curriculum/estimate": float(np.mean(self._estimates[np.asarray(cells)])),
        "curriculum/seen": float(np.mean(self._visits > 0)),
      }
    shares = np.bincount(cells, minlength=len(self._estimates)) / len(cells)
    return {
      f"curriculum/{name}/{label}": float(values[index])
      for index, label in enumerate(self._source.parts)
      for name, values in (("share", shares), ("estimate", self._estimates))
    }


def _encode(values: np.ndarray) -> str:
  little_endian = values.astype(values.dtype.newbyteorder("<"))
  return base64.b64encode(zlib.compress(little_endian.tobytes())).decode()


def _decode(text: str, dtype: Any) -> np.ndarray:
  data = zlib.decompress(base64.b64decode(text))
  return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype)
