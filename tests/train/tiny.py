"""A run of seconds, and how tests start, stop and compare such runs; also a configuration file."""

import contextlib
import functools
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import pytest
from train.kinds import KINDS, set_kind

from rlvr_jax.configs import base
from rlvr_jax.evaluate import run_files
from rlvr_jax.rollouts.batches import versions_of
from rlvr_jax.rollouts.group import join
from rlvr_jax.rollouts.store import GROUPS_FOLDER
from rlvr_jax.storage.bucket import Bucket
from rlvr_jax.storage.places import OWNER, in_bucket, open_lines, parse_path
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.setup.behavior_sources import recorded_groups
from rlvr_jax.train.setup.build import batch_shape, build
from rlvr_jax.train.setup.programs import RowTokens
from rlvr_jax.train.start.rows import RunRows

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 900  # generous: a busy machine is no failure
needs_compile_log = pytest.mark.skipif(
  jax.__version_info__ < (0, 8), reason="jax 0.7 logs a compilation twice, and traces otherwise"
)


def get_config(kind=""):
  """Sums of two digits; four updates per refresh, so that checkpoints leave rollouts pending.

  A task of its own: the program and its graders owe no second to the import of reasoning-gym.

  On the command line `tiny.py:KIND` is one of `kinds.KINDS`; `tiny.py:NAME` takes the schedule of
  configs/NAME.py instead.
  """
  c = base.get_config()
  c.num_updates = 12
  c.task = dict(name="train.sums:sums", kwargs={})
  c.max_prompt_length = 8
  c.max_response_length = 4
  c.model.overrides = dict(num_layers=1, width=32, mlp_width=64, unroll_layers=1)
  c.warm_start.num_steps = 40
  c.warm_start.batch_size = 16
  c.warm_start.learning_rate = "constant(peak=1e-2)"
  c.batch.prompts, c.batch.group_size = 8, 4
  c.schedule = "updates_per_refresh(batches=2, epochs=2)"
  c.reference.kl_coefficient = 0.1
  c.optimizer = "adamw(weight_decay=0.1)"
  c.learning_rate = "linear(peak=3e-3, warmup=3)"
  c.evaluation.every = 5
  c.evaluation.num_samples = 2
  c.evaluation.ks = (1, 2)
  c.evaluation.batch_prompts = 4
  c.grading.num_workers = 1
  c.checkpoint.every = 1
  c.logging.rollouts_every = 4
  if kind in KINDS:
    with c.unlocked():
      set_kind(c, kind, expert_width=32)
  elif kind:
    c.schedule = importlib.import_module(f"rlvr_jax.configs.{kind}").get_config().schedule
  return c


def on_reasoning_gym():
  """The same with problems of reasoning-gym."""
  c = get_config()
  c.task = base.get_config().task
  c.task.kwargs.settings = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
  c.task.kwargs.prompt = "{expression}="
  c.task.kwargs.warm_start_size = 80
  c.task.kwargs.held_out_size = 10
  return c


def config(**fields):
  """The tiny configuration with fields changed; `__` stands for the dot of a field's path."""
  c = get_config()
  c.update_from_flattened_dict({name.replace("__", "."): v for name, v in fields.items()})
  return c


# --- the program ----------------------------------------------------------------------------------


def recorded_by(config, tokenizer):
  """The groups of the store that a configuration names."""
  return recorded_groups(
    config.sources.recorded.store,
    (config.tokenizer, tokenizer.pad_id),
    batch_shape(config),
    allow_truncated=config.allow_truncated_behavior,
  )


def run_rows(parts, recorded=None, record=lambda _: None):
  """The rows of a run, as a session makes them."""
  return RunRows(
    parts.placement,
    parts.shape,
    parts.model.config,
    has_first_phase=parts.method.has_first_phase,
    configured=RowTokens(*(parts.config.batch[name] for name in RowTokens._fields)),
    recorded=recorded,
    record=record,
  )


def command(workdir, *flags, config_file=__file__):
  program = [sys.executable, "-m", "rlvr_jax.main", f"--config={config_file}"]
  return [*program, f"--workdir={workdir}", *flags]


def environment(**variables):
  path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
  return os.environ | {"PYTHONPATH": path} | variables


def run(workdir, *flags, expect=0, config_file=__file__, file_kib=None, **variables):
  """Runs the program to its end and returns what it printed, both streams in order.

  With `file_kib` no file can grow beyond that, as if the disk were full.
  """
  # Through a shell: a function to run after the fork could deadlock, this process has threads.
  limit = ["bash", "-c", 'ulimit -S -f "$0" && exec "$@"', str(file_kib)] if file_kib else []
  done = subprocess.run(
    [*limit, *command(workdir, *flags, config_file=config_file)],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    cwd=ROOT,
    env=environment(**variables),
    timeout=TIMEOUT_S,
  )
  assert done.returncode == expect, done.stdout[-5000:]
  return done.stdout


