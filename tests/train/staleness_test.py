"""Schedules, sources and the store in whole runs: what is trained on, and what survives."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import shutil
import threading

import jax
import numpy as np
import pytest
from train import tiny

from rlvr_jax.commands import train as runs
from rlvr_jax.rewards.grading import GraderPool
from rlvr_jax.rollouts import batches, staleness
from rlvr_jax.rollouts.answers import Answers
from rlvr_jax.rollouts.batches import FingerprintError
from rlvr_jax.rollouts.sampler import SamplerStoppedError
from rlvr_jax.rollouts.sources import Source, Sources
from rlvr_jax.rollouts.store import RolloutStore, StoreError, TornShardError
from rlvr_jax.train import begin, loop
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.cluster import multihost, process
from rlvr_jax.train.generation.agreement import AgreementError
from rlvr_jax.train.generation.policies import Policies, make_sync
from rlvr_jax.train.reporting.log import RunLog
from rlvr_jax.train.reporting.writer import open_writer, stage_summary
from rlvr_jax.train.session import logged_run
from rlvr_jax.train.setup import build as building
from rlvr_jax.train.setup.programs import PlacedModel, make_behavior_gap
from rlvr_jax.train.start import parameters, restore
from rlvr_jax.types import Sampling

UPDATES = 8


def build(**fields):
  """The tiny run, shorter, with every third checkpoint kept."""
  settings = dict(
    num_updates=UPDATES,
    evaluation__every=UPDATES,
    checkpoint__every=3,
    checkpoint__keep=9,
    reference__kl_coefficient=0.0,
    logging__print_every=UPDATES,
  )
  return building.build(tiny.config(**settings | fields))


@pytest.fixture(scope="module")
def parts():
  """Compiled once for all schedules of this file."""
  return build()


@pytest.fixture(scope="module")
def on_policy(parts, tmp_path_factory):
  """The workdir of a finished run; others take its warm start."""
  workdir = tmp_path_factory.mktemp("runs") / "on_policy"
  runs.train(dataclasses.replace(parts, schedule=staleness.on_policy()), workdir)
  return workdir


@pytest.fixture
def train(parts, on_policy, tmp_path):
  """(schedule or None, name, parts) → the workdir of a run."""

  def run(schedule, name="run", these=parts):
    workdir = tmp_path / name
    if not workdir.exists():
      shutil.copytree(on_policy / "warm_start", workdir / "warm_start")
    runs.train(dataclasses.replace(these, schedule=schedule or these.schedule), workdir)
    return workdir

  return run


def updates(workdir, without=()):
  """The records of the updates without the fields that begin so."""
  records = tiny.records(workdir, "train")
  return [{k: v for k, v in r.items() if not k.startswith(tuple(without))} for r in records]


def versions(workdir):
  store = RolloutStore(workdir / "rollouts", writable=False)
  return [min(map(int, store.info(number)["versions"])) for number in store.numbers()]


def assert_same_run(workdir, expected):
  assert updates(workdir) == updates(expected)
  assert tiny.rollouts(workdir) == tiny.rollouts(expected)
  assert tiny.last_checkpoint(workdir) == tiny.last_checkpoint(expected)


# --- schedules ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stages_are_summarised(staged, tmp_path):
  workdir = shutil.copytree(staged, tmp_path / "run")
  records = updates(workdir)
  assert [(r["stage/number"], r["stage/age"]) for r in records] == [
    (stage, age) for stage in range(2) for age in range(4)
  ]
  assert [r["staleness/mean"] for r in records] == [0, 1, 2, 3] * 2
  summaries = tiny.records(workdir, "stage")
  assert [(r["step"], r["stage/number"]) for r in summaries] == [(4, 0), (8, 1)]
  for first, summary in zip((0, 4), summaries, strict=True):
    stage = records[first : first + 4]
    of_some = "behavior/ratio_max_negative"  # of updates with such tokens
    largest = max(r[of_some] for r in stage if of_some in r)
    assert summary["behavior/ratio_max_negative"] == largest
    mean = np.mean([r["behavior/kl_k3"] for r in stage])
    assert summary["behavior/kl_k3"] == pytest.approx(mean) and mean > 0
    assert (summary["staleness/mean"], summary["staleness/max"]) == (1.5, 3)
  lines = [dict(r, phase="train") for r in records]
  del lines[2]["behavior/kl_k3"]  # as what is measured at some updates alone
  workdir.joinpath("metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
  some = stage_summary(workdir, 4, 4)["behavior/kl_k3"]
  assert some == pytest.approx(np.mean([records[i]["behavior/kl_k3"] for i in (0, 1, 3)]))


@pytest.mark.slow
def test_an_asynchronous_run_keeps_its_bound_and_is_replayed_to_the_bit(train, capsys):
  real = train(staleness.asynchronous(max_lag=2), "real")
  sampled = versions(real)
  assert all(0 <= number - version <= 2 for number, version in enumerate(sampled))
  assert [r["staleness/max"] for r in updates(real)] == [n - v for n, v in enumerate(sampled)]
  simulated = lambda: staleness.simulated_asynchronous(
    recorded=str(real), num_updates=UPDATES, seed=0
  )
  first, second = train(simulated(), "first"), train(simulated(), "second")
  assert versions(first) == sampled
  counted = ["counter/", "data/passes"]  # a worker's batches are counted when they are taken
  assert updates(first, without=counted) == updates(real, without=counted)
  assert_same_run(second, first)
  recorded = simulated().recorded
  known = RolloutStore(real / "rollouts", writable=False).info(0)["versions"]["0"]
  assert recorded.first_difference(0, {0: known}) == ""
  assert recorded.first_difference(0, {0: "other"}) == (
    f"version 0 has fingerprint other here, but {known} there"
  )
  assert recorded.first_difference(0, {0: "other"}) == ""  # it was said
  assert "not its rollouts" not in capsys.readouterr().out
  train(simulated(), "other", build(learning_rate="constant(peak=2e-3)"))
  assert capsys.readouterr().out.count("not its rollouts: version 1 has fingerprint") == 1


# --- what is damaged ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def staged(parts, on_policy, tmp_path_factory):
  """A finished run of two stages."""
  workdir = tmp_path_factory.mktemp("staged") / "run"
  shutil.copytree(on_policy / "warm_start", workdir / "warm_start")
  schedule = staleness.stages(count=2, num_updates=UPDATES)
  runs.train(dataclasses.replace(parts, schedule=schedule), workdir)
  return workdir


def as_after(update, staged, tmp_path):
  """A copy of the run as if it had been killed after the checkpoint of this update."""
  workdir = shutil.copytree(staged, tmp_path / "run")
  for path in (workdir / "checkpoints").iterdir():
    if int(path.name) > update:
      shutil.rmtree(path)
  return workdir


def shard(workdir, number):
  return workdir / "rollouts" / f"{number:08d}.safetensors"


@pytest.mark.slow
def test_a_damaged_batch_is_sampled_again(staged, train, tmp_path, capsys):
  """Batch 7 is sampled at update 4, and not trained on at 6: the run goes back."""
  workdir = as_after(6, staged, tmp_path)
  before = {n: shard(workdir, n).read_bytes() for n in range(UPDATES)}
  tiny.cut(shard(workdir, 7))
  train(staleness.stages(count=2, num_updates=UPDATES))
  assert "resumed at update 4" in capsys.readouterr().out
  assert_same_run(workdir, staged)
  assert {n: shard(workdir, n).read_bytes() for n in range(UPDATES)} == before
  store = RolloutStore(workdir / "rollouts", writable=False)
  assert store.numbers() == list(range(UPDATES))


@pytest.mark.slow
def test_a_long_stage_is_read_from_the_store(staged, train, session, warm, monkeypatch):
  monkeypatch.setattr(batches, "_MAX_CACHED", 1)
  schedule = staleness.stages(count=2, num_updates=UPDATES)
  assert_same_run(train(schedule), staged)
  made = session(schedule, params=warm)
  made.step()
  tiny.cut(shard(made.workdir, 1))
  with pytest.raises(TornShardError, match=r"00000001\.safetensors"):
    made.step()
  assert made.now.step == 1


@pytest.mark.slow
def test_going_back_leaves_no_later_checkpoint(staged, parts, tmp_path):
  """Their records are gone with it: a second kill must not take one of them up."""
  workdir = as_after(6, staged, tmp_path)
  tiny.cut(shard(workdir, 7))
  with (
    contextlib.closing(Checkpointer(workdir / "checkpoints", keep=9)) as saved,
    RolloutStore(workdir / "rollouts", writable=True) as store,
  ):
    assert saved.steps()[-2:] == [4, 6]
    assert (
      restore.find_resumable(saved, parts.placement.state, parts.schedule, store, {}).step
      == saved.steps()[-1]
      == 4
    )


# --- what does not fit together -------------------------------------------------------------------


class Steps:
  """A run and where it stands, step by step."""

  def __init__(self, parts, run, now):
    self.parts, self.run, self.now, self.workdir = parts, run, now, run.log.writer.workdir

  def step(self):
    """One update; returns its batch."""
    batch = loop.next_batch(self.run, self.now)
    self.now = loop.update(self.run, self.now, batch)
    return batch


@pytest.fixture
def warm(parts, on_policy):
  """The parameters that runs of this file begin with."""
  return Checkpointer(on_policy / "warm_start").restore(parts.placement.state.params).state


@pytest.fixture
def session(parts, tmp_path):
  """(schedule, parts, change of `grade`, params) → a run before its first update, as `Steps`."""

  def make(schedule, these=parts, change=lambda grade: grade, params=None):
    workdir = tmp_path / f"session{len(opened)}"
    writer = open_writer(workdir)
    saved = Checkpointer(workdir / "checkpoints")
    params = these.initial.trained() if params is None else params
    pool = GraderPool(these.task.grader, num_workers=1, timeout_s=5.0)
    store = RolloutStore(workdir / "rollouts", writable=True)
    these = dataclasses.replace(these, schedule=schedule)
    frozen = these.initial.frozen()
    log = RunLog(logged_run(these), writer)
    makers = itertools.chain([change(pool.submit)], itertools.repeat(pool.submit))
    answers = lambda: Answers(these.tokenizer, next(makers))  # the first are those of training
    rows = tiny.run_rows(these)
    run = begin.make_run(these, rows, frozen, log, saved, answers, store, initial=params)
    state = parameters.first_state(these.method, these.placement.state, params, 0.0)
    now = begin.begin(run, state)
    if schedule.threaded:
      run = begin.in_a_thread(run, these.config.generation_deadline_s)
    opened.extend([run.sampler, writer, saved, pool, store])
    return Steps(these, run, now)

  opened = []
  yield make
  for resource in opened:
    resource.close()


def test_parameters_changed_without_a_weight_sync_trip_the_fingerprint(session):
  made = session(staleness.on_policy())
  version, run = made.now.step, made.run
  bias = lambda x: x.at[(0,) * x.ndim].add(1e-6)
  other = dict(made.now.state.params)
  other["embedding"] = bias(other["embedding"])
  run.policies.make(made.now.state.params, version)
  parts = made.parts
  policies = Policies(
    parts.sources,
    parts.schedule,
    run.frozen.sampler,
    checksums=parts.programs.checksums,
    sync=make_sync(parts.placement, parts.schedule),
  )
  offered = policies.make(other, version)
  run.sampler.offer(offered)
  run.batches.open(until=version + 1, version=version)
  with pytest.raises(FingerprintError, match=r"rollouts of batch 0 under version 0 .* weight sync"):
    run.policies.check(run.batches.take(version), run.store.directory)


def test_a_batch_whose_groups_a_killed_process_has_sampled_is_compared_too(session):
  """The check of sampler and trainer must not be passed by starting again."""
  whole, again = session(staleness.on_policy()), session(staleness.on_policy())
  expected = loop.next_batch(whole.run, whole.now)
  for group in expected.groups:
    again.run.store.write_groups([group])
  batch = loop.next_batch(again.run, again.now)
  assert batch.timings["time/slot_tokens"] == 0  # nothing was sampled
  assert batch.statistics == expected.statistics
  assert batch.statistics["agreement/policy_mean"] < 1e-5


def test_a_sampler_that_computes_something_else_trips_the_gate(session, parts):
  source = parts.sources[0]
  slightly_off = lambda *policy: (jax.tree.map(lambda x: x * 1.002, policy[0]), *policy[1:])
  made = session(
    staleness.on_policy(),
    dataclasses.replace(parts, sources=Sources([source._replace(params_of=slightly_off)])),
  )
  with pytest.raises(AgreementError, match=r"policy source recorded under version 0 .* differ by"):
    made.step()
  assert made.run.store.numbers() == []  # no batch is made of it
  plain = session(staleness.on_policy())
  assert loop.next_batch(plain.run, plain.now).statistics["agreement/policy_mean"] < 1e-5


@pytest.mark.slow
def test_a_sampler_with_a_rounded_cache_may_differ_by_rounding(session, warm):
  """Its log-probabilities are those sampled; the bound of exact products does not hold for it."""
  rounded = build(sampling__cache_format="int8")
  made = session(staleness.on_policy(), rounded, params=warm)
  assert 1e-5 < made.step().statistics["agreement/policy_mean"] < 5e-3
  source = rounded.sources[0]
  assert source.max_gap == 5e-2
  strict = dataclasses.replace(rounded, sources=Sources([source._replace(max_gap=1e-5)]))
  with pytest.raises(AgreementError, match=r"the limit is 1e-05.*raise config\.max_behavior_gap"):
    session(staleness.on_policy(), strict, params=warm).step()


def test_an_update_that_computes_something_else_trips_the_gate(session, parts):
  """The check takes the rows of updates, whose attention here sees every token at place 0."""
  model = parts.model
  misplaced = model._replace(
    row_hidden=lambda params, tokens, rows: model.row_hidden(
      params, tokens, rows._replace(positions=0 * rows.positions)
    )
  )
  gap = make_behavior_gap(parts.method, PlacedModel(misplaced, parts.placement.mesh), None)
  programs = parts.programs._replace(behavior_gap=gap)
  made = session(staleness.on_policy(), dataclasses.replace(parts, programs=programs))
  with pytest.raises(AgreementError, match="disagree"):
    made.step()


# --- in real time ---------------------------------------------------------------------------------


def fails(*work):
  """After a while, and before the deadline of a wait for groups."""
  future = concurrent.futures.Future()
  threading.Timer(0.5, future.set_exception, [OSError("a graders' host is gone")]).start()
  return future


@pytest.mark.slow
def test_a_sampler_that_fails_ends_the_run_with_everything_saved(session, parts):
  def change(grade):
    left = iter(range(2 * parts.config.batch.prompts * parts.config.batch.group_size))
    return lambda *asked: (fails if next(left, None) is None else grade)(*asked)

  made = session(staleness.asynchronous(max_lag=0), change=change)
  with pytest.raises(SamplerStoppedError, match=r"failed .*host is gone"):
    loop.train(made.run, made.now)
  made.run.checkpointer.wait()  # as the session does at its end
  assert made.run.checkpointer.steps()[-1] == 2


# --- sources --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sources_share_a_batch(on_policy, train):
  pytest.importorskip("qwix", reason="the extra `quantized` needs flax 0.12")
  quarter, eighth = 2 / 8, 1 / 8
  mixed = build(
    sources__temperature__fraction=quarter,
    sources__temperature__temperature=1.5,
    sources__quantized=dict(fraction=quarter, format="int8"),
    sources__checkpoint=dict(fraction=eighth, workdir=str(on_policy), step=-1),
    sources__recorded=dict(fraction=eighth, store=str(on_policy / "rollouts")),
  )
  names = ["policy", "temperature", "quantized", "checkpoint", "recorded"]
  assert [source.name for source in mixed.sources] == names
  workdir = train(staleness.fixed_lag(lag=1, num_updates=UPDATES), "mixed", mixed)
  store = RolloutStore(workdir / "rollouts", writable=False)
  recorded = RolloutStore(on_policy / "rollouts", writable=False)
  for number in range(3):
    arrays, info, _ = tiny.read_stored(store, number)
    version = max(number - 1, 0)
    np.testing.assert_array_equal(arrays["sources"], [0, 0, 1, 1, 2, 2, 3, 4])
    np.testing.assert_array_equal(arrays["versions"], [version] * 6 + [-1, -1])
    assert [*info["versions"]] == [str(version)]
    # FADE's p̂ is of groups that policies of this run sampled: no checkpoint's, no store's.
    np.testing.assert_array_equal(arrays["valid"], np.ones(arrays["rewards"].shape, bool))
    assert arrays["solve_rate"].tolist() == [np.float32(arrays["correct"][:6].mean())] * 8
    theirs, *_ = tiny.read_stored(recorded, 0)
    for name in ("tokens", "behavior_logprobs", "rewards", "prompts.tokens"):
      np.testing.assert_array_equal(arrays[name][7], theirs[name][number])
  first, second, *_ = updates(workdir)
  for record in (first, second):
    assert record["staleness/max"] == record["staleness/mean"]
    shares = [record[f"source/{name}/token_share"] for name in names]
    assert sum(shares) == pytest.approx(1) and min(shares) > 0
  # One policy, three ways to sample from it: exact log-probabilities, so that ratios tell them.
  assert first["source/policy/kl_k3"] < 1e-9
  assert first["source/quantized/kl_k3"] > 1e-7
  assert first["source/temperature/kl_k3"] > 1e-3
  assert first["agreement/policy_mean"] < 1e-5 and first["agreement/temperature_mean"] < 1e-5
  assert 1e-4 < first["agreement/quantized_mean"] < 0.3
  assert first["agreement/checkpoint_mean"] > 1e-3


@pytest.mark.slow
def test_raw_log_probabilities_do_not_see_the_temperature(train, capsys):
  """A deliberate violation: named at the start and in metrics; the store keeps the exact ones."""
  half = dict(fraction=0.5, temperature=1.5)
  heated = {
    recorded: build(num_updates=2, sources__temperature=dict(half, recorded=recorded))
    for recorded in ("sampled", "raw")
  }
  workdirs = {name: train(staleness.on_policy(), name, these) for name, these in heated.items()}
  assert "config.sources.temperature.recorded = raw" in capsys.readouterr().out
  stores = {name: RolloutStore(d / "rollouts", writable=False) for name, d in workdirs.items()}
  sampled, raw = (tiny.read_stored(stores[name], 0)[0] for name in ("sampled", "raw"))
  np.testing.assert_array_equal(raw["tokens"], sampled["tokens"])
  np.testing.assert_array_equal(raw["sampled_logprobs"], sampled["behavior_logprobs"])
  assert "sampled_logprobs" not in sampled
  # Of the policy's own groups both are the same; of the heated ones they differ.
  own, other = raw["sources"] == 0, raw["sources"] == 1
  difference = np.abs(raw["behavior_logprobs"] - raw["sampled_logprobs"])
  assert difference[own].max() == 0 < 0.01 < difference[other].mean()
  first = {name: updates(workdir)[0] for name, workdir in workdirs.items()}
  assert first["sampled"]["source/temperature/kl_k3"] > 1e-3
  assert first["raw"]["source/temperature/kl_k3"] < 1e-9  # on-policy, as it appears
  # The gate checks what was sampled from, in both.
  assert first["raw"]["agreement/temperature_mean"] < 1e-5
  gap = difference[other].sum() / (raw["sampled_logprobs"][other] != 0).sum()
  assert first["raw"]["source/temperature/raw_gap"] == pytest.approx(gap, rel=0.05)
  assert "source/temperature/raw_gap" not in first["sampled"]
  # Another run that reads the store gets the exact ones.
  config = tiny.config(
    sources__recorded=dict(fraction=1.0, store=str(workdirs["raw"] / "rollouts"))
  )
  groups = tiny.recorded_by(config, heated["raw"].tokenizer).take(0, 8)
  for group, logprobs in zip(groups, sampled["behavior_logprobs"], strict=True):
    np.testing.assert_array_equal(group.arrays["behavior_logprobs"], logprobs)


@pytest.mark.slow
def test_training_on_a_store_alone(on_policy, train, parts):
  whole = tiny.config(sources__recorded=dict(fraction=1.0, store=str(on_policy / "rollouts")))
  # The update is the same program; the batches come from elsewhere.
  groups = tiny.recorded_by(whole, parts.tokenizer)
  source = Source("recorded", 8, Sampling(), recorded=groups, of_this_run=False)
  offline = dataclasses.replace(parts, sources=Sources([source]))
  workdir = train(staleness.on_policy(), "offline", offline)
  # The recorded run began with the same parameters and trained on the same batches.
  left_out = ("counter/", "data/passes", "agreement/", "outcome/", "response/", "staleness/")
  assert updates(workdir, left_out) == updates(on_policy, left_out)
  last = updates(workdir)[-1]
  assert last["counter/tokens_generated"] == 0 < last["counter/tokens_trained"]
  store = RolloutStore(workdir / "rollouts", writable=False)
  versions = tiny.read_stored(store, 0)[0]["versions"]
  np.testing.assert_array_equal(versions, [-1] * 8)


HALF = dict(sources__temperature__fraction=0.5)
RAW = HALF | dict(sources__temperature__recorded="raw")


@pytest.mark.parametrize(
  ("fields", "word"),
  [
    (dict(sources__temperature__fraction=0.3), "for example 0.25"),
    (dict(sources__temperature__fraction=0.75, sources__quantized__fraction=0.5), "more than 1"),
    (dict(sources__quantized=dict(fraction=0.5, format="int3")), "int3.*int8"),
    (HALF | dict(sources__temperature__temperature=0.0), "temperature = 0.0"),
    (dict(sources__temperature__recorded="exact"), "exact.*'raw'"),
    (dict(sources__temperature__recorded="raw"), "no effect with fraction"),
    (RAW | dict(policy_temperature=0.7), "policy_temperature = 0.7"),
    (dict(sources__recorded__fraction=0.5), "recorded.store is empty"),
    (dict(schedule="asynchronous", mesh__data=2), "generation_mesh"),
    (dict(generation_mesh__data=9), "generation_mesh.*9 devices"),
  ],
)
def test_mistakes_are_named_before_anything_runs(fields, word):
  with pytest.raises(ValueError, match=word):
    build(**fields)


def test_what_another_run_has_must_fit(session, parts, tmp_path):
  theirs = session(staleness.on_policy())
  loop.next_batch(theirs.run, theirs.now)  # which is in its store now
  theirs.run.checkpointer.save(3, theirs.now.state, host={})
  theirs.run.checkpointer.wait()
  store, workdir = str(theirs.workdir / "rollouts"), theirs.workdir
  (workdir / "config.json").write_text(parts.config.to_json_best_effort())
  foreign = tmp_path / "foreign"
  foreign.mkdir()
  (foreign / "config.json").write_text("{}")
  for name in ("truncated", "shaped"):
    groups, info = RolloutStore(store, writable=False).read(0)
    with RolloutStore(tmp_path / name, writable=True) as writer:
      writer.write(0, groups, info | {name: True})
  from_run = lambda workdir, step=-1: {
    "sources__checkpoint": dict(fraction=0.5, workdir=str(workdir), step=step)
  }
  from_store = lambda folder: {"sources__recorded": dict(fraction=0.5, store=str(folder))}
  wider = dict(model__overrides=dict(vocab_size=512))
  for fields, word in [
    (from_run(workdir, step=77), r"no checkpoint of step 77; .* of the steps \[.*3\]"),
    (from_run(workdir) | wider, r"\('bytes', 264\), .* 512"),
    (from_run(foreign), "foreign' has no valid config.json"),
    (from_store(tmp_path / "truncated"), "truncated sampling"),
    (from_store(tmp_path / "shaped") | dict(advantage="maxrl"), "are shaped"),
    (
      from_store(store) | dict(batch__group_size=2),
      "group_size = .4., but this run has group_size = 2",
    ),
    (from_store(f"{store}/elsewhere"), "elsewhere does not exist"),
  ]:
    with pytest.raises(ValueError, match=word):
      build(**fields)


@pytest.mark.slow
def test_a_resumed_run_keeps_to_what_it_began_with(on_policy, parts, tmp_path):
  """The other run may have gone on meanwhile."""
  theirs = shutil.copytree(on_policy, tmp_path / "theirs")
  fields = dict(
    sources__checkpoint=dict(fraction=0.5, workdir=str(theirs), step=-1),
    sources__recorded=dict(fraction=0.5, store=str(theirs / "rollouts")),
  )
  pins = lambda sources: {source.name: source.pin for source in sources}
  restored = lambda these: restore.restore_sources(
    these.sources, these.make_sources, tmp_path / "run"
  )
  before = build(**fields)
  (tmp_path / "run").mkdir()
  begun = restored(before)
  assert pins(begun) == {"checkpoint": UPDATES, "recorded": list(range(UPDATES))}
  store = RolloutStore(theirs / "rollouts", writable=True)
  store.write(UPDATES, *store.read(0))
  shutil.copytree(theirs / "checkpoints" / "8", theirs / "checkpoints" / "9")
  after = build(**fields)
  assert pins(after.sources) == {"checkpoint": 9, "recorded": list(range(UPDATES + 1))}
  assert pins(restored(after)) == pins(begun)
  store.remove(3)
  with pytest.raises(StoreError, match=r"has lost the batches \[3\].*sources.json"):
    restored(build(**fields))


@pytest.mark.slow
def test_what_is_used_may_be_removed(train, parts):
  tidy = dataclasses.replace(parts, config=parts.config.copy_and_resolve_references())
  tidy.config.store.keep_used = False
  tidy.config.checkpoint.keep = 1
  workdir = train(staleness.on_policy(), "tidy", tidy)
  kept = [int(path.name.split(".")[0]) for path in (workdir / "rollouts").glob("*.safetensors")]
  steps = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())
  # The last one is for resumes; an earlier one is kept if its policy is the best. What only the
  # checkpoint before the last one needed goes with the next save, once the last one is complete.
  assert len(steps) <= 2 and steps[-1] == UPDATES and sorted(kept) == [UPDATES - 2, UPDATES - 1]
  assert json.loads((workdir / "config.json").read_text())["store"]["keep_used"] is False


@pytest.mark.slow
def test_asked_to_end_while_a_stage_is_sampled(
  session, warm, parts, on_policy, staged, tmp_path, train
):
  """What was sampled is kept and not sampled again; the run ends as the undisturbed one."""
  schedule, rollouts = staleness.stages(count=2, num_updates=UPDATES), parts.config.batch
  last = 6 * rollouts.prompts * rollouts.group_size  # of the sixth batch, in the second stage

  def change(grade):
    asked = []

    def asks(*work):
      asked.append(grade(*work))
      if len(asked) == last:  # asked for where the sampler goes on, whatever the machine's load
        for future in asked:
          future.exception(tiny.TIMEOUT_S)
        process.request_shutdown()
      return asked[-1]

    return asks

  made = session(schedule, change=change, params=warm)
  with (
    multihost.share_shutdown_signals(),
    pytest.raises(process.EndRequestedError, match="after update 4"),
  ):
    loop.train(made.run, made.now)
  made.run.checkpointer.wait()
  numbers = made.run.store.numbers()
  assert set(range(4)) <= set(numbers) < set(range(8))
  groups = tiny.unfinished_groups(made.workdir)
  assert groups + (len(numbers) - 4) * rollouts.prompts >= rollouts.prompts
  written = {n: shard(made.workdir, n).stat().st_mtime_ns for n in numbers}
  made.run.store.close()  # there is one writer at a time
  workdir = made.workdir.rename(tmp_path / "run")
  shutil.copytree(on_policy / "warm_start", workdir / "warm_start")
  for name in ("config.json", "rows.json"):
    shutil.copy(on_policy / name, workdir)
  train(schedule)
  assert {n: shard(workdir, n).stat().st_mtime_ns for n in numbers} == written
  assert updates(workdir) == updates(staged)
  assert tiny.last_checkpoint(workdir) == tiny.last_checkpoint(staged)


@pytest.mark.slow
def test_generation_on_devices_of_its_own(train, on_policy):
  apart = build(generation_mesh=dict(data=2, fsdp=1, tensor=1))
  assert apart.placement.generation_mesh.devices.size == 2
  assert not set(apart.placement.generation_mesh.devices.flat) & set(
    apart.placement.mesh.devices.flat
  )
  workdir = train(staleness.on_policy(), "apart", apart)
  left_out = ("phase", "agreement/policy_draws")  # more groups are compared on more devices
  for ours, theirs in zip(
    updates(workdir, left_out)[:3], updates(on_policy, left_out), strict=False
  ):
    assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
  assert versions(train(staleness.asynchronous(max_lag=1), "real", apart))[-1] >= UPDATES - 2
