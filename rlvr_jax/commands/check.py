"""The command check: looks, on every host, at all that a run will need; one line per check.

A line is "ok", "warn" or "FAIL", the check, and what was found; a failure says how to cure it.
Where hosts differ, each that does not agree has a line of its own.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import glob
import json
import math
import os
import pathlib
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import ml_collections

from rlvr_jax.costs import memory
from rlvr_jax.costs.chips import CHIPS
from rlvr_jax.data import Task, Tokenizer
from rlvr_jax.models.huggingface import checked_tensors
from rlvr_jax.storage.files import listing, located, replacing
from rlvr_jax.storage.places import BucketFiles, LocalFiles, files_in, in_bucket, place
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.reporting.data_use import warm_start_warning
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts, build, make_task
from rlvr_jax.train.setup.grading import check_first_grade, grader_pool
from rlvr_jax.train.setup.tokenizers import make_tokenizer
from rlvr_jax.train.start import parameters

OK, WARN, FAIL = "ok", "warn", "FAIL"
MAX_SKEW_S = 5.0  # between the clocks of hosts
_TPU_FILES = ("/dev/vfio/[0-9]*", "/dev/accel*")
_BUSY = "see which process has it with sudo lsof /dev/vfio/* /dev/accel*, and end that process"
_GIB = 2**30


class PreflightError(RuntimeError):
  """At least one check has failed."""


class Finding(NamedTuple):
  """What a check found on this host."""

  status: str
  text: str


class _NotCheckedError(Exception):
  """What a check needs has failed itself."""


def check(config: ml_collections.ConfigDict, workdir: str) -> None:
  """Prints the findings; every process of the run must call it.

  Raises:
    PreflightError: a check has failed on some host.
  """
  failed = []
  with multihost.only_first_prints():
    for name, action in Preflight(config, workdir).checks():
      findings = multihost.exchange(_finding(action))
      for line in _lines(name, findings):
        say(line)
      if any(status == FAIL for status, _ in findings):
        failed.append(name)
  if failed:
    checks = "1 check" if len(failed) == 1 else f"{len(failed)} checks"
    raise PreflightError(f"{checks} failed: {', '.join(failed)}")
  if multihost.is_first():
    say("nothing is in the way of this run")


def _finding(action: Callable[[], Finding]) -> Finding:
  try:
    return action()
  except _NotCheckedError as reason:
    return Finding(WARN, f"not checked: {reason}")
  except Exception as error:  # also of libraries: any failure is a finding
    text = " ".join(str(error).split())
    return Finding(
      FAIL, text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    )


def _lines(name: str, findings: list[Any]) -> Iterator[str]:
  """One line for what the hosts agree on, with the first host's text; one for each other host."""
  common, _ = collections.Counter(status for status, _ in findings).most_common(1)[0]
  shown = next(i for i, (status, _) in enumerate(findings) if status == common)
  for process, (status, text) in enumerate(findings):
    if process == shown or status != common:
      of = f"process {process}: " if status != common else ""
      yield f"{status:<5} {name:<11} {of}{text}"


