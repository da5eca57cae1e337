"""The command sample: samples for the trainer of a workdir, until that has all its batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import EndRequestedError, deadline
from rlvr_jax.train.fleet.roles import (
  ComparedSampler,
  check_same_run,
  sample_for,
  with_sources_of_run,
)
from rlvr_jax.train.generation.policies import Policies
from rlvr_jax.train.generation.samplers import training_sampler
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.grading import check_first_dialogue, check_first_grade, start_pools
from rlvr_jax.train.start.parameters import load_frozen


def sample(parts: Parts, workdir: str | Path) -> None:
  """Samples, grades and writes groups for the trainer of a workdir.

  Args:
    parts: of the run's configuration, on this program's devices.
    workdir: of the run.
  Raises:
    EndRequestedError: a signal requested shutdown; its groups are others' now.
    WorkdirError: the workdir has no run, or one that samples by itself.
    RefusedError: the trainer has other code, another configuration or other data.
    AgreementError: this program samples another distribution than the trainer computes.
  """
  folder = parse_path("--workdir", workdir)
  with contextlib.ExitStack() as stack:
    enter = lambda resource: stack.enter_context(contextlib.closing(resource))
    stack.enter_context(multihost.silence_all_but_first())
    stack.enter_context(_report_shutdown())
    stack.enter_context(deadline())
    multihost.run_on_first(lambda: check_same_run(parts, folder), None)
    parts = multihost.run_together(lambda: with_sources_of_run(parts, folder))
    frozen = load_frozen(parts)
    pools = multihost.run_together(
      lambda: start_pools(parts.config, parts.task, parts.tokenizer, enter)
    )
    check_first_grade(parts.outcome_policy, pools[0], parts.task)
    check_first_dialogue(parts.outcome_policy, pools[1], parts.task)
    policies, answers = Policies(parts, frozen.sampler), parts.make_answers(*pools)
    stack.enter_context(multihost.share_shutdown_signals())
    ending = multihost.raise_if_shutdown_requested
    inner = training_sampler(parts, policies, answers, ending)
    sample_for(parts, folder, ComparedSampler(parts, policies, inner))


@contextlib.contextmanager
def _report_shutdown() -> Iterator[None]:
  """Says that shutdown was requested, after everything is closed."""
  try:
    yield
  except EndRequestedError as error:
    say(f"{error}; others sample its groups. Rerun the same command to continue")
    raise
