"""Warm starts that several runs share: `config.warm_start.cache`.

A warm start depends on its compiled program, on the parameters and the optimizer's state that it
begins with, on its batches, and on the machine. An entry is named by a hash of exactly these, not
by fields of the configuration or the version of this package. So whatever changes the result, in
the code, the data, the libraries or the settings, gives another name, and what does not, such as
another loss, keeps it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import jax
import jaxlib

from rlvr_jax.storage.files import TEMPORARY, open_own, sync_folder
from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.checkpointing.checkpoint_files import (
  CheckpointError,
  parameter_checksums,
  read_state,
)
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import processor_name, restart_deadline, usable_cores
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.start import parameters
from rlvr_jax.types import Params

WAIT_S = 12 * 3600.0  # for another run that trains the same warm start
_POLL_S = 0.2
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # settings of the compiler

Losses = Sequence[tuple[int, float]]  # (step, loss), as reported


class Trained(NamedTuple):
  """The result of a warm start."""

  params: Params
  losses: Losses


def check(folder: str) -> None:
  """Raises CheckpointError unless `config.warm_start.cache` can be used."""
  if not folder:
    return
  try:
    parse_path("config.warm_start.cache", folder, must_be_on_disk=True)
  except ValueError as error:
    raise CheckpointError(str(error)) from error
  if jax.process_count() > 1:
    raise CheckpointError(
      f"config.warm_start.cache = {folder!r} is for runs of one process, this one has"
      f" {jax.process_count()}; set it to ''"
    )


class Entry:
  """The warm start of a run in a cache."""

  def __init__(self, parts: Parts, state: Any, frozen: Params):
    """Computes its name; `state` and `frozen` as of `supervised_step`, before its first call."""
    self._abstract = parts.placement.state.params
    self._made_of = describe_inputs(parts, state, frozen)
    name = hashlib.sha256(json.dumps(self._made_of, sort_keys=True).encode()).hexdigest()[:32]
    cache = parts.config.warm_start.cache
    folder = parse_path("config.warm_start.cache", cache, must_be_on_disk=True).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    self.path, self._lock = folder / name, folder / f"{name}.lock"

  @contextlib.contextmanager
  def lock(self) -> Iterator[None]:
    """Within it no other run trains or saves this warm start; waits for one that does.

    Raises:
      CheckpointError: another run has not finished it in `WAIT_S`.
      EndRequestedError: shutdown was requested meanwhile.
    """
    with open_own(self._lock, "a+", encoding="utf-8") as file:
      _wait_for(file, f"the warm start {self.path}")
      file.truncate(0)
      file.write(f"{os.getpid()}\n")
      file.flush()
      yield  # the kernel frees the lock when the file is closed, or the process ends

  def load(self) -> Trained | None:
    """The warm start, verified; None if there is none yet.

    Raises:
      TornCheckpointError: files are truncated, changed or missing.
      ForeignCheckpointError: the folder has something else.
    """
    if not self.path.exists():
      return None
    remedy = f"Remove {self.path}; the next run trains that warm start again."
    folder = self.path / str(self._made_of["steps"])
    params, host, _ = read_state(folder, self._abstract, if_other=remedy, if_damaged=remedy)
    return Trained(params, [(int(index), loss) for index, loss in host["losses"]])

  def save(self, trained: Trained) -> None:
    """Saves a warm start; call it within `claimed`. The entry is complete or absent."""
    temporary = self.path.with_name(self.path.name + TEMPORARY)
    if temporary.exists():
      shutil.rmtree(temporary)  # of a run that was killed here
    with contextlib.closing(Checkpointer(temporary, keep=1)) as checkpointer:
      host = {"made_of": self._made_of, "losses": [list(pair) for pair in trained.losses]}
      checkpointer.save(self._made_of["steps"], trained.params, host=host)
    temporary.rename(self.path)
    sync_folder(self.path.parent)


def describe_inputs(parts: Parts, state: Any, frozen: Params) -> dict[str, Any]:
  """All that the result of a warm start depends on, as JSON values."""
  steps, batches = parts.config.warm_start.num_steps, hashlib.sha256()
  for batch in itertools.islice(parameters.supervised_batches(parts), steps):
    for array in jax.tree.leaves(batch):
      batches.update(memoryview(array).cast("B"))
  first = parts.placement.to_devices(next(parameters.supervised_batches(parts)))
  program = parts.programs.supervised_step.lower(state, frozen, *first).as_text()
  device = parts.placement.mesh.devices.flat[0]
  # On a CPU the order of a sum depends on the number of threads.
  cpu = f"{usable_cores()} cores of {processor_name()}"
  return {
    "program": hashlib.sha256(program.encode()).hexdigest(),  # shapes and precision too
    "steps": steps,
    "batches": batches.hexdigest(),
    "begins_with": [int(x) for x in jax.device_get(parameter_checksums((state, frozen)))],
    "compiler": [jax.__version__, jaxlib.__version__, device.client.platform_version],
    "device": cpu if device.platform == "cpu" else device.device_kind,
    "flags": {
      **{name: os.environ.get(name, "") for name in _ENVIRONMENT},
      **(parts.compiler_options.training or {}),
    },
  }


def _wait_for(file: IO[str], what: str) -> None:
  """Waits for the lock of an open file."""
  began, said = time.monotonic(), False
  while True:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      return
    except BlockingIOError:
      file.seek(0)
      holder = f"process {file.read().strip() or 'unknown'}"
    if not said:
      say(f"{what} is being trained by {holder}: waiting for it")
      said = True
    if time.monotonic() - began > WAIT_S:
      raise CheckpointError(
        f"{what} has not been finished by {holder} in {WAIT_S / 3600:g} hours; end that run, or set"
        " config.warm_start.cache = '' to train it here"
      )
    restart_deadline()
    multihost.raise_if_shutdown_requested()
    time.sleep(_POLL_S)
