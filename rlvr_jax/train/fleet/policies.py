"""The policies that a trainer publishes in its workdir, for samplers to restore.

A published policy is a checkpoint of parameters alone, in the folder of its version. This
checkpoint is complete or absent, and has the checksum of every leaf. The parameters have the dtypes
of decoding: a network that computes products in bfloat16 is published in bfloat16. If a run trains
adapters, only the adapters are published, in their own dtypes.
"""

from __future__ import annotations

import os
import pathlib
import time
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from rlvr_jax.fleet.program import PolicyGoneError
from rlvr_jax.models.functional import cast_to_decode
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.storage.files import DiskFullError
from rlvr_jax.storage.places import Workdir, make_absolute, parse_path
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.checkpointing.checkpoint_files import (
  MANIFEST,
  CheckpointError,
  ForeignCheckpointError,
  TornCheckpointError,
  read_manifest,
  read_state,
  saved_steps,
  silence_orbax,
  verify_state,
)
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.programs import published_params
from rlvr_jax.types import Params

DAMAGED_S = 20.0  # seconds that a policy may be damaged: a restarting trainer writes it again
_AGAIN_S = 1.0  # seconds until a damaged policy is read again
KEEP = 3  # number of policies kept: a sampler has the time of two updates to restore a policy


class Policy(NamedTuple):
  """The version and fingerprint by which trainer and samplers name a policy."""

  version: int  # number of updates that the parameters have had
  fingerprint: str  # identifies the parameters, see `generation.policies.lazy_fingerprint`


class PolicyDamagedError(RuntimeError):
  """The files of a published policy are damaged."""


