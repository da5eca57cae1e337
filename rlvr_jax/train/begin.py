"""Makes a run of its parts, and brings it to its first update or to where it was saved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax

from rlvr_jax.data.draws import problem_draws
from rlvr_jax.rollouts.answers import Answers
from rlvr_jax.rollouts.batches import Batches, BatchSettings, Inputs, Position
from rlvr_jax.rollouts.sampler import LocalSampler, ThreadSampler
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.places import Workdir
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.fleet.roles import FleetSampler
from rlvr_jax.train.generation.policies import Policies
from rlvr_jax.train.generation.samplers import (
  entropy_sampler,
  held_out_sampler,
  training_sampler,
)
from rlvr_jax.train.generation.scoring import Scorer
from rlvr_jax.train.generation.surroundings import RunSurroundings
from rlvr_jax.train.loop import Run, RunState, evaluate, save
from rlvr_jax.train.reporting.log import RunLog
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.checks import scores_partly, shaped_outcomes
from rlvr_jax.train.start import parameters
from rlvr_jax.train.start.restore import Resumed
from rlvr_jax.train.start.rows import RunRows
from rlvr_jax.types import Params


def make_run(
  parts: Parts,
  rows: RunRows,
  frozen: parameters.Frozen,
  log: RunLog,
  checkpointer: Checkpointer,
  make_answers: Callable[[], Answers],
  store: RolloutStore,
  *,
  initial: Params,
) -> Run:
  """The objects of a run.

  Args:
    parts, rows, log, checkpointer, store: of the run.
    frozen: from `parameters.load_frozen`.
    make_answers: what answers the turns of one sampler's rollouts.
    initial: trained parameters before the first update.
  """
  policies = Policies(parts, frozen.sampler)
  sampler = training_sampler(parts, policies, make_answers())

  def rest() -> None:
    sampler.rest()
    policies.rest()

  scorer = Scorer(parts, rows, frozen.trainer, initial, log)
  of_entropy = entropy_sampler(parts, frozen.trainer, make_answers())
  # If all groups are recorded, no problem is drawn, but the position is saved.
  problems = problem_draws(
    parts.task.train, batch_size=max(parts.sources.num_live, 1), seed=parts.config.seed
  )
  return Run(
    parts=parts,
    rows=rows,
    frozen=frozen,
    policies=policies,
    sampler=sampler,
    rest=rest,
    batches=Batches(
      Inputs(sampler, problems, parts.sources.recorded),
      store,
      batch_settings(parts),
      RunSurroundings(parts, rows, policies, log),
    ),
    store=store,
    scorer=scorer,
    first_entropy=functools.partial(scorer.measure_entropy, sampler=of_entropy),
    held_out_sampler=held_out_sampler(parts, frozen.trainer, make_answers()),
    log=log,
    checkpointer=checkpointer,
  )


def in_a_thread(run: Run) -> Run:
  """The run, whose sampler works in a thread of its own."""
  if not isinstance(run.sampler, LocalSampler):
    raise TypeError(f"a thread needs a local sampler, not {type(run.sampler).__name__}")
  sampler = ThreadSampler(
    run.sampler,
    deadline_s=run.parts.config.generation_deadline_s,
    raise_if_ending=multihost.raise_if_shutdown_requested,
    keep=run.store.write_group,
  )
  run.batches.sample_with(sampler, are_kept=True)
  return dataclasses.replace(run, sampler=sampler, rest=_keep_all)


def with_fleet(run: Run, workdir: Workdir) -> Run:
  """The run, whose rollouts other programs sample that meet it in its workdir."""
  if not isinstance(run.sampler, LocalSampler):
    raise TypeError(f"examples come of a local sampler, not of {type(run.sampler).__name__}")
  examples, total = run.sampler.examples(), run.parts.config.num_updates
  has_all = lambda: run.batches.position().number >= total
  args = run.parts, run.policies, run.checkpointer, workdir, examples, has_all
  sampler = FleetSampler(*args)
  run.batches.sample_with(sampler, are_kept=False)
  return dataclasses.replace(run, sampler=sampler, rest=_keep_all)


def _keep_all() -> None:
  """Lets no policy go: what was begun under it goes on during the update."""


def batch_settings(parts: Parts) -> BatchSettings:
  """How the batches of a run are made."""
  c, schedule, sources = parts.config, parts.schedule, parts.sources
  by_outcome = bool(shaped_outcomes(parts.outcome_policy)) or scores_partly(
    c.environment.name, parts.outcome_policy
  )
  how_drawn = {}
  if schedule.threaded and sources.live:
    settings = sources.live[0].programs.settings
    how_drawn = {
      "burst_steps": settings.shape.steps,
      "slots": settings.slots,
      "new_weights": c.fleet.new_weights,
    }
  return BatchSettings(
    quotas=sources.quotas,
    seed=c.seed,
    max_draws=c.dynamic_sampling.max_batches if c.dynamic_sampling.enabled else 0,
    waits_for_all=not schedule.threaded,
    repeats=schedule.recorded,
    how_drawn=how_drawn,
    about={
      "tokenizer": c.tokenizer,
      "truncated": sources.truncated,
      "shaped": bool(c.overlong.buffer) or by_outcome or sources.shaped,
      "group_size": parts.shape.group_size,
      "max_prompt_length": parts.shape.max_prompt_length,
      "max_response_length": parts.shape.max_response_length,
      "sources": [source.name for source in sources],
      **({"routes": parts.model.config.mixture} if parts.method.records_routes else {}),
    },
  )


def begin(run: Run, params: Params) -> RunState:
  """Evaluates and saves step 0, with these parameters."""
  stateful = jax.tree.leaves(run.parts.placement.state.advantage_state)
  entropy = run.first_entropy(params) if stateful else 0.0
  state = parameters.first_state(run.parts, params, entropy)
  now = RunState(0, state, run.batches.position(), dict(run.log.counters))
  now = evaluate(run, now)
  save(run, now)
  return now


def resume(run: Run, resumed: Resumed) -> RunState:
  """Continues from a checkpoint."""
  host, position = resumed.host, resumed.host.position
  run.log.resume(host.counters, host.evaluation)
  run.policies.restore(host.fingerprints)
  run.scorer.restore(host.scored_at, resumed.arrays)
  if resumed.damaged:
    # They are sampled again, so drawing goes on behind the batch before them.
    missing = min(resumed.damaged)
    before = run.store.info(missing - 1)["after"] if missing else None
    position = Position(**before) if before else run.batches.position()
  run.batches.move_to(position)
  pending = max(position.number - run.parts.schedule.first(resumed.step), 0)
  say(
    f"resumed at update {resumed.step}: parameters, optimizer and algorithm state,"
    f" {run.log.counters['batches']} batches of prompts sampled, {pending} batches of rollouts"
    " pending"
  )
  return RunState(
    resumed.step, resumed.state, position, host.counters, host.evaluation, host.evaluated
  )
