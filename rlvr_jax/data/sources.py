"""Sources of problems: chosen from a list, drawn when asked for, one after another, and mixed."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence

import grain
import numpy as np

from rlvr_jax.data.problems import Problem, ProblemSource

_MAX_DRAWS = 1000  # tries to find a question that is not taken; enough unless there is none

Change = Callable[[Problem], Problem]


def question_key(question: str) -> str:
  """The same for questions that differ in white space alone."""
  return hashlib.sha256(" ".join(question.split()).encode()).hexdigest()[:16]


class QuestionKeys(Collection[str]):
  """Questions by their keys, to be kept out of other sources."""

  def __init__(self, keys: Collection[str]):
    self._keys = frozenset(keys)

  def __contains__(self, question: object) -> bool:
    return question_key(str(question)) in self._keys

  def __iter__(self) -> Iterator[str]:
    return iter(self._keys)

  def __len__(self) -> int:
    return len(self._keys)


class _Indexed:
  """Random access with bounds."""

  def __len__(self) -> int:
    raise NotImplementedError

  def _get(self, index: int) -> Problem:
    raise NotImplementedError

  def __getitem__(self, index: int) -> Problem:
    index = operator.index(index)
    if not 0 <= index < len(self):
      raise IndexError(f"index {index} is out of range for {len(self)} problems")
    return self._get(index)


class Chosen(_Indexed):
  """Some problems of a larger source, read when they are asked for."""

  def __init__(self, read: Callable[[int], Problem], indices: np.ndarray, keys: np.ndarray):
    """Chooses.

    Args:
      read: index in the larger source → problem.
      indices: i64[n], of the chosen ones, in order.
      keys: U16[n], `question_key` of each.
    """
    self._read, self._indices, self._keys = read, indices, keys

  @classmethod
  def of(cls, problems: Sequence[Problem]) -> Chosen:
    """All of a list."""
    return cls.where(lambda problem: True, problems)

  @classmethod
  def where(cls, condition: Callable[[Problem], bool], source: ProblemSource) -> Chosen:
    """Those of another source that meet a condition; each is read once for it."""
    found = [
      (index, question_key(problem.question))
      for index in range(len(source))
      if condition(problem := source[index])
    ]
    indices, keys = zip(*found, strict=True) if found else ((), ())
    return cls(source.__getitem__, np.array(indices, np.int64), np.array(keys, str))

  def __len__(self) -> int:
    return len(self._indices)

  def _get(self, index: int) -> Problem:
    return self._read(int(self._indices[index]))

  def keys(self) -> frozenset[str]:
    """Of their questions."""
    return frozenset(self._keys.tolist())

  def without(self, questions: QuestionKeys) -> Chosen:
    """Those whose question is none of these."""
    keep = ~np.isin(self._keys, list(questions))
    return Chosen(self._read, self._indices[keep], self._keys[keep])

  def changed(self, change: Change) -> Chosen:
    """The same, each changed when it is read."""
    return Chosen(lambda index: change(self._read(index)), self._indices, self._keys)


class Draws:
  """Draws 0, 1, ... of one seed; draws i + k·size stand by to replace draw i."""

  def __init__(self, draw: Callable[[int], Problem], size: int, what: str):
    """Takes the generator.

    Args:
      draw: index → problem; IndexError where there are no more.
      size: problems.
      what: names them in messages.
    """
    self._draw = draw
    self._what = what
    self.size = size

  def first_not_in(self, taken: Collection[str], index: int) -> Problem:
    """The first of draws index + k·size, k = 0, 1, ..., whose question is not taken."""
    for k in range(_MAX_DRAWS):
      try:
        problem = self._draw(index + k * self.size)
      except IndexError:  # some datasets have only `size` problems
        break
      if problem.question not in taken:
        return problem
    raise ValueError(
      f"no question left for problem {index} of {self.size}: {self._what} has too few distinct "
      f"ones ({len(taken)} are taken, tried {k + 1}). Lower the sizes or widen the settings."
    )

  def distinct(self, taken: Collection[str] = ()) -> tuple[Problem, ...]:
    """`size` problems whose questions all differ, from the taken ones too."""
    questions = set(taken)
    problems = []
    for index in range(self.size):
      problems.append(self.first_not_in(questions, index))
      questions.add(problems[-1].question)
    return tuple(problems)


class Drawn(_Indexed):
  """Problems drawn on access, never one with an excluded question."""

  def __init__(self, draws: Draws, excluded: Collection[str], change: Change = lambda p: p):
    self._draws, self._excluded, self._change = draws, excluded, change

  def __len__(self) -> int:
    return self._draws.size

  def _get(self, index: int) -> Problem:
    return self._change(self._draws.first_not_in(self._excluded, index))

  def without(self, questions: QuestionKeys) -> Drawn:
    """The same with these excluded, which are to hold those excluded before."""
    return Drawn(self._draws, questions, self._change)

  def changed(self, change: Change) -> Drawn:
    """The same, each changed when it is drawn."""
    return Drawn(self._draws, self._excluded, lambda problem: change(self._change(problem)))


class Concatenated(_Indexed):
  """Sources one after another."""

  def __init__(self, sources: Sequence[ProblemSource]):
    self._sources = sources
    self._ends = list(itertools.accumulate(len(source) for source in sources))

  def __len__(self) -> int:
    return self._ends[-1]

  def _get(self, index: int) -> Problem:
    which = bisect.bisect_right(self._ends, index)
    return self._sources[which][index - ([0] + self._ends)[which]]


class Mixed(_Indexed):
  """Sources interleaved by their weights.

  Each is gone through in a random order without repetition, then again in another order.
  """

  def __init__(
    self,
    sources: Sequence[ProblemSource],
    weights: Sequence[float],
    seeds: Sequence[int],
    size: int,
  ):
    """Mixes.

    Args:
      sources: none of them empty.
      weights: > 0; their ratios count.
      seeds: of each source's order, in [0, 2³²).
      size: problems, of the mixture.
    """
    orders = [
      grain.MapDataset.source(source).shuffle(seed=seed).repeat()
      for source, seed in zip(sources, seeds, strict=True)
    ]
    self._mixed = grain.MapDataset.mix(orders, list(weights))
    self._size = size

  def __len__(self) -> int:
    return self._size

  def _get(self, index: int) -> Problem:
    return self._mixed[index]