class PolicyPublisher:
  """Writes policies into a folder from which samplers restore them; keeps the latest few.

  All processes of a trainer use the publisher together.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    network: TransformerConfig,
    *,
    adapters_only: bool,
    keep: int = KEEP,
    workdir: Workdir | None = None,
    beside: Checkpointer | None = None,
  ):
    """Opens the folder.

    Args:
      folder: the folder of the policies alone; may be in a bucket.
      network: settings of the policy's network.
      adapters_only: whether only adapters are trained.
      keep: number of policies that stay in the folder, ≥ 1.
      workdir: the workdir of the run, which guards writes into a bucket.
      beside: the checkpointer of the run, which also saves in the background. A trainer of several
        processes finishes that save before it publishes a policy, since orbax's barriers do not
        tell two saves apart.
    """
    self._beside = beside if jax.process_count() > 1 else None
    self._folder = make_absolute(parse_path("the folder of policies", folder))
    self._checkpointer = Checkpointer(self._folder, keep=keep, workdir=workdir, short_lived=True)
    self._cast = jax.jit(lambda params: cast_to_decode(params, network))
    self._keep, self._adapters_only = keep, adapters_only
    names = (read_name(self._folder, version) for version in saved_steps(self._folder))
    self._published = {policy.version: policy for policy in names if policy}
    self._writing: Policy | None = None

  def publish(self, params: Params, policy: Policy) -> dict[str, float]:
    """Copies a policy's parameters and writes them in the background.

    Waits until the previous policy is written. After a restart of the trainer, the folder may have
    policies with the version of `policy` or a later version. These policies are removed, since they
    may be damaged, or the restarted trainer may have lost the updates that made them.

    Args:
      params: the trained parameters, which may be donated when this returns.
      policy: version and fingerprint of the parameters.
    Returns:
      Metrics: the seconds that this call took, and the bytes that all processes write.
    """
    began = time.perf_counter()
    self.wait()
    if self._beside is not None:
      self._beside.wait()
    self._checkpointer.discard_after(policy.version - 1)
    self._published = {v: p for v, p in self._published.items() if v < policy.version}
    saved = params if self._adapters_only else self._cast(params)
    self._checkpointer.save(policy.version, saved, host={"fingerprint": policy.fingerprint})
    self._writing = policy
    if self._beside is not None:
      self.wait()
    size = sum(x.nbytes for x in jax.tree.leaves(saved))
    return {
      "time/publish_seconds": time.perf_counter() - began,
      "fleet/published_gib": size / 2**30,
    }

  def published(self) -> list[Policy]:
    """The policies that can be restored now, the newest last; any thread may call this."""
    writing = self._writing
    if writing is not None and writing.version in saved_steps(self._folder):
      if self._writing is writing:  # unless `publish` has begun the next policy meanwhile
        self._writing = None
      kept = sorted({**self._published, writing.version: writing}.items())[-self._keep :]
      self._published = dict(kept)
    return [*self._published.values()]

  def failure(self) -> str:
    """Why the last policy could not be published; "" unless publishing has failed."""
    try:
      self._checkpointer.check()
    except (CheckpointError, DiskFullError) as error:
      version = self._writing.version if self._writing else max(self._published, default=0)
      return f"version {version} of the policy could not be published for the samplers: {error}"
    return ""

  def wait(self) -> None:
    """Waits until everything is written; raises the error if writing has failed."""
    self._checkpointer.wait()
    self.published()

  def close(self) -> None:
    """Waits as `wait` does, then ends the background threads."""
    self._checkpointer.close()


def read_name(folder: pathlib.Path, version: int) -> Policy | None:
  """Version and fingerprint of a published policy; None if its manifest is missing or damaged."""
  try:
    return Policy(version, read_manifest(folder / str(version))["host"]["fingerprint"])
  except (CheckpointError, OSError, ValueError, KeyError):
    return None


class PolicyReader:
  """Restores published policies onto the devices of a sampler, which read only their shards."""

  def __init__(self, folder: str | os.PathLike[str], abstract: Params):
    """Reads nothing yet.

    Args:
      folder: the folder of the trainer's `PolicyPublisher`.
      abstract: the result of `abstract_policy`, on this sampler's mesh.
    """
    silence_orbax()
    self._folder = make_absolute(parse_path("the folder of policies", folder))
    self._damaged: dict[Policy, float] = {}  # when damage of a policy was first seen
    self._abstract = abstract

  def restore(self, policy: Policy) -> Params:
    """Restores the parameters of a policy.

    In a sampler of one process, this also verifies every leaf; with several processes, call
    `verify` afterwards.

    Raises:
      PolicyGoneError: the policy was removed, or cannot be read at present.
      PolicyDamagedError: the policy is there, but has been damaged for more than `DAMAGED_S`
        seconds.
      CheckpointError: the policy has another network, so that this sampler cannot use it.
      UnreachableError: the bucket does not respond.
    """
    folder = self._folder / str(policy.version)
    gone = PolicyGoneError(
      f"version {policy.version} of the policy, with fingerprint {policy.fingerprint}, is no longer"
      f" in {self._folder}"
    )
    if not (folder / MANIFEST).exists():
      raise gone
    try:
      found = read_state(
        folder,
        self._abstract,
        if_other="Start the sampler with the trainer's configuration.",
        verifies=jax.process_count() == 1,
      )
    except TornCheckpointError as error:
      self._raise_if_damaged(policy, error)
      raise gone from error  # the trainer has removed it: the sampler reads the newest policy
    except ForeignCheckpointError:
      if not (folder / MANIFEST).exists():
        raise gone from None
      raise
    if found.host.get("fingerprint") != policy.fingerprint:
      raise gone
    params: Params = found.state
    return params

  def verify(self, policy: Policy, params: Params) -> None:
    """Verifies every leaf of a restored policy; all processes call it together.

    Raises:
      PolicyGoneError: the policy was removed, or cannot be read at present.
      PolicyDamagedError: the policy is there, but has been damaged for more than `DAMAGED_S`
        seconds.
    """
    try:
      verify_state(self._folder / str(policy.version), params)
    except TornCheckpointError as error:
      self._raise_if_damaged(policy, error)
      raise PolicyGoneError(str(error)) from error

  def _raise_if_damaged(self, policy: Policy, error: Exception) -> None:
    """Raises PolicyDamagedError if a policy is there and could not be read for `DAMAGED_S`.

    Until then it waits `_AGAIN_S`, so that the caller does not read again at once.
    """
    since = self._damaged.setdefault(policy, time.monotonic())
    folder = self._folder / str(policy.version)
    is_there = (folder / MANIFEST).exists()
    is_there = is_there and read_name(self._folder, policy.version) in (policy, None)
    if is_there and time.monotonic() - since > DAMAGED_S:
      raise PolicyDamagedError(
        f"the policy in {folder} is damaged ({error}); start the trainer again: it rewrites the"
        " policy"
      ) from error
    if is_there:
      time.sleep(_AGAIN_S)


def abstract_policy(
  trained: Params, network: TransformerConfig, mesh: Mesh, *, adapters_only: bool
) -> Params:
  """Shapes and dtypes of a published policy, with its shardings on a mesh.

  Args:
    trained: shapes and dtypes of the trained parameters.
    network: settings of the policy's network.
    mesh: the mesh of the sampler.
    adapters_only: whether only adapters are trained.
  """
  return sharding.add_shardings(published_params(trained, network, adapters_only), mesh)
