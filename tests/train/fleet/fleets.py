"""A trainer and samplers of the tiny run, as programs; and what a test reads from their store."""

import contextlib
import pathlib
import signal
import subprocess

import numpy as np
from train import tiny

from rlvr_jax.data.draws import problem_draws
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.setup.build import make_task

MAX_LAG = 2


def get_config():
  """The tiny run with samplers, which count as dead soon."""
  c = tiny.get_config()
  c.num_updates = 16
  c.schedule = f"asynchronous(max_lag={MAX_LAG})"
  c.fleet.samplers = True
  c.fleet.silent_s = 3.0
  c.checkpoint.every = 4
  return c


def config(**fields):
  c = get_config()
  c.update_from_flattened_dict({name.replace("__", "."): v for name, v in fields.items()})
  return c


def sampler_command(workdir, *flags):
  """The command line of a sampler, which takes the configuration from the workdir."""
  command = tiny.command(workdir, "--mode=sample", "--trust_run", *flags)
  return [argument for argument in command if not argument.startswith("--config=")]


class Program:
  """A trainer or a sampler."""

  def __init__(self, workdir, log, *flags, role="trainer", **variables):
    self.role, self.log = role, pathlib.Path(log)
    command = tiny.command(workdir, *flags, config_file=__file__)
    command = sampler_command(workdir, *flags) if role == "sampler" else command
    with open(log, "ab") as file:
      self.process = subprocess.Popen(
        command,
        stdout=file,
        stderr=file,
        cwd=tiny.ROOT,
        # One commit for all, also where somebody commits meanwhile.
        env=tiny.environment(**{"RLVR_JAX_COMMIT": "tested"} | variables),
      )

  def text(self):
    return self.log.read_text(errors="replace")

  def wait_for(self, text, others=()):
    """Waits until it has printed a text."""
    tiny.wait_for(lambda: text in self.text(), self.process)

  def end(self, timeout=tiny.TIMEOUT_S):
    """Waits for its end; the exit status."""
    return self.process.wait(timeout)

  def kill(self, number=signal.SIGKILL):
    self.process.send_signal(number)


@contextlib.contextmanager
def programs():
  """A list of programs; those that still run at the end are killed."""
  started = []
  try:
    yield started
  finally:
    for program in started:
      program.process.send_signal(signal.SIGCONT)
      program.kill()
      program.process.wait()


def has_run(workdir):
  """Whether the workdir has a run that a sampler can join, as a condition to wait for."""
  return lambda: (parse_path("", workdir) / "config.json").exists()


def check_store(workdir, num_updates=16, max_lag=MAX_LAG):
  """Whatever was killed: every batch once, its problems those of its draw, no lag above the bound.

  Reads the store alone. Returns the versions i32[batches, P].
  """
  store = RolloutStore(parse_path("", workdir) / "rollouts", writable=False)
  assert store.numbers() == list(range(num_updates))
  draws = problem_draws(make_task(get_config().task).train, batch_size=8, seed=0)
  versions, fingerprints = [], {}
  for number in store.numbers():
    arrays, info, samples = tiny.read_stored(store, number)
    versions.append(arrays["versions"])
    lags = number - arrays["versions"]
    assert (lags >= 0).all() and (lags <= max_lag).all(), (number, lags)
    assert info["after"]["draws"] == info["after"]["number"] == number + 1
    assert arrays["tokens"].shape[:2] == arrays["rewards"].shape == (8, 4)
    samplers = [sample["sampler"] for sample in samples]  # one per group
    assert all(samplers) and samplers == [name for name in samplers[::4] for _ in range(4)]
    assert len(samples) == 32 and {*map(int, info["versions"])} == {*arrays["versions"].tolist()}
    for version, fingerprint in info["versions"].items():
      assert fingerprints.setdefault(version, fingerprint) == fingerprint
    problems = draws.draw(number, 0)
    assert [sample["prompt"] for sample in samples[::4]] == [p.question for p in problems]
  return np.array(versions)