@contextlib.contextmanager
def started(workdir, *flags, config_file=__file__, log=None, **variables):
  """The program in the background; killed at the end if it is still there.

  What it prints is in the file `log`, by default beside a workdir on a disk.
  """
  with open(log or f"{workdir}.log", "ab") as file:
    process = subprocess.Popen(
      command(workdir, *flags, config_file=config_file),
      stdout=file,
      stderr=file,
      cwd=ROOT,
      env=environment(**variables),
    )
  try:
    yield process
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()


def wait_for(condition, process):
  """Polls `condition()` while the process runs."""
  deadline = time.monotonic() + TIMEOUT_S
  while not condition():
    assert process.poll() is None, "the program ended before the condition was met"
    assert time.monotonic() < deadline, "the condition was not met in time"
    time.sleep(0.002)


def has_record(workdir, step, phase):
  """Whether metrics.jsonl has the record, as a condition to wait for."""
  start = f'{{"step": {step}, "phase": "{phase}"'
  path = pathlib.Path(workdir) / run_files.METRICS_FILE
  return lambda: path.exists() and start in path.read_text()


def holds(workdir, process):
  """Whether the process has the workdir, as a condition to wait for: the run proper begins."""

  def condition():
    with contextlib.suppress(FileNotFoundError):
      if in_bucket(workdir):
        return json.loads(Bucket(workdir).read(OWNER))["process"] == process.pid
      return (pathlib.Path(workdir) / ".lock").read_text() == f"{process.pid}\n"

  return condition


def written(workdir):
  """Where a run's first process writes its files now: of a bucket, its staging folder."""
  if not in_bucket(workdir):
    return workdir
  folders = pathlib.Path(tempfile.gettempdir()).glob(f"*/{parse_path('', workdir).name}")
  found = [folder for folder in folders if (folder / "config.json").exists()]
  return max(found, key=lambda folder: folder.stat().st_mtime, default=pathlib.Path("absent"))


# --- damage ---------------------------------------------------------------------------------------


def cut(path):
  """Leaves the first kilobyte of a file, as a kill in the middle of writing would."""
  path.write_bytes(path.read_bytes()[:1000])


def flip(path):
  """Flips one bit in the middle of a file."""
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


# --- what it left ---------------------------------------------------------------------------------


def without_timings(record):
  """The record without what was measured on the machine: identical in every rerun."""
  return {name: x for name, x in record.items() if not name.startswith(run_files.MEASURED)}


def records(workdir, phase=None):
  """The records of metrics.jsonl without what a clock measured."""
  found = [without_timings(record) for record in run_files.read_metrics(workdir)]
  return [record for record in found if phase in (None, record["phase"])]


def unfinished_groups(workdir):
  """The number of groups that are sampled and not yet in a batch of the store."""
  if in_bucket(workdir):
    return len(Bucket(f"{workdir}/rollouts/{GROUPS_FOLDER}").names())
  return len([*(workdir / "rollouts" / GROUPS_FOLDER).glob("*.safetensors")])


def read_stored(store, number):
  """(arrays, info, samples) of a stored batch; who sampled its groups is among the arrays."""
  groups, info = store.read(number)
  arrays = join(groups) | {
    "versions": versions_of(groups),
    "sources": np.array([group.source for group in groups]),
  }
  return arrays, info, [sample for group in groups for sample in group.samples]


def rollouts(workdir):
  with open_lines(parse_path("", workdir) / run_files.ROLLOUTS_FILE) as lines:
    return lines.read()


@functools.cache
def abstract_state(get_config):
  return build(get_config()).placement.state


def last_checkpoint(workdir, get_config=get_config):
  """The last checkpoint of a tiny run: step, host values, and every array as (path, bytes)."""
  checkpointer = Checkpointer(parse_path("", workdir) / "checkpoints")
  with contextlib.closing(checkpointer):
    restored = checkpointer.restore(abstract_state(get_config))
  del restored.host["written"]  # checksums of records, which are compared without their timings
  leaves = jax.tree_util.tree_leaves_with_path((restored.state, restored.arrays))
  arrays = [(jax.tree_util.keystr(path), np.asarray(leaf).tobytes()) for path, leaf in leaves]
  return restored.step, restored.host, arrays


def outcome(workdir, get_config=get_config):
  """All that two runs of one configuration have in common, to the bit; also of a bucket."""
  return {
    "metrics": records(workdir),
    "rollouts": rollouts(workdir),
    "checkpoint": last_checkpoint(workdir, get_config),
  }