class Preflight:
  """The checks of a run, in order; later ones use what earlier ones have made."""

  def __init__(self, config: ml_collections.ConfigDict, workdir: str):
    self.config, self.workdir = config, place("--workdir", workdir)
    self.tokenizer: Tokenizer | None = None
    self.task: Task | None = None
    self.parts: Parts | None = None

  def checks(self) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """(name, function that every process calls)."""
    yield "devices", self.devices
    yield "processes", self.processes
    yield "clocks", self.clocks
    yield "workdir", self.disk
    yield "tokenizer", self.make_tokenizer
    yield "data", self.make_task
    yield "config", self.build
    yield "checkpoint", self.checkpoint
    yield "space", self.space
    yield "grader", self.grader
    yield "memory", self.memory

  # --- machines -----------------------------------------------------------------------------------

  def devices(self) -> Finding:
    """Devices of one kind on all hosts, and as many as the mesh needs."""
    kinds = sorted({device.device_kind for device in jax.devices()})
    files = sorted(path for pattern in _TPU_FILES for path in glob.glob(pattern))
    if files and jax.default_backend() == "cpu" and os.environ.get("JAX_PLATFORMS") != "cpu":
      return Finding(
        FAIL,
        f"this machine has TPU chips ({files[0]}), but jax found none: {_BUSY}; or install the"
        ' extra with pip install -e ".[tpu]"',
      )
    if len(kinds) > 1:
      return Finding(FAIL, f"devices of several kinds: {kinds}; use one slice, or equal slices")
    meshes = (self.config.mesh, self.config.generation_mesh)
    needed = math.prod(meshes[0].to_dict().values())
    if any(meshes[1].to_dict().values()):
      needed += math.prod(size or 1 for size in meshes[1].to_dict().values())
    text = f"{jax.device_count()} of {kinds[0]}, {jax.local_device_count()} on each host"
    if needed != jax.device_count():
      status = FAIL if needed > jax.device_count() or jax.process_count() > 1 else WARN
      return Finding(
        status,
        f"{text}, but config.mesh has {needed}: choose sizes whose product is {jax.device_count()}",
      )
    return Finding(OK, text)

  def processes(self) -> Finding:
    """All processes meet, with the same configuration and versions."""
    mine = {
      "config": self.config.to_json_best_effort(),
      "jax": jax.__version__,
      "python": sys.version.split()[0],
    }
    theirs = multihost.exchange(mine | {"host": socket.gethostname()})
    if differing := [key for key in mine if mine[key] != theirs[0][key]]:
      shown = [
        f"{key} = {mine[key]}, there {theirs[0][key]}" for key in differing if key != "config"
      ]
      return Finding(
        FAIL,
        f"differs from process 0 in {', '.join(differing)}{': ' * bool(shown)}{'; '.join(shown)}."
        " Start the same command with the same installation on every host",
      )
    hosts = [*dict.fromkeys(other["host"] for other in theirs)]
    some = ", ".join(hosts[:4]) + (", …" if len(hosts) > 4 else "")
    return Finding(OK, f"{len(theirs)} met, on {some}")

  def clocks(self) -> Finding:
    """The clocks of the hosts agree."""
    multihost.exchange("all are here")
    times = multihost.exchange(time.time())
    skew = max(times) - min(times)
    if skew > MAX_SKEW_S:
      return Finding(
        FAIL, f"they differ by {skew:.1f} s: on each host, sudo systemctl restart chrony"
      )
    return Finding(OK, f"equal within {skew:.1f} s")

  def disk(self) -> Finding:
    """Every host can write, replace, sync and lock files in the workdir, and sees the others'."""
    # Whatever fails here, every process exchanges three times.
    token = multihost.exchange(uuid.uuid4().hex)[0]
    mine, failure = self.workdir / f".check-{token}-{jax.process_index()}", ""
    files = files_in(self.workdir)
    try:
      _try_files(mine) if isinstance(files, LocalFiles) else _try_object(files, mine.name)
    except OSError as error:
      failure = f"{error}. Choose a --workdir that this user can write"
    ready = all(not text for text in multihost.exchange(failure))
    seen = sum(n.startswith(f".check-{token}-") for n in files.names()) if ready else 0
    multihost.exchange("all have looked")
    with contextlib.suppress(OSError):
      files.delete(mine.name)
    if failure:
      return Finding(FAIL, failure)
    if ready and seen < jax.process_count():
      return Finding(
        FAIL,
        f"{self.workdir} is not shared: this host sees the files of {seen} of {jax.process_count()}"
        " hosts. Mount one file system on all of them; see docs/tpu.md",
      )
    done = "written, synced and locked" if isinstance(files, LocalFiles) else "written and read"
    return Finding(OK, f"{self.workdir} can be {done}")

  # --- the run's parts ----------------------------------------------------------------------------

  def make_tokenizer(self) -> Finding:
    """The tokenizer can be read, and its chat template is used if there is one."""
    self.tokenizer = make_tokenizer(self.config)
    text = f"{self.tokenizer.vocab_size} tokens, prompts are {self.config.prompts.format}"
    folder = self.config.tokenizer
    folder = self.config.model.checkpoint if folder == "checkpoint" else folder
    if self.config.prompts.format == "plain" and folder != "bytes" and _has_chat_template(folder):
      return Finding(
        WARN,
        f"{text}, although {folder} has a chat template: for a model that was trained to chat set"
        " config.prompts.format = 'chat'",
      )
    return Finding(OK, text)

  def make_task(self) -> Finding:
    """The data can be read: the first problem of each part."""
    tokenizer = _made(self.tokenizer, "the tokenizer has failed")
    self.task = make_task(self.config.task)
    of_task = self.task
    sources = (of_task.train, of_task.warm_start, of_task.held_out)
    parts = dict(zip(("training", "warm-start", "held-out"), sources, strict=True))
    if not len(self.task.train):
      return Finding(FAIL, "there is nothing to train on; choose a split of config.task")
    for source in parts.values():
      if len(source):
        tokenizer.encode_prompt(source[0].question)
    text = ", ".join(f"{len(source)} {name} problems" for name, source in parts.items())
    if warning := warm_start_warning(self.config, self.task):
      return Finding(WARN, f"{text}; {warning}")
    return Finding(OK, text)

  def build(self) -> Finding:
    """Everything that a run finds out before it compiles."""
    task, tokenizer = _made(self.task, "the data has failed"), self.tokenizer
    self.parts = build(self.config, task=task, tokenizer=tokenizer)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(self.parts.placement.base))
    return Finding(
      OK, f"{count / 1e6:,.1f} M parameters on a mesh of {dict(self.parts.placement.mesh.shape)}"
    )

  def checkpoint(self) -> Finding:
    """The first policy's checkpoint is there, with the network's tensors; weights are not read."""
    parts = _made(self.parts, "the configuration has failed")
    parameters.check_start(self.config.start, self.config.lora.adapters, self.workdir)
    folder = self.config.model.checkpoint
    if not folder:
      return Finding(OK, "none: the parameters are initialized")
    found = checked_tensors(folder, parts.placement.base)
    return Finding(OK, f"{folder} has all {len(found)} tensors")

  def space(self) -> Finding:
    """The workdir's disk has room for the checkpoints that are kept at a time."""
    parts = _made(self.parts, "the configuration has failed")
    state = jax.tree.leaves(parts.placement.state)
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in state)
    kept = self.config.checkpoint.keep + 2  # the best, and the one that is being written
    if in_bucket(self.workdir):
      return Finding(OK, f"{size * kept / _GIB:.1f} GiB for {kept} checkpoints, in a bucket")
    disk = os.statvfs(self.workdir)
    free, needed = disk.f_bavail * disk.f_frsize, size * kept
    text = f"{free / _GIB:.1f} GiB free, {needed / _GIB:.1f} for {kept} checkpoints"
    if free < needed:
      return Finding(FAIL, f"{text}: free some, or lower config.checkpoint.keep")
    return Finding(OK, text)

  def grader(self) -> Finding:
    """The grading processes start, with their self-tests and the sandbox, and grade a problem."""
    parts = _made(self.parts, "the configuration has failed")
    with grader_pool(self.config, parts.task) as pool:
      check_first_grade(self.config, pool, parts.task)
    return Finding(OK, f"{parts.task.grader} works: the first problem was graded")

  def memory(self) -> Finding:
    """What --mode=fits finds for the devices that are here."""
    parts = _made(self.parts, "the configuration has failed")
    limit = _device_limit()
    tables = memory.estimated(parts)
    if jax.default_backend() != "cpu":  # compiled into the cache that the run will read
      tables |= memory.compiled(parts)
    needs = {name: sum(table.values()) for name, table in tables.items()}
    text = ", ".join(f"{name}: {size / _GIB:.1f} GiB" for name, size in needs.items())
    if limit is None:
      return Finding(OK, f"{text} per device, whose limit is unknown")
    text += f", of {limit / _GIB:.1f} on each device"
    compiled = [size for name, size in needs.items() if name.endswith("compiled")]
    if max(compiled or needs.values()) > limit:
      cure = "lower config.batch.tokens_per_micro_batch or the lengths, or raise config.mesh"
      return Finding(FAIL, f"{text}: {cure} (docs/models.md)")
    return Finding(OK, text)


