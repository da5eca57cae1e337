"""Makes a run from its parts, and brings it to its first update or to a saved update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from rlvr_jax.data.draws import problem_draws
from rlvr_jax.rollouts.answers import Answers
from rlvr_jax.rollouts.batches import Batches, BatchSettings, Hooks, Inputs, Position
from rlvr_jax.rollouts.sampler import (
  SWITCH,
  LocalSampler,
  SamplerSettings,
  SamplingSource,
  ThreadSampler,
)
from rlvr_jax.rollouts.sources import Sources
from rlvr_jax.rollouts.store import RolloutStore, StoreError
from rlvr_jax.storage.files import JsonObject
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.cluster import multihost, sharding
from rlvr_jax.train.evaluation import Evaluation
from rlvr_jax.train.fleet.roles import FleetSampler
from rlvr_jax.train.generation.agreement import Agreement
from rlvr_jax.train.generation.policies import Policies, keeps_several, make_sync
from rlvr_jax.train.generation.printing import Printer
from rlvr_jax.train.generation.samplers import sampler_of_policy, sampling_flops
from rlvr_jax.train.generation.scoring import Scorer, ScorerSettings, measure_entropy
from rlvr_jax.train.loop import Plan, Run, RunState, evaluate, save
from rlvr_jax.train.reporting.log import RunLog
from rlvr_jax.train.reporting.progress import say, warn
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.grading import scores_partly, shaped_outcomes
from rlvr_jax.train.setup.initial_params import Frozen
from rlvr_jax.train.start.restore import Resumed, describe_layout
from rlvr_jax.train.start.rows import RunRows
from rlvr_jax.types import Params, TrainState


def make_run(
  parts: Parts,
  rows: RunRows,
  frozen: Frozen,
  log: RunLog,
  checkpointer: Checkpointer,
  make_answers: Callable[[], Answers],
  store: RolloutStore,
  *,
  initial: Params,
) -> Run:
  """Makes the objects of a run from its parts.

  Args:
    parts, rows, log, checkpointer, store: parts, rows, log, checkpointer and store of the run.
    frozen: the result of `InitialParams.frozen`.
    make_answers: makes the `Answers` for the rollouts of one sampler.
    initial: trained parameters before the first update.
  """
  c, programs, schedule, sources = parts.config, parts.programs, parts.schedule, parts.sources
  group_size, new_weights = parts.shape.group_size, c.fleet.new_weights
  policies, sampler = make_training_sampler(parts, frozen.sampler, make_answers())
  of_policy = lambda engine, settings: sampler_of_policy(
    engine, frozen.trainer, parts.grading, make_answers(), settings
  )
  first_entropy = functools.partial(
    measure_entropy,
    source=parts.task.train,
    batch_size=c.batch.prompts,
    seed=c.seed,
    sampler=of_policy(
      programs.engine,
      SamplerSettings(group_size, purpose="initial_entropy", deadline_s=c.generation_deadline_s),
    ),
    rows=rows,
    frozen=frozen.trainer,
    score=programs.score,
  )
  evaluation = Evaluation(
    of_policy(
      programs.held_out_engine,
      SamplerSettings(
        c.evaluation.num_samples, purpose="evaluation", deadline_s=c.generation_deadline_s
      ),
    ),
    parts.task,
    c.evaluation,
    c.environment.max_turns,
  )
  method = parts.method
  scorer_settings = ScorerSettings(
    seed=c.seed,
    permutes_rewards=c.permute_rewards,
    has_reference=method.reference_kl > 0,
    has_proximal=method.loss.needs_proximal,
    proximal_every=c.proximal_every,
    needs=method.advantage.needs,
    compares=method.compares,
    diagnose_every=c.diagnostics.every,
  )
  # If all groups are recorded, no problem is drawn, but the position is saved.
  problems = problem_draws(parts.task.train, batch_size=max(sources.num_live, 1), seed=c.seed)
  agreement = Agreement(
    sources=sources,
    programs=programs,
    rows=rows,
    policies=policies,
    replays_routes=method.replays_routes,
    mixes_caches=new_weights == SWITCH,
    samplers_compare=c.fleet.samplers,
  )
  hooks = Hooks(
    fingerprint=policies.fingerprint,
    compare=agreement.measure,
    flops=functools.partial(sampling_flops, parts.model.config),
    on_first=multihost.result_of_first,
    warn=warn,
  )
  outcomes = parts.grading.outcome_policy
  batch_settings = BatchSettings(
    quotas=sources.quotas,
    seed=c.seed,
    max_draws=c.dynamic_sampling.max_batches if c.dynamic_sampling.enabled else 0,
    waits_for_all=not schedule.threaded,
    repeats=schedule.recorded,
    how_drawn=how_drawn(sources, new_weights) if schedule.threaded else {},
    about={
      "tokenizer": c.tokenizer,
      "truncated": sources.truncated,
      "shaped": bool(c.overlong.buffer or shaped_outcomes(outcomes))
      or scores_partly(c.environment.name, outcomes)
      or sources.shaped,
      "group_size": group_size,
      "max_prompt_length": parts.shape.max_prompt_length,
      "max_response_length": parts.shape.max_response_length,
      "sources": [source.name for source in sources],
      **({"routes": parts.model.config.mixture} if method.records_routes else {}),
    },
  )
  return Run(
    plan=Plan(
      num_updates=c.num_updates,
      schedule=schedule,
      save_every=c.checkpoint.every,
      keep=c.checkpoint.keep,
      keeps_used=c.store.keep_used,
      reads_first=sharding.is_on_cpu(parts.placement.mesh),
    ),
    programs=programs,
    rows=rows,
    frozen=frozen,
    policies=policies,
    sampler=sampler,
    batches=Batches(Inputs(sampler, problems, sources.recorded), store, batch_settings, hooks),
    store=store,
    scorer=Scorer(
      scorer_settings,
      rows,
      frozen.trainer,
      initial,
      programs,
      log,
      teachers=parts.teachers,
      teacher_prompts=parts.teacher_prompts,
    ),
    first_entropy=first_entropy,
    evaluation=evaluation,
    log=log,
    checkpointer=checkpointer,
    layout=describe_layout(parts.placement, parts.compiler_options, slots=c.sampling.slots),
  )


def make_training_sampler(
  parts: Parts, frozen: Params, answers: Answers
) -> tuple[Policies, LocalSampler]:
  """The run's policies, and this process's sampler of training rollouts, which uses these policies.

  Args:
    parts: the parts of the run.
    frozen: the parameters that are not trained, on the devices for generation.
    answers: answers of graders and environments, for this sampler alone.
  """
  c, sources, schedule = parts.config, parts.sources, parts.schedule
  policies = Policies(
    sources,
    schedule,
    frozen,
    checksums=parts.programs.checksums,
    sync=None if c.fleet.samplers else make_sync(parts.placement, schedule),
  )
  settings = SamplerSettings(
    parts.shape.group_size,
    new_weights=c.fleet.new_weights,
    deadline_s=c.generation_deadline_s,
  )
  if keeps_several(schedule):
    settings = dataclasses.replace(settings, has_plans=True, oldest_needed=schedule.oldest_sampling)
  of_sources = [
    SamplingSource(
      source.programs, functools.partial(policies.load, source), of_this_run=source.of_this_run
    )
    for source in sources.live
  ]
  sampler = LocalSampler(of_sources, parts.training_grading, answers, settings, Printer())
  return policies, sampler


def how_drawn(sources: Sources, new_weights: str) -> JsonObject:
  """Settings of this run's sampler that a later run needs to repeat this run's draws exactly."""
  if not sources.live:
    return {}
  settings = sources.live[0].programs.settings
  return {
    "burst_steps": settings.shape.steps,
    "slots": settings.slots,
    "new_weights": new_weights,
  }


def in_a_thread(run: Run, deadline_s: float) -> Run:
  """The run with a sampler that works in its own thread.

  Args:
    run: a run whose sampler is a `LocalSampler`.
    deadline_s: `config.generation_deadline_s`.
  """
  if not isinstance(run.sampler, LocalSampler):
    raise TypeError(f"sampling in a thread needs a LocalSampler, not {type(run.sampler).__name__}")
  sampler = ThreadSampler(
    run.sampler,
    deadline_s=deadline_s,
    raise_if_ending=multihost.raise_if_shutdown_requested,
    keep=run.store.write_groups,
  )
  run.batches.sample_with(sampler, are_kept=True)
  return dataclasses.replace(run, sampler=sampler)


def with_fleet(run: Run, sampler: FleetSampler) -> Run:
  """The run with a fleet of samplers."""
  run.batches.sample_with(sampler, are_kept=False)
  return dataclasses.replace(run, sampler=sampler)


def begin(run: Run, state: TrainState) -> RunState:
  """The state of a new run, which has been evaluated and saved as step 0."""
  now = RunState(0, state, run.batches.position(), dict(run.log.counters))
  now = evaluate(run, now)
  save(run, now)
  return now


def resume(run: Run, resumed: Resumed) -> RunState:
  """Restores the objects of a run from a checkpoint, and returns its state."""
  host, position = resumed.host, resumed.host.position
  run.log.resume(host.counters, host.evaluation)
  run.policies.restore(host.fingerprints)
  run.scorer.restore(host.scored_at, resumed.arrays)
  if resumed.damaged:
    # Damaged batches are sampled again: drawing goes on with the first damaged batch.
    missing = min(resumed.damaged)
    before = _info(run.store, missing - 1)["after"] if missing else None
    position = Position(**before) if before else run.batches.position()
  run.batches.move_to(position)
  pending = max(position.number - run.plan.schedule.first(resumed.step), 0)
  say(
    f"resumed at update {resumed.step}: parameters, optimizer and algorithm state,"
    f" {run.log.counters['batches']} batches of prompts sampled, {pending} batches of rollouts"
    " pending"
  )
  return RunState(
    resumed.step, resumed.state, position, host.counters, host.evaluation, host.evaluated
  )


def _info(store: RolloutStore, number: int) -> JsonObject:
  """The info of a batch; StoreError if the store has lost the batch."""
  try:
    return store.info(number)
  except KeyError as error:
    raise StoreError(
      f"the store has lost batch {number}, which says where drawing goes on; put the batch back, or"
      " use another --workdir"
    ) from error
