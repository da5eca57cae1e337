"""A trainer and samplers: they learn, end, and go on whatever is killed."""

import contextlib
import dataclasses
import re
import signal
import threading
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest
from train import dialogues_test, multiprocess_test, new_weights_test, routes_test, tiny
from train.fleet import fleets

from docs import glossary
from rlvr_jax.commands.sample import sample_with
from rlvr_jax.commands.train import train
from rlvr_jax.data.task_utils import BY_REFERENCE
from rlvr_jax.evaluate import run_files
from rlvr_jax.rollouts.group import Draw
from rlvr_jax.rollouts.sampler import SamplerStoppedError
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.objects import open_objects
from rlvr_jax.storage.places import in_bucket, parse_path
from rlvr_jax.train.fleet import roles
from rlvr_jax.train.fleet.roles import ComparedSampler, ForeignGraderError
from rlvr_jax.train.generation.agreement import AgreementError
from rlvr_jax.train.setup.build import build


@contextlib.contextmanager
def sampling(workdir, parts):
  """A sampler in a thread of this process, beside the trainer; yields its errors."""
  errors = []

  def run():
    try:
      while not (workdir / "fleet").exists():
        time.sleep(0.01)
      with contextlib.ExitStack() as stack:
        enter = lambda pool: stack.enter_context(contextlib.closing(pool))
        pools = parts.start_pools(enter)
        frozen = parts.initial.frozen().sampler
        sample_with(parts, workdir, frozen, parts.make_answers(*pools))
    except BaseException as error:
      errors.append(error)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  yield errors
  thread.join(60)
  assert not thread.is_alive()


def test_a_trainer_and_a_sampler(tmp_path, capsys):
  workdir = tmp_path / "run"
  # After four steps of the warm start no answer is right: digits are worth something, too.
  by_digits = dict(
    grading__extra=(("rewards.user_graders:digits", 1.0),),
    grading__outcomes__wrong="score",
    grading__outcomes__unparseable="score",
    warm_start__num_steps=4,
  )
  parts = build(fleets.config(num_updates=4, **by_digits))
  with sampling(workdir, parts) as errors:
    train(parts, workdir)
  assert errors == []
  versions = fleets.check_store(workdir, 4)
  records = tiny.records(workdir, "train")
  assert [record["step"] for record in records] == [1, 2, 3, 4]
  for number, record in enumerate(records):
    lags = number - versions[number]  # the metrics are over tokens
    assert lags.min() <= record["staleness/mean"] <= record["staleness/max"] <= lags.max()
  measured = [r for r in run_files.read_metrics(workdir) if r["phase"] == "train"]
  assert {record["fleet/running"] for record in measured} == {1}
  assert sum(record["time/publish_seconds"] for record in measured) > 0
  assert not glossary.missing(workdir)
  assert any(
    record["agreement/policy_mean"] < 1e-5
    for record in records
    if "agreement/policy_mean" in record
  )
  assert max(record["update/gradient_norm"] for record in records) > 0.01
  output = capsys.readouterr().out
  assert "the trainer has all its batches" in output


@pytest.mark.slow
def test_a_sampler_that_computes_something_else_ends_the_run(tmp_path):
  parts = build(fleets.config(max_behavior_gap=1e-12))
  with sampling(tmp_path / "run", parts) as errors:
    with pytest.raises(SamplerStoppedError, match="AgreementError: sampler and trainer disagree"):
      train(parts, tmp_path / "run")
  assert [type(error) for error in errors] == [AgreementError]


class FailingFuture:
  def result(self, timeout=None):
    raise OSError("the disk is on fire")


