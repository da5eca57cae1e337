"""The command `check`: tests everything that a run needs, on every host; prints a line per check.

A line has a status ("ok", "warn" or "FAIL"), the name of the check, and its finding. A failure says
how to fix it. Each host that disagrees with the majority gets a line of its own.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import ml_collections

import rlvr_jax
from rlvr_jax.commands import ahead_of_time
from rlvr_jax.costs.chips import CHIPS
from rlvr_jax.data import Problem, Task, Tokenizer
from rlvr_jax.data.by_name import make_tokenizer
from rlvr_jax.data.tokenizer import encode_first_turn, encode_prompt
from rlvr_jax.models.huggingface import open_tensors
from rlvr_jax.ops.keys import seeds_for
from rlvr_jax.rewards import GraderPool
from rlvr_jax.storage.files import replace_file
from rlvr_jax.storage.folders import list_files, locate
from rlvr_jax.storage.objects import Objects, open_objects
from rlvr_jax.storage.places import in_bucket, parse_path
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import memory_limit
from rlvr_jax.train.reporting.advice import on_demonstrations, plan_warm_start
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.session import check_teachers
from rlvr_jax.train.setup.build import Parts, build, make_task
from rlvr_jax.train.setup.compiler_options import slow_precision
from rlvr_jax.train.setup.grading import (
  check_first_dialogue,
  check_first_grade,
  check_first_messages,
  grader_pool,
  used_graders,
)
from rlvr_jax.train.setup.problem_filters import describe_long_texts
from rlvr_jax.train.setup.teachers import describe_long_teachers
from rlvr_jax.train.start import parameters
from rlvr_jax.train.start.every_line import check_every_line

OK, WARN, FAIL = "ok", "warn", "FAIL"
MAX_SKEW_S = 5.0  # the largest difference between the clocks of hosts
_TPU_FILES = ("/dev/vfio/[0-9]*", "/dev/accel*")
_BUSY = "find the process that uses them with `sudo lsof /dev/vfio/* /dev/accel*`, and end it"
_GIB = 2**30
T = TypeVar("T")
_MAX_SHOWN = 300  # characters that are shown of a text's beginning, and of its end


class PreflightError(RuntimeError):
  """At least one check failed."""


class Finding(NamedTuple):
  """Result of a check on this host."""

  status: str
  text: str


class _NotCheckedError(Exception):
  """An earlier check, whose result the current check needs, has failed."""


def check(config: ml_collections.ConfigDict, workdir: str) -> None:
  """Runs all checks and prints their findings; every process of the run must call it.

  Raises:
    PreflightError: a check failed on some host.
  """
  failed = []
  with multihost.silence_all_but_first():
    for name, action in Preflight(config, workdir).checks():
      findings = multihost.exchange(_run_check(action))
      for line in _format_lines(name, findings):
        say(line)
      if any(status == FAIL for status, _ in findings):
        failed.append(name)
  if failed:
    checks = "1 check" if len(failed) == 1 else f"{len(failed)} checks"
    raise PreflightError(f"{checks} failed: {', '.join(failed)}")
  if multihost.is_first():
    say("all checks passed")


def _run_check(action: Callable[[], Finding]) -> Finding:
  """The finding of a check; an exception counts as a failure."""
  try:
    return action()
  except _NotCheckedError as reason:
    return Finding(WARN, f"not checked: {reason}")
  except Exception as error:  # libraries raise errors of their own types
    text = " ".join(str(error).split())
    return Finding(
      FAIL, text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    )


def _format_lines(name: str, findings: Sequence[Finding]) -> Iterator[str]:
  """Yields a line of the first host with the most common status, and a line per differing host."""
  common, _ = collections.Counter(status for status, _ in findings).most_common(1)[0]
  representative = next(i for i, (status, _) in enumerate(findings) if status == common)
  for process, (status, text) in enumerate(findings):
    if process == representative or status != common:
      prefix = f"process {process}: " if status != common else ""
      yield f"{status:<5} {name:<11} {prefix}{text}"


class Preflight:
  """The checks of a run, in order; later checks use the results of earlier checks."""

  def __init__(self, config: ml_collections.ConfigDict, workdir: str):
    self.config = config
    self.workdir = parse_path("--workdir", workdir)
    self.tokenizer: Tokenizer | None = None
    self.task: Task | None = None
    self.parts: Parts | None = None

  def checks(self) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """Pairs (name, check); every process calls each check."""
    yield "devices", self.check_devices
    yield "processes", self.check_processes
    yield "clocks", self.check_clocks
    yield "workdir", self.check_workdir
    yield "tokenizer", self.check_tokenizer
    yield "data", self.check_data
    yield "config", self.check_config
    if not self.config.environment.name:
      yield "prompt", self.check_prompt
    yield "lengths", self.check_lengths
    yield "checkpoint", self.check_checkpoint
    if self.config.distillation != "none":
      yield "teacher", self.check_teacher
    yield "space", self.check_space
    yield "grader", self.check_grader
    if self.config.environment.name:
      yield "environment", self.check_environment
    yield "memory", self.check_memory

  # --- machines -----------------------------------------------------------------------------------

  def check_devices(self) -> Finding:
    """All hosts have devices of one kind, as many as the mesh needs."""
    kinds = sorted({device.device_kind for device in jax.devices()})
    tpu_files = sorted(path for pattern in _TPU_FILES for path in glob.glob(pattern))
    if tpu_files and jax.default_backend() == "cpu" and os.environ.get("JAX_PLATFORMS") != "cpu":
      return Finding(
        FAIL,
        f"this machine has TPU chips ({tpu_files[0]}), but jax found none: {_BUSY}; or install the"
        ' extra with `pip install "rlvr_jax[tpu]"`',
      )
    if len(kinds) > 1:
      return Finding(FAIL, f"devices of several kinds: {kinds}; use one slice, or equal slices")
    needed = _num_devices(self.config.mesh, jax.device_count())
    generation, whose = self.config.generation_mesh.to_dict(), "config.mesh has"
    if not generation.pop("same_devices") and any(generation.values()):
      needed += _num_devices(generation, jax.device_count() - needed)
      whose = "config.mesh and config.generation_mesh together have"
    text = f"{jax.device_count()} of {kinds[0]}, {jax.local_device_count()} on each host"
    if needed != jax.device_count():
      status = FAIL if needed > jax.device_count() or jax.process_count() > 1 else WARN
      return Finding(
        status,
        f"{text}, but {whose} {needed}: choose sizes of the axes that give {jax.device_count()}",
      )
    return Finding(OK, text)

  def check_processes(self) -> Finding:
    """All processes have connected, with the same configuration and versions."""
    local = {
      "config": self.config.to_json_best_effort(),
      "jax": jax.__version__,
      "python": sys.version.split()[0],
    }
    by_process = multihost.exchange(local | {"host": socket.gethostname()})
    first = by_process[0]
    if differing := [key for key in local if local[key] != first[key]]:
      details = [
        f"{key} = {local[key]}, {first[key]} on process 0" for key in differing if key != "config"
      ]
      return Finding(
        FAIL,
        f"differs from process 0 in {', '.join(differing)}{': ' * bool(details)}"
        f"{'; '.join(details)}. Start the same command with the same installation on every host",
      )
    hosts = [*dict.fromkeys(values["host"] for values in by_process)]
    first_hosts = ", ".join(hosts[:4]) + (", …" if len(hosts) > 4 else "")
    return Finding(OK, f"{len(by_process)} connected, on {first_hosts}")

  def check_clocks(self) -> Finding:
    """The clocks of all hosts agree."""
    multihost.exchange("ready")
    times = multihost.exchange(time.time())
    skew = max(times) - min(times)
    if skew > MAX_SKEW_S:
      return Finding(
        FAIL, f"they differ by {skew:.1f} s: run `sudo systemctl restart chrony` on each host"
      )
    return Finding(OK, f"equal within {skew:.1f} s")

  def check_workdir(self) -> Finding:
    """Every host can write, replace, sync and lock files in the workdir, and sees all files."""
    # Every process exchanges three times, even if something fails here.
    token = multihost.exchange(uuid.uuid4().hex)[0]
    path = self.workdir / f".check-{token}-{jax.process_index()}"
    failure = ""
    try:
      objects = open_objects(self.workdir, unreachable_s=0.0)
      if in_bucket(self.workdir):
        _try_bucket_object(objects, path.name)
      else:
        _try_local_file(path)
    except OSError as error:
      failure = f"{error}. Choose a --workdir that this user can write"
    ready = all(not text for text in multihost.exchange(failure))
    seen = sum(n.startswith(f".check-{token}-") for n in objects.list()) if ready else 0
    multihost.exchange("listed")
    with contextlib.suppress(OSError):
      path.unlink()
    if failure:
      return Finding(FAIL, failure)
    if ready and seen < jax.process_count():
      return Finding(
        FAIL,
        f"{self.workdir} is not shared: this host sees the files of {seen} of {jax.process_count()}"
        f" hosts. Mount one file system on all of them; see {rlvr_jax.page('tpu.md')}",
      )
    actions = "written and read" if in_bucket(self.workdir) else "written, synced and locked"
    return Finding(OK, f"{self.workdir} can be {actions}")

  # --- the run's parts ----------------------------------------------------------------------------

  def check_tokenizer(self) -> Finding:
    """The tokenizer can be read, and the configuration uses its chat template, if any."""
    self.tokenizer = make_tokenizer(
      self.config.tokenizer, self.config.prompts, self.config.model.checkpoint
    )
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

  def check_data(self) -> Finding:
    """The first problem of each split can be read and encoded."""
    tokenizer = _require(self.tokenizer, "the tokenizer has failed")
    task = make_task(self.config.task)
    splits = {"training": task.train, "warm-start": task.warm_start, "held-out": task.held_out}
    if not len(task.train):
      return Finding(FAIL, "config.task has no training problems; choose a split for training")
    for source in splits.values():
      if len(source):
        encode_prompt(source[0], tokenizer)
    self.task = task
    text = ", ".join(f"{len(source)} {name} problems" for name, source in splits.items())
    warm_start = plan_warm_start(
      self.config.warm_start, task, checkpoint=self.config.start.checkpoint
    )
    if warning := on_demonstrations(warm_start):
      return Finding(WARN, f"{text}; {warning}")
    return Finding(OK, text)

  def check_config(self) -> Finding:
    """The run can be built from its configuration; its programs are not compiled here."""
    task, tokenizer = _require(self.task, "the data has failed"), self.tokenizer
    self.parts = build(self.config, task=task, tokenizer=tokenizer)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(self.parts.placement.base))
    text = f"{count / 1e6:,.1f} M parameters on a mesh of {dict(self.parts.placement.mesh.shape)}"
    precision = slow_precision(self.parts.model.config.compute_dtype)
    warnings = [warning for warning in (_dear_sketch(self.parts), precision) if warning]
    return Finding(WARN if warnings else OK, "; ".join([text, *warnings]))

  def check_prompt(self) -> Finding:
    """The first training problem's prompt can be shown in the form that the policy reads."""
    parts = _require(self.parts, "the configuration has failed")
    ids = encode_prompt(parts.task.train[0], parts.tokenizer)
    return Finding(OK, _describe_prompt(parts.tokenizer, ids))

  def check_lengths(self) -> Finding:
    """The maximum lengths of policy and teachers suffice for the longest prompt and response."""
    parts = _require(self.parts, "the configuration has failed")
    shape = parts.shape
    if text := describe_long_texts(self.config.model.checkpoint, shape):
      return Finding(WARN, text)
    of_policy = self.config.model.checkpoint
    if texts := describe_long_teachers(parts.teachers, parts.teacher_prompts, shape, of_policy):
      return Finding(WARN, "; ".join(texts))
    most = f"of {shape.max_prompt_length} and responses of {shape.max_response_length} tokens"
    return Finding(OK, f"prompts {most} at most")

  def check_checkpoint(self) -> Finding:
    """The first policy's checkpoint has the network's tensors; the weights are not read."""
    parts = _require(self.parts, "the configuration has failed")
    parameters.check_start(self.config.start, self.config.lora.adapters, self.workdir)
    folder = self.config.model.checkpoint
    if not folder:
      return Finding(OK, "none: the parameters are initialized")
    tensors = open_tensors(folder, parts.placement.base, parts.model.config)
    return Finding(OK, f"{folder} has all {len(tensors)} tensors")

  def check_teacher(self) -> Finding:
    """Each teacher's checkpoint has all tensors of its network, and the policy's tokenizer.

    No weights are read.
    """
    parts = _require(self.parts, "the configuration has failed")
    check_teachers(parts)
    of_own = [math.prod(x.shape) for x in jax.tree.leaves(parts.placement.teachers)]
    names = ", ".join(teacher.checkpoint for teacher in parts.teachers)
    return Finding(OK, f"{names}: {sum(of_own) / 1e6:,.1f} M parameters beside the policy's")

  def check_space(self) -> Finding:
    """The workdir's disk has space for all checkpoints that may exist at the same time."""
    parts = _require(self.parts, "the configuration has failed")
    state = jax.tree.leaves(parts.placement.state)
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in state)
    count = self.config.checkpoint.keep + 2  # + 2: the best one, and the one that is being written
    needed = size * count
    if in_bucket(self.workdir):
      return Finding(OK, f"{needed / _GIB:.1f} GiB for {count} checkpoints, in a bucket")
    disk = os.statvfs(self.workdir)
    free = disk.f_bavail * disk.f_frsize
    text = f"{free / _GIB:.1f} GiB free, {needed / _GIB:.1f} for {count} checkpoints"
    if free < needed:
      return Finding(FAIL, f"{text}: free some space, or lower config.checkpoint.keep")
    return Finding(OK, text)

  def check_grader(self) -> Finding:
    """The grading processes start, pass their self-tests, and grade the reference answers."""
    parts = _require(self.parts, "the configuration has failed")
    with grader_pool(self.config.grading, parts.task) as pool:
      check_first_grade(parts.grading.outcome_policy, pool, parts.task)
      count = check_every_line(parts.grading.outcome_policy, pool, parts.task)
      first = _describe_grade(pool, parts.task.train[0])
    names = ", ".join(used_graders(parts.task))
    return Finding(OK, f"{count} problems were graded; graders: {names}; {first}")

  def check_environment(self) -> Finding:
    """The environment's processes start on the first host, and answer a turn in a test dialogue."""
    parts = _require(self.parts, "the configuration has failed")
    with contextlib.ExitStack() as stack:
      enter = lambda pool: stack.enter_context(contextlib.closing(pool))
      pools = parts.start_pools(enter)
      text = check_first_dialogue(parts.grading.outcome_policy, pools[1], parts.task)
      answers, length = parts.make_answers(*pools), parts.shape.max_prompt_length
      sources = parts.task.held_out, parts.task.train
      check_first_messages(answers, parts.tokenizer, length, *sources)
      first = [parts.task.train[0]]
      (beginning,) = answers.begin(first, seeds_for(0, "rollout", 0, 1), of=1)
      ids = encode_first_turn(first[0], parts.tokenizer, length, beginning.messages)
    did = text or "its processes are on the first host"
    return Finding(OK, f"{did}; of the prompts {_describe_prompt(parts.tokenizer, ids)}")

  def check_memory(self) -> Finding:
    """The run fits into the memory of the devices or, on CPUs, of the host; see --mode=fits."""
    parts = _require(self.parts, "the configuration has failed")
    if jax.default_backend() == "cpu":
      return _check_host_memory(parts)
    limit = _device_memory_limit()
    # The run will find the compiled programs in the cache.
    tables = ahead_of_time.memory_tables(parts, compiled=True)
    totals = {name: sum(table.values()) for name, table in tables.items()}
    text = ", ".join(f"{name}: {size / _GIB:.1f} GiB" for name, size in totals.items())
    if limit is None:
      return Finding(OK, f"{text} per device, whose limit is unknown")
    text += f", of {limit / _GIB:.1f} on each device"
    compiled = [size for name, size in totals.items() if name.endswith("compiled")]
    if max(compiled or totals.values()) > limit:
      layout = parts.placement.row_layout
      remedy = f"set config.batch.tokens_per_micro_batch below {layout.device_places}, lower the"
      return Finding(
        FAIL, f"{text}: {remedy} lengths, or raise config.mesh ({rlvr_jax.page('costs.md')})"
      )
    return Finding(OK, text)


