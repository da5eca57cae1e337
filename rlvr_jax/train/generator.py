"""Draws graded batches from a behaviour policy, keeps each in the store, and gives them on."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.data import problem_batches
from rlvr_jax.models.flops import forward_flops
from rlvr_jax.ops.keys import key_for
from rlvr_jax.rollouts.collect import Collector, Generation, Graded, join, keep_mixed_groups
from rlvr_jax.rollouts.drawn import FOREIGN, Drawn, from_shard, to_shard
from rlvr_jax.rollouts.store import RolloutStore, TornShardError
from rlvr_jax.train import components, multihost
from rlvr_jax.train.host import alive
from rlvr_jax.train.metrics import say
from rlvr_jax.train.sources import Source, max_gap
from rlvr_jax.types import Array, Params, Prompts, Rollouts

_ABSENT, _WHOLE = "", "whole"  # states of a batch in the store


class DynamicSamplingError(RuntimeError):
  """A batch could not be filled with groups that carry a signal."""


class AgreementError(RuntimeError):
  """The sampler and the trainer compute different log-probabilities from the same parameters."""


class Behavior(NamedTuple):
  """A policy as it was handed over for drawing rollouts."""

  params: Params
  version: int  # updates behind it
  checksums: Array  # u32[leaves], on the devices, see `fingerprint`
  of_source: tuple[Params, ...]  # what each source samples with

  @property
  def fingerprint(self) -> str:
    return fingerprint(self.checksums)


def fingerprint(checksums: Array) -> str:
  """Sixteen hexadecimal digits that tell parameters apart, from `parts.checksums(params)`."""
  data = np.asarray(components.sharding.to_host(checksums)).astype("<u4").tobytes()
  return hashlib.sha256(data).hexdigest()[:16]


class _Draw(NamedTuple):
  """A batch on its way."""

  behavior: Behavior
  number: int
  generation: Generation | None  # None: all groups are recorded
  recorded: Graded | None
  after: dict[str, Any]
  dispatched: float  # seconds, of the host's clock


class _Grading(NamedTuple):
  draw: _Draw
  submitted: tuple[Any, ...]  # what `Collector.finish` takes after the generation
  timings: dict[str, float]


class Generator:
  """Batches in their order, drawn or, where the store has them already, read.

  Attributes:
    number: of the next batch.
    version: of the policy that drew the last one.
    free_from: seconds of the host's clock: when the devices last ended something else.
    on_dispatch: called when the devices have got something to generate.
  """

  def __init__(self, parts: components.Parts, collector: Collector, store: RolloutStore):
    c = self.config = parts.config
    self.parts, self.collector, self.store = parts, collector, store
    self.quotas = [source.prompts for source in parts.sources]  # groups of every batch
    # Recorded groups, where there are any, are the last of a batch.
    self.live = [source for source in parts.sources if source.recorded is None]
    self.num_live = sum(source.prompts for source in self.live)
    self.num_recorded = sum(self.quotas) - self.num_live
    self.recorded = parts.sources[-1].recorded
    # One problem at a time where all are recorded: its position is there, and is not used.
    self.problems = problem_batches(
      parts.task.train, batch_size=max(self.num_live, 1), seed=c.seed
    )
    self.number = self.draws = self.version = 0
    self.checked_version = -1  # whose log-probabilities were last compared
    self.free_from = 0.0
    self.on_dispatch: Callable[[], None] = lambda: None

  def state(self) -> dict[str, Any]:
    """What determines the batches to come; JSON."""
    return {
      "number": self.number,
      "draws": self.draws,
      "checked_version": self.checked_version,
      "problems": self.problems.get_state(),
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """The inverse of `state`."""
    self.number, self.draws = state["number"], state["draws"]
    self.checked_version = state["checked_version"]
    self.problems.set_state(state["problems"])

  def hand_over(self, params: Params, version: int) -> Behavior:
    """The policy after `version` updates, as what rollouts are drawn from."""
    params = self.parts.hand_over(params, self.parts.schedule.real_time)
    of_source = tuple(source.params_of(params) for source in self.live)
    return Behavior(params, version, self.parts.checksums(params), of_source)

  def batches(
    self, next_behavior: Callable[[bool, Future | None], Behavior | None]
  ) -> Iterator[Drawn]:
    """Batches as they are graded; workers grade one while the devices generate the next.

    Args:
      next_behavior: the policy of the next batch; None where there is none to draw now, which ends
        the iteration if nothing is on its way. The arguments: whether it may wait for one, and
        grades at whose arrival it waits no longer.
    """
    generating: _Draw | None = None
    grading: _Grading | None = None
    while True:
      # A policy may come before the grades are there: graders need not run out of work.
      until = grades_of(grading)
      wait = generating is None and (grading is None or until is not None)
      behavior = next_behavior(wait, until)
      if behavior is None and generating is None and grading is None:
        return
      started = None
      if behavior is not None:
        if (state := self.stored()) != _ABSENT:
          # First those that are on their way: batches come in their order.
          if grading is not None:
            yield self.keep(self.finish(grading))
          if generating is not None:
            yield self.keep(self.finish(self.submit(generating)))
          generating = grading = None
          known = self.recall(state, behavior)
          if known is not None:
            yield known
            continue
        if self.config.dynamic_sampling.enabled:
          yield self.draw_mixed_groups(behavior)
          continue
        started = self.start(behavior)
      # Nothing that is graded waits for the devices.
      if grading is not None and until is not None and until.done():
        yield self.keep(self.finish(grading))
        grading = None
      submitted = self.submit(generating) if generating else None
      if grading is not None and (submitted is not None or started is None):
        yield self.keep(self.finish(grading))
        grading = None
      generating, grading = started, submitted or grading

  def stored(self) -> str:
    """Of the next batch: `_ABSENT`, `_WHOLE`, or what is wrong with it; the first process looks."""
    state = _ABSENT
    if multihost.is_first() and self.number in self.store.numbers():
      try:
        self.store.read(self.number)
        state = _WHOLE
      except TornShardError as error:
        state = str(error)
    return multihost.exchange(state)[0]

  def recall(self, state: str, behavior: Behavior | None = None) -> Drawn | None:
    """The next batch from the store; a damaged one is set aside.

    Args:
      state: of it, see `stored`.
      behavior: the policy that must have drawn it; None takes it whichever it was.
    """
    number = self.number
    if state != _WHOLE:
      self.set_aside(number, state)
      return None
    drawn = from_shard(number, *self.store.read(number))
    if behavior is not None:
      found, wanted = (drawn.version, drawn.fingerprint), (behavior.version, behavior.fingerprint)
      if found != wanted:
        self.set_aside(
          number,
          f"rollouts {number} were drawn by version {found[0]} with fingerprint {found[1]}, not by"
          f" version {wanted[0]} with {wanted[1]}",
        )
        return None
    self.set_state(drawn.after)
    self.version = drawn.version
    return drawn

  def set_aside(self, number: int, why: str) -> None:
    """Takes a batch out of the store's order, so that it can be drawn again."""
    say(f"{why}; set aside, to be drawn again")
    multihost.on_first(lambda: self.store.set_aside(number), None)

  def start(self, behavior: Behavior) -> _Draw:
    """Dispatches the generation of one batch."""
    index, number = self.draws, self.number
    self.draws += 1
    self.number += 1
    self.version = behavior.version
    dispatched = time.perf_counter()
    generation = recorded = None
    if self.num_live:
      versions = self.versions(behavior)[: self.num_live].tolist()
      generation = self.collector.start(
        next(self.problems), lambda prompts: self.generate(behavior, prompts, index), versions
      )
    self.on_dispatch()
    if self.recorded is not None:
      recorded = self.recorded.take(index * self.num_recorded, self.num_recorded)
    return _Draw(behavior, number, generation, recorded, self.state(), dispatched)

  def versions(self, behavior: Behavior) -> np.ndarray:
    """i32[P], of every group of a batch; `FOREIGN` where no policy of this run draws it."""
    of_sources = [behavior.version if s.of_this_run else FOREIGN for s in self.parts.sources]
    return np.repeat(np.asarray(of_sources, np.int32), self.quotas)

  def generate(self, behavior: Behavior, prompts: Prompts, draw: int) -> list[Rollouts]:
    """Dispatches every source's share of the prompts; `draw` counts the calls."""
    first, others = (key_for(self.config.seed, purpose, draw) for purpose in ("rollout", "source"))
    rollouts, start = [], 0
    for index, (source, params) in enumerate(zip(self.live, behavior.of_source, strict=True)):
      assert source.generate is not None
      share = slice(start, start + source.prompts)
      mine = self.parts.to_generation(jax.tree.map(lambda x, share=share: x[share], prompts))
      key = jax.random.fold_in(others, index) if index else first
      rollouts.append(source.generate(params, mine, key))
      start += source.prompts
    return rollouts

  def submit(self, draw: _Draw) -> _Grading:
    """Waits for the rollouts and hands them to the graders."""
    if draw.generation is None:
      return _Grading(draw, (), {})
    submitted = self.collector.submit_grading(draw.generation)
    alive()
    now = time.perf_counter()
    seconds = now - max(draw.dispatched, self.free_from)
    self.free_from = now
    return _Grading(draw, submitted, {"time/generate_seconds": seconds})

  def finish(self, grading: _Grading) -> Drawn:
    """Waits for the grades and puts the batch together."""
    draw, timings, graded = grading.draw, grading.timings, grading.draw.recorded
    drawn_tokens = [] if draw.recorded is None else [draw.recorded.batch.mask]
    began = time.perf_counter()
    flops = 0.0
    if draw.generation is not None:
      own = self.collector.finish(draw.generation, *grading.submitted)
      timings["time/grade_seconds"] = time.perf_counter() - began
      lengths = draw.generation.prompts.lengths, grading.submitted[0].lengths
      positions = np.arange(own.batch.mask.shape[-1])
      drawn_tokens.insert(0, (positions < lengths[1][..., None]).astype(np.float32))
      flops = forward_flops(self.parts.model.config, *lengths)
      graded = with_recorded(own, draw.recorded) if draw.recorded else own
    assert graded is not None  # there are live or recorded groups, or both
    sources: Any = np.repeat(np.arange(len(self.quotas), dtype=np.int32), self.quotas)
    solve_rate: Any = np.full(sources.shape, graded.batch.correct.mean(), np.float32)
    batch = dataclasses.replace(graded.batch, sources=sources, solve_rate=solve_rate)
    return Drawn(
      number=draw.number,
      version=draw.behavior.version,
      fingerprint=draw.behavior.fingerprint,
      graded=self.with_gaps(
        graded._replace(batch=batch), np.concatenate(drawn_tokens), draw.behavior
      ),
      versions=self.versions(draw.behavior),
      draws=1,
      flops=flops,
      after=draw.after | {"checked_version": draw.behavior.version},
      timings=timings,
    )

  def draw_mixed_groups(self, behavior: Behavior) -> Drawn:
    """One batch of groups that are neither all right nor all wrong."""
    limit = self.config.dynamic_sampling.max_batches
    number = self.number
    drawn: list[Drawn] = []
    while len(drawn) < limit:
      drawn.append(self.finish(self.submit(self.start(behavior))))
      kept = keep_mixed_groups([d.graded for d in drawn], self.quotas)
      if kept is not None:
        self.number = number + 1
        phases = dict.fromkeys(phase for d in drawn for phase in d.timings)
        timings = {phase: sum(d.timings[phase] for d in drawn) for phase in phases}
        return self.keep(
          drawn[-1]._replace(
            number=number,
            graded=kept,
            draws=len(drawn),
            flops=sum(d.flops for d in drawn),
            after=drawn[-1].after | {"number": number + 1},
            timings=timings,
          )
        )
    solved = np.mean([d.graded.batch.correct.mean() for d in drawn])
    raise DynamicSamplingError(
      f"dynamic sampling: {limit} batches of {self.config.batch.prompts} prompts at update"
      f" {behavior.version} hold too few groups that are neither all right nor all wrong (solve"
      f" rate {solved:.3f}). Raise config.dynamic_sampling.max_batches, or choose, in another"
      " --workdir, a larger config.batch.group_size or problems nearer to what the policy can do"
    )

  def with_gaps(self, graded: Graded, mask: np.ndarray, behavior: Behavior) -> Graded:
    """Compares log-probabilities on a few groups of every source, once per version.

    Args:
      mask: f32[P, G, T], every token that was drawn, whether or not it counts in the loss.
    Raises:
      AgreementError: a source that samples with the policy's own parameters is too far off.
    """
    if behavior.version == self.checked_version:
      return graded
    self.checked_version = behavior.version
    gaps: dict[str, float] = {}
    start = 0
    for source in self.parts.sources:
      batch = graded.batch
      few = slice(start, start + min(source.prompts, self.parts.gap_prompts))
      start += source.prompts
      rollouts = (batch.prompts, batch.tokens, mask, batch.behavior_logprobs)
      here = self.parts.to_generation(jax.tree.map(lambda x, few=few: x[few], rollouts))
      mean, largest = jax.device_get(
        self.parts.behavior_gap(behavior.params, *here, sampling=source.sampling)
      )
      gaps |= {
        f"agreement/{source.name}_mean": float(mean),
        f"agreement/{source.name}_max": float(largest),
      }
      self.check_gap(source, float(mean), behavior.version)
    return graded._replace(statistics=graded.statistics | gaps)

  def check_gap(self, source: Source, gap: float, version: int) -> None:
    """Raises AgreementError where the source must agree with the trainer and does not."""
    dtype = self.parts.model.config.compute_dtype
    bound = max_gap(self.config, dtype, source)
    if not gap <= (bound if source.exact else sys.float_info.max):
      raise AgreementError(
        f"sampler and trainer disagree: the log-probabilities that the {source.name} source"
        f" recorded under version {version} of the policy are off by {gap:.2g} nats per token in"
        f" the mean, allowed are {bound:.2g} in {dtype}. One of the two computes something else"
        " than the model says; if the difference is rounding, raise config.max_behavior_gap"
      )

  def keep(self, drawn: Drawn) -> Drawn:
    """Writes the batch into the store."""
    c = self.config
    about = dict(
      tokenizer=c.tokenizer,
      truncated=any(source.truncated for source in self.parts.sources),
      shaped=bool(c.overlong.buffer)
      or bool(components.shaped_outcomes(self.parts.outcome_policy))
      or any(source.shaped for source in self.parts.sources),
      group_size=c.batch.group_size,
      max_prompt_length=c.max_prompt_length,
      max_response_length=c.max_response_length,
      sources=[source.name for source in self.parts.sources],
    )
    arrays, info = to_shard(drawn, **about)
    multihost.on_first(lambda: self.store.append(drawn.number, arrays, info), None)
    return drawn


def grades_of(grading: _Grading | None) -> Future | None:
  """The grades that are waited for, where this process alone decides what comes first."""
  if grading is None or not grading.submitted or jax.process_count() > 1:
    return None
  return grading.submitted[-1]


def with_recorded(graded: Graded, recorded: Graded) -> Graded:
  """A batch with recorded groups after its own; its statistics stay those of its own."""
  # What is of the whole batch is set once it is whole.
  parts = [
    dataclasses.replace(part.batch, sources=None, solve_rate=None) for part in (graded, recorded)
  ]
  return graded._replace(batch=join(parts), samples=graded.samples + recorded.samples)