@pytest.mark.slow
def test_a_policy_that_cannot_be_published_ends_the_run_at_once(tmp_path, monkeypatch):
  save = ocp.PyTreeCheckpointHandler.async_save

  async def fail(handler, directory, *args, **options):
    futures = await save(handler, directory, *args, **options)
    fails = "fleet_weights" in str(getattr(directory, "path", directory))
    return [*futures, FailingFuture()] if fails else futures

  monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "async_save", fail)
  with pytest.raises(SamplerStoppedError, match=r"version 0 of .*fleet_weights.* is on fire"):
    train(build(fleets.config(generation_deadline_s=60.0)), tmp_path / "run")
  assert run_files.read_metrics(tmp_path / "run")  # which goes on when it is started again


def test_a_grader_that_only_late_problems_name_ends_the_run():
  """No sampler imports it: each would end, one after another."""
  parts = build(fleets.config())
  named = lambda name: {"grader": name, "reference": {}}
  early = [dataclasses.replace(p, reference=named("own:known()")) for p in [parts.task.train[0]]]
  task = dataclasses.replace(parts.task, grader=BY_REFERENCE, train=early, held_out=early)
  sampler = ComparedSampler(WantsNothing(), None, parts.sources, task, None)
  wanted = lambda name: Draw(0, [dataclasses.replace(early[0], reference=named(name))], 0, 0, [0])
  sampler.want(wanted("own:known()"), [0])
  with pytest.raises(ForeignGraderError, match="'other:grader\\(\\)'") as told:
    sampler.want(wanted("other:grader()"), [0])
  assert isinstance(told.value, roles.OF_THE_RUN)


class WantsNothing:
  def want(self, draw, indices):
    pass


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (
      dict(schedule="fixed_lag(lag=2)"),
      r"'fixed_lag\(lag=2\)' does not sample during updates; set config\.schedule = 'asynchronous",
    ),
    (dict(fleet__silent_s=0.5), r"silent_s = 0.5"),
    (
      dict(generation_mesh__data=1),
      r"has devices of its own, while a fleet's sampler samples on the devices of config\.mesh",
    ),
    (
      dict(sources__temperature=dict(fraction=0.5, temperature=1.5, recorded="raw")),
      r"recorded = 'raw' needs the policy's parameters",
    ),
  ],
)
def test_what_a_fleet_cannot_do_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    build(fleets.config(**fields))


@pytest.mark.slow
def test_a_fleet_samples_what_one_program_samples(tmp_path):
  """The first batch, which the first policy samples: same problems, keys, grades and bits."""
  parts = build(fleets.config(num_updates=2))
  with sampling(tmp_path / "fleet", parts):
    train(parts, tmp_path / "fleet")
  train(build(tiny.config(num_updates=2, schedule="on_policy()")), tmp_path / "alone")
  of = lambda name: tiny.read_stored(RolloutStore(tmp_path / name / "rollouts", writable=False), 0)
  (arrays, _, samples), (expected, _, expected_samples) = of("fleet"), of("alone")
  assert len({sample.pop("sampler") for sample in samples}) == 1
  assert samples == expected_samples and arrays.keys() == expected.keys()
  for name in arrays:
    np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)


@pytest.mark.slow
def test_routes_of_a_mixture_in_a_fleet(tmp_path):
  config = fleets.config(
    num_updates=4,
    model__overrides=routes_test.MIXTURE,
    model__routing="replayed",
    sources__temperature__fraction=0.5,
    sources__temperature__temperature=1.5,
  )
  parts = build(config)
  with sampling(tmp_path / "run", parts) as errors:
    train(parts, tmp_path / "run")
  assert errors == []
  fleets.check_store(tmp_path / "run", 4)
  records = tiny.records(tmp_path / "run", "train")
  assert len(records) == 4 and records[0]["agreement/policy_mean"] < 1e-5
  assert "agreement/temperature_mean" in records[0]
  arrays, _, _ = tiny.read_stored(RolloutStore(tmp_path / "run" / "rollouts", writable=False), 0)
  # Of every place, which the updates replay.
  sizes = routes_test.LAYERS, routes_test.CHOSEN
  assert arrays["routes"].shape == (*arrays["tokens"].shape, *sizes)
  assert 0 < arrays["routes"].max() < routes_test.EXPERTS