def _made(value: Any, reason: str) -> Any:
  if value is None:
    raise _NotCheckedError(reason)
  return value


def _try_files(path: pathlib.Path) -> None:
  """Does with a file what a run does with its own."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with replacing(path) as file:
    file.write(b"first")
  with replacing(path) as file:
    file.write(b"second")
  with open(path, "ab") as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.write(b" and more")
    file.flush()
    os.fsync(file.fileno())
  if path.read_bytes() != b"second and more":
    raise OSError(f"{path} has not what was written to it")


def _try_object(files: BucketFiles, name: str) -> None:
  """The same in a bucket."""
  with files.writing(name) as path:
    path.write_bytes(b"first")
  with files.reading(name) as path:
    if path.read_bytes() != b"first":
      raise OSError(f"{name} has not what was written to it")


def _has_chat_template(folder: str) -> bool:
  names = listing(folder)
  if "chat_template.jinja" in names:
    return True
  if "tokenizer_config.json" not in names:
    return False
  system, path = located(folder)
  with system.open(f"{path.rstrip('/')}/tokenizer_config.json", "rb") as file:
    return bool(json.load(file).get("chat_template"))


def _device_limit() -> float | None:
  """Bytes of a device's memory; None where that is not known."""
  device = jax.local_devices()[0]
  stats = device.memory_stats() or {}
  if "bytes_limit" in stats:
    return float(stats["bytes_limit"])
  kind = device.device_kind.lower().replace("tpu ", "").replace(" lite", "e").replace(" ", "")
  return CHIPS[kind].hbm_gib * _GIB if kind in CHIPS else None
