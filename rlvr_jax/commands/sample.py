"""The command `sample`: samples for the trainer of a workdir until the run has all its batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from pathlib import Path

from rlvr_jax.rollouts.answers import Answers
from rlvr_jax.rollouts.sampler import SWITCH
from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.begin import make_training_sampler
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import deadline
from rlvr_jax.train.fleet.policies import abstract_policy
from rlvr_jax.train.fleet.roles import (
  ComparedSampler,
  check_same_run,
  identify,
  sample_for,
  sampler_settings,
  sources_of_run,
)
from rlvr_jax.train.generation.agreement import behavior_gaps
from rlvr_jax.train.session import report_shutdown
from rlvr_jax.train.setup import checks
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.grading import check_first_dialogue, check_first_grade
from rlvr_jax.types import Params


def sample(parts: Parts, workdir: str | Path) -> None:
  """Samples, grades and writes groups for the trainer of a workdir.

  Args:
    parts: the parts built from the run's configuration, on the devices of this sampler.
    workdir: the workdir of the run.
  Raises:
    EndRequestedError: a signal requested shutdown; other samplers take over this sampler's groups.
    WorkdirError: the workdir has no run, or its trainer samples by itself, or the run's
      configuration differs from the sampler's.
    RefusedError: the trainer has another version of the code, another configuration or other data.
    AgreementError: the trainer computes another distribution than this sampler samples from.
  """
  folder = parse_path("--workdir", workdir)
  with contextlib.ExitStack() as stack:
    enter = lambda resource: stack.enter_context(contextlib.closing(resource))
    stack.enter_context(multihost.silence_all_but_first())
    stack.enter_context(
      report_shutdown("other samplers take over its groups. Rerun the same command to continue")
    )
    stack.enter_context(deadline())
    config = json.loads(parts.config.to_json_best_effort())
    multihost.run_on_first(lambda: check_same_run(config, folder), None)
    sources = multihost.run_together(
      lambda: sources_of_run(parts.sources, parts.make_sources, folder)
    )
    parts = dataclasses.replace(parts, sources=sources)
    frozen = parts.initial.frozen()
    pools = multihost.run_together(lambda: parts.start_pools(enter))
    check_first_grade(parts.grading.outcome_policy, pools[0], parts.task)
    check_first_dialogue(parts.grading.outcome_policy, pools[1], parts.task)
    stack.enter_context(multihost.share_shutdown_signals())
    sample_with(parts, folder, frozen.sampler, parts.make_answers(*pools))


def sample_with(parts: Parts, folder: Path, frozen: Params, answers: Answers) -> None:
  """Samples for the trainer of a workdir, with graders and environments that have been started.

  Args:
    parts: the parts built from the run's configuration, on the devices of this sampler.
    folder: the workdir.
    frozen: the parameters that are not trained.
    answers: asks the graders' processes for grades, and the environments' processes for replies.
  """
  c, programs, network = parts.config, parts.programs, parts.model.config
  policies, inner = make_training_sampler(parts, frozen, answers)
  compare = functools.partial(
    behavior_gaps,
    placement=parts.placement,
    programs=programs,
    mixes_caches=c.fleet.new_weights == SWITCH,
  )
  settings = sampler_settings(
    folder,
    c.fleet,
    parts.sources,
    identity=identify(
      json.loads(c.to_json_best_effort()),
      checks.may_differ(c, parts.schedule),
      parts.task.train,
      parts.tokenizer,
    ),
    group_size=parts.shape.group_size,
    deadline_s=c.generation_deadline_s,
  )
  adapters_only = parts.lora is not None
  trained, mesh = parts.placement.state.params, parts.placement.mesh
  sample_for(
    folder,
    ComparedSampler(inner, policies, parts.sources, parts.task, compare),
    settings,
    abstract_policy(trained, network, mesh, adapters_only=adapters_only),
  )