@pytest.mark.slow
def test_dialogues_in_a_fleet(tmp_path):
  config = dialogues_test.config(schedule="asynchronous(max_lag=2)", fleet__samplers=True)
  parts = build(config)
  with sampling(tmp_path / "run", parts) as errors:
    train(parts, tmp_path / "run")
  assert errors == []
  records = tiny.records(tmp_path / "run", "train")
  assert len(records) == 4 and all(record["dialogue/turns"] > 1 for record in records)
  assert all(record["agreement/policy_mean"] < 1e-5 for record in records[:1])


@pytest.mark.slow
def test_newer_weights_take_over_responses_and_one_program_repeats_it(tmp_path):
  setting, fields = "recompute", dict(num_updates=8, max_response_length=128)
  config = new_weights_test.config(fleet__new_weights=setting, **fields)
  config.fleet.samplers = True
  with sampling(tmp_path / "run", build(config)) as errors:
    train(build(config), tmp_path / "run")
  assert errors == []
  batches, several = new_weights_test.check_store(tmp_path / "run")
  assert batches == 8 and several > 0  # responses take longer than a policy takes to restore
  measured = [r for r in run_files.read_metrics(tmp_path / "run") if r["phase"] == "train"]
  gaps = [r["agreement/policy_mean"] for r in measured if "agreement/policy_mean" in r]
  assert len(gaps) >= 3 and max(gaps) < 1e-5
  repeated = new_weights_test.repeated(tmp_path / "run", setting, **fields)
  train(build(repeated), tmp_path / "again")
  new_weights_test.assert_repeats(tmp_path / "again", tmp_path / "run")


# --- programs -------------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "bucket"])
def workdir(request, tmp_path):
  """Where a run is to be."""
  return tmp_path / "run" if request.param == "disk" else request.getfixturevalue("url")


class Fleet:
  """Programs on one workdir, with a log each."""

  def __init__(self, workdir, logs, started):
    self.workdir, self._logs, self.started = workdir, logs, started

  def start(self, role, *flags, **variables):
    log = self._logs / f"{len(self.started)}_{role}.log"
    program = fleets.Program(self.workdir, log, *flags, role=role, **variables)
    self.started.append(program)
    return program

  def trainer(self, *flags, **variables):
    """Starts a trainer; returns when samplers can join it."""
    program = self.start("trainer", *flags, **variables)
    tiny.wait_for(fleets.has_run(self.workdir), program.process)
    return program

  def sampler(self, *flags, **variables):
    return self.start("sampler", *flags, **variables)

  def wait_for_update(self, trainer, update):
    def reached():
      assert any(p.role == "sampler" and p.process.poll() is None for p in self.started)
      return re.search(rf"step +{update}/", trainer.text())

    tiny.wait_for(reached, trainer.process)

  def files(self):
    return open_objects(parse_path("", self.workdir) / "fleet")


@pytest.fixture
def fleet(workdir, tmp_path):
  with fleets.programs() as started:
    yield Fleet(workdir, tmp_path, started)
    for program in started:
      print(f"--- {program.log.name}\n{program.text()[-3000:]}")


def trained_once(workdir, num_updates=16):
  """Whether metrics.jsonl has every update once."""
  return [r["step"] for r in tiny.records(workdir, "train")] == [*range(1, num_updates + 1)]


@pytest.mark.slow
def test_a_killed_trainer_has_a_successor(fleet):
  """The updates after its last checkpoint are repeated, from the store, with the same policies."""
  trainer, samplers = fleet.trainer(), [fleet.sampler() for _ in range(2)]
  fleet.wait_for_update(trainer, 7)
  trainer.kill()
  trainer.end()
  time.sleep(3)
  assert all(sampler.process.poll() is None for sampler in samplers)  # wait for its successor
  successor = fleet.trainer()
  assert [program.end() for program in (successor, *samplers)] == [0, 0, 0]
  assert "resumed at update 5" in successor.text()
  fleets.check_store(fleet.workdir)
  assert trained_once(fleet.workdir)