def _num_devices(sizes: Mapping[str, int], available: int) -> int:
  """Number of devices of a mesh; one size may be -1, which stands for all remaining devices."""
  given = math.prod(size or 1 for size in sizes.values() if size != -1)
  return given * max(available // given, 1) if -1 in sizes.values() else given


def _describe_prompt(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
  """Text that shows a prompt with its special tokens, without the middle of a long prompt."""
  text = tokenizer.decode(ids, with_special=True)
  if (left_out := len(text) - 2 * _MAX_SHOWN) > 0:
    text = f"{text[:_MAX_SHOWN]} … [{left_out} characters] … {text[-_MAX_SHOWN:]}"
  return f"the first has {len(ids)} tokens: {text!r}"


def _describe_grade(pool: GraderPool, problem: Problem) -> str:
  """Text on the grade of a problem's demonstration or, without one, of the problem's answer."""
  text = problem.solution or problem.answer
  (grade,) = pool.grade([text], [problem.reference])
  found = f", {grade.answer!r} was extracted" if grade.answer else ""
  return f"of the first one, {text[-_MAX_SHOWN:]!r} is {grade.outcome}{found}"


def _dear_sketch(parts: Parts) -> str | None:
  """A warning if a sketched Gram matrix costs more than the exact matrix."""
  gram, width = parts.method.gram, parts.model.config.width
  if gram is None or gram.projection is None:
    return None
  columns = jax.eval_shape(lambda: gram.projection(parts.model.config.vocab_size)).shape[1]
  sketched, exact = columns / width, 2 + parts.shape.responses / parts.shape.max_response_length
  if sketched < exact:
    return None
  return (
    f"config.gram = {parts.config.gram!r} costs as much as {sketched:.1f} products of the head at a"
    f" width of {width}, but the exact 'streaming' only {exact:.1f}; set config.gram = 'streaming'"
  )


def _check_host_memory(parts: Parts) -> Finding:
  """The processes of the run fit into this host's memory."""
  limit = memory_limit()
  tables = ahead_of_time.host_memory_tables(parts)
  totals = {name: sum(table.values()) for name, table in tables.items()}
  text = ", ".join(f"{name}: {size / _GIB:.1f}" for name, size in totals.items())
  text = f"{max(totals.values()) / _GIB:.1f} of {limit / _GIB:.1f} GiB at the peak ({text})"
  if max(totals.values()) <= limit:
    return Finding(OK, text)
  remedies = {
    "warm start": "lower config.warm_start.batch_size",
    "generation": "lower config.sampling.slots or the lengths",
  }
  layout = parts.placement.row_layout
  lower = f"set config.batch.tokens_per_micro_batch below {layout.device_places}, or lower lengths"
  remedy = remedies.get(max(totals, key=lambda name: totals[name]), lower)
  return Finding(FAIL, f"{text}: {remedy}, or take a smaller network ({rlvr_jax.page('costs.md')})")


def _require(value: T | None, reason: str) -> T:
  """The value; raises _NotCheckedError if it is None, because an earlier check failed."""
  if value is None:
    raise _NotCheckedError(reason)
  return value


def _try_local_file(path: pathlib.Path) -> None:
  """Writes, replaces, locks and syncs a file, as a run does with its own files."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with replace_file(path) as file:
    file.write(b"first")
  with replace_file(path) as file:
    file.write(b"second")
  with open(path, "ab") as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.write(b" and more")
    file.flush()
    os.fsync(file.fileno())
  if path.read_bytes() != b"second and more":
    raise OSError(f"{path} does not contain what was written")


def _try_bucket_object(objects: Objects, name: str) -> None:
  """Writes an object and reads it back."""
  if not objects.put(name, b"first") or objects.get(name) != b"first":
    raise OSError(f"{name} does not contain what was written")


def _has_chat_template(folder: str) -> bool:
  names = list_files(folder)
  if "chat_template.jinja" in names:
    return True
  if "tokenizer_config.json" not in names:
    return False
  system, path = locate(folder)
  with system.open(f"{path.rstrip('/')}/tokenizer_config.json", "rb") as file:
    return bool(json.load(file).get("chat_template"))


def _device_memory_limit() -> float | None:
  """Bytes of a device's memory; None if unknown."""
  device = jax.local_devices()[0]
  stats = device.memory_stats() or {}
  if "bytes_limit" in stats:
    return float(stats["bytes_limit"])
  kind = device.device_kind.lower().replace("tpu ", "").replace(" lite", "e").replace(" ", "")
  return CHIPS[kind].hbm_gib * _GIB if kind in CHIPS else None
