"""The command `train`: starts or resumes a run, trains, and reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlvr_jax.costs.hlo import CostsError
from rlvr_jax.data.tokenizer import PromptError
from rlvr_jax.environments.dialogues import EnvironmentStartError
from rlvr_jax.fleet.exchange import RecordError
from rlvr_jax.fleet.program import PolicyGoneError, RefusedError
from rlvr_jax.rewards.grading import GraderStartError
from rlvr_jax.rewards.outcome import GradingStoppedError
from rlvr_jax.rollouts.answers import EnvironmentStoppedError
from rlvr_jax.rollouts.batches import DynamicSamplingError, FingerprintError
from rlvr_jax.rollouts.sampler import ReplayError, SamplerStoppedError
from rlvr_jax.rollouts.store import StoreError, TornShardError
from rlvr_jax.storage.bucket import ChangedError
from rlvr_jax.storage.files import DamagedFileError
from rlvr_jax.train import loop
from rlvr_jax.train.checkpointing.checkpoint_files import CheckpointError
from rlvr_jax.train.checkpointing.claim import WorkdirError
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.fleet.policies import PolicyDamagedError
from rlvr_jax.train.generation.agreement import AgreementError
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.reporting.report import write_report
from rlvr_jax.train.session import open_session
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.teachers import TeacherError

# Errors that end a run with a message that says how to fix them, without a traceback.
FAILURES = (
  AgreementError,
  ChangedError,
  CheckpointError,
  CostsError,
  DamagedFileError,
  DynamicSamplingError,
  EnvironmentStartError,
  EnvironmentStoppedError,
  FingerprintError,
  FloatingPointError,
  GraderStartError,
  GradingStoppedError,
  OSError,
  PolicyDamagedError,
  PolicyGoneError,
  PromptError,
  RecordError,
  RefusedError,
  ReplayError,
  SamplerStoppedError,
  StoreError,
  TeacherError,
  TornShardError,
  WorkdirError,
  multihost.OtherProcessError,
)


def train(
  parts: Parts, workdir: str | Path, *, profile: str = "", tracked_by: Sequence[str] = ()
) -> dict[str, float]:
  """Starts or resumes the training of `build(config)`.

  Args:
    parts: parts of the run.
    workdir: folder of all files of the run, or gs://BUCKET/FOLDER; after a kill the same call
      resumes the run.
    profile: first and last update of a trace by jax.profiler, such as "10:13"; "" for none.
    tracked_by: names of `writer.TRACKERS`.
  Returns:
    The values of the last evaluation.
  Raises:
    EndRequestedError: a signal requested shutdown before the last update; the run has been saved.
    OtherProcessError: another process of the run failed with one of `FAILURES`.
    NonFiniteError: `config.max_skipped_in_a_row` updates in a row were skipped.
  """
  with open_session(parts, workdir, profile=profile, tracked_by=tracked_by) as run:
    now = loop.train(run.run, run.now)
    if multihost.is_first():
      say(write_report(run.workdir.local, run.workdir.path))
  return dict(now.evaluation)