@pytest.mark.slow
def test_samplers_are_killed_frozen_and_asked_to_end(fleet):
  trainer = fleet.trainer()
  killed, frozen, asked = samplers = [fleet.sampler() for _ in range(3)]
  fleet.wait_for_update(trainer, 2)
  for sampler in samplers:
    sampler.wait_for("waits for groups")
  killed.kill()
  frozen.kill(signal.SIGSTOP)
  began = time.monotonic()
  asked.kill(signal.SIGTERM)
  assert asked.end() == 0
  assert time.monotonic() - began < 10
  assert "other samplers take over its groups" in asked.text()
  fleet.sampler()
  fleet.wait_for_update(trainer, 12)
  frozen.kill(signal.SIGCONT)  # long after others have sampled its groups
  assert trainer.end() == 0 and fleet.started[-1].end() == 0 and frozen.end() == 0
  fleets.check_store(fleet.workdir)
  assert trained_once(fleet.workdir)


@pytest.mark.slow
def test_a_trainer_that_is_asked_to_end_waits_for_nobody(fleet):
  """Without a sampler it says what it waits for; a signal ends it within seconds."""
  trainer = fleet.trainer()
  trainer.wait_for("held-out after update 0")
  time.sleep(2)
  began = time.monotonic()
  trainer.kill(signal.SIGTERM)
  assert trainer.end() == 0 and time.monotonic() - began < 10
  assert "shutdown requested: saved after update 0" in trainer.text()
  second = fleet.trainer()
  sampler = fleet.sampler()
  assert second.end() == 0 and sampler.end() == 0
  fleets.check_store(fleet.workdir)


@pytest.mark.slow
def test_programs_that_do_not_belong_are_refused_by_name(tmp_path):
  with fleets.programs() as started:
    fleet = Fleet(tmp_path / "run", tmp_path, started)
    trainer = fleet.trainer(RLVR_JAX_COMMIT="aaaa")
    trainer.wait_for("held-out after update 0")
    refused = [
      (fleet.sampler(*flags, RLVR_JAX_COMMIT=commit), message)
      for flags, commit, message in [
        ((), "bbbb", "code: 0.1.0 at bbbb here, 0.1.0 at aaaa there"),
        (("--config.batch.group_size=8",), "aaaa", "batch.group_size: 4 in the workdir, 8 here"),
        (("--config.fleet.samplers=False",), "aaaa", "fleet.samplers: true in the workdir"),
      ]
    ]
    # It waits for a trainer of its own commit until it sees this one at work.
    refused[0][0].wait_for("waits for another trainer")
    other = fleet.start("trainer", RLVR_JAX_COMMIT="aaaa")
    assert other.end() == 1 and "is in use by process" in other.text()
    # Layouts and machines may differ.
    sampler = fleet.sampler(
      "--config.mesh.data=2", "--config.sampling.slots=8", RLVR_JAX_COMMIT="aaaa"
    )
    assert trainer.end() == 0 and sampler.end() == 0
    for program, message in refused:
      assert program.end() == 1 and message in program.text(), program.text()
  fleets.check_store(tmp_path / "run")


