"""Sources of problems: chosen from a list, generated on access, concatenated, or mixed."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence

import grain
import numpy as np

from rlvr_jax.data.problems import Problem, ProblemSource

_MAX_TRIES = 1000  # candidates tried to find a question not yet taken

Change = Callable[[Problem], Problem]


def question_key(question: str) -> str:
  """Key of a question; questions that differ only in white space have the same key."""
  return hashlib.sha256(" ".join(question.split()).encode()).hexdigest()[:16]


class QuestionKeys(Collection[str]):
  """Set of questions, stored as keys, to be excluded from other sources."""

  def __init__(self, keys: Collection[str]):
    self._keys = frozenset(keys)

  def __contains__(self, question: object) -> bool:
    return question_key(str(question)) in self._keys

  def __iter__(self) -> Iterator[str]:
    return iter(self._keys)

  def __len__(self) -> int:
    return len(self._keys)


class _Indexed:
  """Random access to problems, with checked bounds."""

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
  """A selection of a larger source's problems, read on access."""

  def __init__(self, read: Callable[[int], Problem], indices: np.ndarray, keys: np.ndarray):
    """Initializes the selection.

    Args:
      read: index in the larger source → problem.
      indices: i64[n], indices of the chosen problems in the larger source, in order.
      keys: U16[n], `question_key` of each problem's question.
    """
    self._read, self._indices, self._keys = read, indices, keys

  @classmethod
  def of(cls, problems: Sequence[Problem]) -> Chosen:
    """All problems of a list."""
    return cls.where(lambda problem: True, problems)

  @classmethod
  def where(cls, condition: Callable[[Problem], bool], source: ProblemSource) -> Chosen:
    """The problems of `source` that meet a condition; reads each problem once to check it."""
    matches = [
      (index, question_key(problem.question))
      for index in range(len(source))
      if condition(problem := source[index])
    ]
    indices, keys = zip(*matches, strict=True) if matches else ((), ())
    return cls(source.__getitem__, np.array(indices, np.int64), np.array(keys, str))

  def __len__(self) -> int:
    return len(self._indices)

  def _get(self, index: int) -> Problem:
    return self._read(int(self._indices[index]))

  def keys(self) -> frozenset[str]:
    """The keys of the problems' questions."""
    return frozenset(self._keys.tolist())

  def without(self, questions: QuestionKeys) -> Chosen:
    """The problems whose question is not in `questions`."""
    remaining = ~np.isin(self._keys, list(questions))
    return Chosen(self._read, self._indices[remaining], self._keys[remaining])

  def map(self, change: Change) -> Chosen:
    """The same problems, each passed through `change` when it is read."""
    return Chosen(lambda index: change(self._read(index)), self._indices, self._keys)


class Candidates:
  """Problems from one seed, with replacements for problems whose questions are taken.

  The replacements of candidate i are the candidates i + size, i + 2·size, and so on.
  """

  def __init__(self, generate: Callable[[int], Problem], size: int, what: str):
    """Initializes the candidates.

    Args:
      generate: index → problem; raises IndexError beyond the last problem.
      size: number of problems.
      what: what generates the candidates, for messages, such as "task guess".
    """
    self._generate = generate
    self._what = what
    self.size = size

  def first_not_in(self, taken: Collection[str], index: int) -> Problem:
    """The first of the candidates index, index + size, ... whose question is not in `taken`."""
    for k in range(_MAX_TRIES):
      try:
        problem = self._generate(index + k * self.size)
      except IndexError:  # some datasets have only `size` problems
        break
      if problem.question not in taken:
        return problem
    raise ValueError(
      f"no question left for problem {index} of {self.size}: {self._what} has too few distinct"
      f" questions ({len(taken)} are taken, {k + 1} candidates were tried). Lower the sizes or"
      " widen the settings."
    )

  def choose_distinct(self, taken: Collection[str] = ()) -> tuple[Problem, ...]:
    """Chooses `size` problems whose questions differ from one another and are not in `taken`."""
    questions = set(taken)
    problems = []
    for index in range(self.size):
      problems.append(self.first_not_in(questions, index))
      questions.add(problems[-1].question)
    return tuple(problems)


class Generated(_Indexed):
  """Problems generated on access; none has an excluded question."""

  def __init__(
    self, candidates: Candidates, excluded: Collection[str], change: Change = lambda p: p
  ):
    self._candidates, self._excluded, self._change = candidates, excluded, change

  def __len__(self) -> int:
    return self._candidates.size

  def _get(self, index: int) -> Problem:
    return self._change(self._candidates.first_not_in(self._excluded, index))

  def without(self, questions: QuestionKeys) -> Generated:
    """This source, but without `questions`; these must include all questions excluded so far."""
    return Generated(self._candidates, questions, self._change)

  def map(self, change: Change) -> Generated:
    """The same problems, each passed through `change` when it is generated."""
    return Generated(
      self._candidates, self._excluded, lambda problem: change(self._change(problem))
    )


class Concatenated(_Indexed):
  """Several sources, one after another."""

  def __init__(self, sources: Sequence[ProblemSource]):
    self._sources = sources
    self._ends = list(itertools.accumulate(len(source) for source in sources))

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def _get(self, index: int) -> Problem:
    source_index = bisect.bisect_right(self._ends, index)
    return self._sources[source_index][index - ([0] + self._ends)[source_index]]


def shuffle_endlessly(source: ProblemSource, seed: int) -> grain.MapDataset[Problem]:
  """Repeats the problems without end, in a new random order in each pass."""
  return grain.MapDataset.source(source).shuffle(seed=seed).repeat()


class Mixed(_Indexed):
  """Sources that are interleaved by weight; `shuffle_endlessly` orders each source."""

  def __init__(
    self,
    sources: Sequence[ProblemSource],
    weights: Sequence[float],
    seeds: Sequence[int],
    size: int,
  ):
    """Initializes the mixture.

    Args:
      sources: sources of problems; none is empty.
      weights: weight of each source, > 0; only ratios matter.
      seeds: seed of each source's order, in [0, 2³²).
      size: number of problems of the mixture.
    """
    self._sources = sources
    orders = [shuffle_endlessly(*pair) for pair in zip(sources, seeds, strict=True)]
    self._mixed = grain.MapDataset.mix(orders, list(weights))
    self._size = size

  def __len__(self) -> int:
    return self._size

  def _get(self, index: int) -> Problem:
    return self._mixed[index]


def listed_sources(source: ProblemSource) -> list[ProblemSource]:
  """The parts of a source that are fixed lists of problems, without parts generated on access."""
  if isinstance(source, Concatenated | Mixed):
    return [part for inner in source._sources for part in listed_sources(inner)]
  return [source] if isinstance(source, Chosen | Sequence) else []