@pytest.mark.slow
def test_what_a_crash_damages_is_made_up_for(tmp_path):
  """By the next start of the trainer; until then the run ends with the reason."""
  with fleets.programs() as started:
    fleet = Fleet(tmp_path / "run", tmp_path, started)
    trainer, workdir = fleet.trainer(), tmp_path / "run"
    tiny.wait_for(lambda: [*workdir.glob("fleet_weights/0/commit_success.txt")], trainer.process)
    tiny.wait_for(lambda: len([*workdir.glob("fleet/draws/*")]) == 3, trainer.process)
    (array,) = workdir.glob("fleet_weights/0/arrays/embedding/0.0")
    tiny.flip(array)
    sampler = fleet.sampler()
    assert sampler.end() == 1 and "is damaged" in sampler.text()
    message = "start the trainer again: it rewrites the policy"
    assert trainer.end() == 1 and message in trainer.text()
    for path in workdir.glob("fleet/*/*"):
      if path.parent.name != "terms":  # the marks of former trainers are not read again
        tiny.flip(path)
    (workdir / "fleet" / "groups").mkdir(exist_ok=True)
    (workdir / "fleet" / "groups" / "1.0").touch()  # written and linked, not yet on the disk
    trainer, sampler = fleet.trainer(), fleet.sampler()
    assert [trainer.end(), sampler.end()] == [0, 0], trainer.text() + sampler.text()
    assert "group 0 of draw 1 is sampled again" in trainer.text()
  fleets.check_store(workdir)


@pytest.mark.slow
def test_a_sampler_of_two_processes(tmp_path):
  """The first one decides what both sample; each grades its part."""
  with fleets.programs() as started:
    fleet = Fleet(tmp_path / "run", tmp_path, started)
    trainer = fleet.trainer()

    def command_of(*of_pair):
      flags = "--config.mesh.data=2", *multiprocess_test.place(*of_pair)
      return fleets.sampler_command(fleet.workdir, *flags)

    pair = multiprocess_test.Processes(command_of, devices=1, RLVR_JAX_COMMIT="tested")
    try:
      statuses, outputs = pair.ended()
    finally:
      pair.signal_all(signal.SIGKILL)
    assert statuses == [0, 0], "\n".join(outputs)[-5000:]
    assert "the trainer has all its batches" in outputs[0] and trainer.end() == 0
  fleets.check_store(tmp_path / "run")


@pytest.mark.slow
def test_a_trainer_of_two_processes(tmp_path):
  workdir = tmp_path / "run"

  def command_of(*of_pair):
    flags = "--config.mesh.data=2", *multiprocess_test.place(*of_pair)
    return tiny.command(workdir, *flags, config_file=fleets.__file__)

  pair = multiprocess_test.Processes(command_of, devices=1, RLVR_JAX_COMMIT="tested")
  with fleets.programs() as started:
    try:
      tiny.wait_for(fleets.has_run(workdir), pair.processes[0])
      fleet = Fleet(workdir, tmp_path, started)
      sampler = fleet.sampler("--config.mesh.data=1")
      statuses, outputs = pair.ended()
    finally:
      pair.signal_all(signal.SIGKILL)
    assert statuses == [0, 0], "\n".join(outputs)[-5000:]
    assert sampler.end() == 0
  fleets.check_store(workdir)
  assert trained_once(workdir)


@pytest.mark.soak
def test_forty_random_kills(fleet):
  """Of trainer and samplers: every batch is trained on once, and no lag is above the bound."""
  rng = np.random.default_rng(0)
  num_updates = 200 if in_bucket(fleet.workdir) else 450
  flags = [f"--config.num_updates={num_updates}", "--config.checkpoint.every=4"]
  trainer = fleet.trainer(*flags)
  samplers = [fleet.sampler() for _ in range(2)]
  kills = 0
  while kills < 40 and trainer.process.poll() is None:
    time.sleep(rng.uniform(0.5, 8))
    index = int(rng.integers(3))
    kills += 1
    if index == 2:
      trainer.kill()
      trainer.end()
      trainer = fleet.trainer(*flags)
    else:
      samplers[index].kill()
      samplers[index] = fleet.sampler()
  assert [program.end() for program in (trainer, *samplers)] == [0, 0, 0]
  fleets.check_store(fleet.workdir, num_updates)
  assert trained_once(fleet.workdir, num_updates)
  assert kills == 40  # a faster machine needs more updates
