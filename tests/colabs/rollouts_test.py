"""Rollouts are read from a run's store as they were written, and drawn and printed rightly."""

import html
import json
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from colabs import stored
from rlvr_jax.colab import rollouts, runs
from rlvr_jax.evaluate.pass_at_k import wilson_interval
from rlvr_jax.train.setup.build import build

LENGTHS = np.array([[1, 3], [2, 3]])
OUTCOMES = ("correct", "wrong", "unparseable", "crashed")


def batch_of(version):
  logprobs = -np.arange(12, dtype=np.float32).reshape(2, 2, 3) / 10
  arrays = dict(
    tokens=np.array([[[48, 0, 0], [49, 50, 51]], [[0xC3, 257, 0], [10, 258, 257]]], np.int32),
    mask=(np.arange(3) < LENGTHS[..., None]).astype(np.float32),
    behavior_logprobs=logprobs,
    rewards=np.array([[1, 0], [0, 0]], np.float32),
    correct=np.array([[1, 0], [0, 0]], np.float32),
    valid=np.array([[True, True], [True, False]]),
  )
  samples = [
    dict(
      version=version, prompt=f"p{i // 2}", completion=str(i), answer="0", outcome=outcome,
      reward=None if i == 3 else float(i == 0), tokens=int(LENGTHS.flat[i]), stopped=i != 1,
    )
    for i, outcome in enumerate(OUTCOMES)
  ]  # fmt: skip
  return version, arrays, samples


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run whose policies of versions 0 and 2 sampled two batches each."""
  folder = tmp_path_factory.mktemp("run")
  config = runs.sums_config(updates=4)
  config.schedule = "updates_per_refresh(batches=2)"
  (folder / "config.json").write_text(config.to_json_best_effort())
  stored.write(folder / "rollouts", [batch_of(version) for version in (0, 0, 2, 2)])
  return folder


@pytest.fixture(scope="module")
def samples(workdir):
  return rollouts.load(workdir)


def test_rollouts_are_read_with_their_age(samples):
  assert [r.batch for r in samples] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
  assert [r.age for r in samples] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
  first, second, third, fourth = samples[:4]
  assert first.sampler == "this program" and first.versions.tolist() == [0]
  assert [r.versions.tolist() for r in samples[8:10]] == [[2], [2, 2, 2]]
  assert first[:10] == (0, 0, "p0", "0", "0", "correct", "correct", 1.0, 1, 0)
  assert first.turns == ("0",) and first.policy_turns == 1 and not second.turn_numbers.any()
  assert (second.kind, second.group, second.length) == ("cut off", 0, 3)
  assert (third.kind, fourth.kind, fourth.group) == ("unparseable", "not graded", 1)
  np.testing.assert_allclose(first.surprisals, [0.0])
  np.testing.assert_allclose(third.surprisals, [0.6, 0.7], rtol=1e-6)


def test_a_folder_without_a_run_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"has no config.json: give the --workdir of a run"):
    rollouts.load(tmp_path)


def test_a_schedule_of_its_author_s_code_is_not_imported(tmp_path, monkeypatch):
  (tmp_path / "their_code.py").write_text("raise SystemError('it was run')\n")
  monkeypatch.syspath_prepend(tmp_path)
  config = {"schedule": "their_code:schedule", "num_updates": 1, "seed": 0}
  told = "whose code is outside of rlvr_jax and is not imported here"
  cases = ((json.dumps(config), told), ("[1, 2]", "a JSON list"))
  for text, message in cases:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
      rollouts.load(tmp_path)


def axes_of(plot, *args, **kwargs):
  axes = Figure().subplots()
  plot(axes, *args, **kwargs)
  return axes


def test_the_share_of_the_correct_has_an_interval(samples):
  axes = axes_of(rollouts.plot_correct, samples, "length", least=4)
  ((points, _, (bars,)),) = axes.containers
  np.testing.assert_array_equal(points.get_xydata(), [[1, 1], [2, 0], [3, 0]])
  np.testing.assert_allclose(bars.get_segments()[0][:, 1], wilson_interval(1.0, 4))
  np.testing.assert_allclose(bars.get_segments()[2][:, 1], wilson_interval(0.0, 8))
  ((points, _, _),) = axes_of(rollouts.plot_correct, samples, "length", least=5).containers
  np.testing.assert_array_equal(points.get_xydata(), [[3, 0]])  # others have few rollouts
  ((points, _, _),) = axes_of(rollouts.plot_correct, samples, "age", least=1).containers
  np.testing.assert_array_equal(points.get_xydata(), [[0, 0.25], [1, 0.25]])


def test_the_page_of_a_run_is_shown_in_a_frame(workdir):
  shown = rollouts.page(workdir, batches="0,-1")
  assert 'id="0/batch/0"' in shown.text and 'id="0/batch/3"' in shown.text
  assert 'id="0/batch/1"' not in shown.text
  frame = shown._repr_html_()
  (written,) = re.findall(r'<iframe srcdoc="([^"]*)"', frame)
  assert html.unescape(written) == shown.text and not list(workdir.glob("*.html"))


def test_some_are_printed_spread_over_all(samples, capsys):
  rollouts.show([r for r in samples if r.kind == "correct"], count=2)
  lines = capsys.readouterr().out.splitlines()
  assert [line.split()[:4] for line in lines[::2]] == [
    ["batch", "0", "age", "0"], ["batch", "3", "age", "1"]
  ]  # fmt: skip
  assert lines[1] == "    'p0' → '0'   (answer 0)"
  rollouts.show([])
  assert capsys.readouterr().out == ""


# --- dialogues ------------------------------------------------------------------------------------


def dialogue(outcome, *turns, surprisals):
  """A rollout of these turns; a policy's has a stop token too, an environment's has none."""
  numbers = [n for n, text in enumerate(turns) for _ in [*text, "end"][: len(text) + (n + 1) % 2]]
  sample = dict(outcome=outcome, stopped=outcome != "length_limit")
  return rollouts.Rollout(
    0, 0, "p", "".join(turns), "7", rollouts.rollout_kind(sample), outcome, 0.0, len(numbers), 0,
    "a", np.zeros(len(numbers), int), np.asarray(surprisals, float), turns, np.asarray(numbers),
  )  # fmt: skip


DIALOGUES = [
  dialogue("correct", "9", "<", "7", surprisals=[1.0, 0.0, 0.0, 0.4, 0.0]),
  dialogue("turn_limit", "9", "<", "x", "??", "3", surprisals=[2, 0, 0, 0.2, 0, 0, 0, 0.6, 0.6]),
  dialogue("correct", "7", surprisals=[3.0, 0.0]),
]


def test_turns_are_told_apart(capsys):
  assert [r.policy_turns for r in DIALOGUES] == [2, 3, 1]
  assert [r.kind for r in DIALOGUES] == ["correct", "out of turns", "correct"]
  for outcome, kind in (
    ("length_limit", "cut off"), ("environment_refused", "refused"),
    ("environment_limit", "refused"), ("environment_failed", "not graded"),
  ):  # fmt: skip
    assert dialogue(outcome, "1", surprisals=[0, 0]).kind == kind
  rollouts.show(DIALOGUES[:1])
  assert capsys.readouterr().out == (
    "batch   0  age 0    5 tokens  reward 0  correct\n"
    "    'p'   (answer 7, outcome correct)\n"
    "    policy       '9'\n"
    "    environment  '<'\n"
    "    policy       '7'\n"
  )


# --- fleets ---------------------------------------------------------------------------------------


def test_the_fleet_of_the_notebook_is_one():
  parts = build(runs.fleet_config())
  assert parts.config.fleet.samplers and parts.schedule.threaded
  assert parts.config.fleet.new_weights == "switch"


def test_each_token_has_its_version_and_each_rollout_its_sampler(tmp_path):
  version, arrays, samples = batch_of(1)
  arrays["token_versions"] = np.array([[[0, -1, -1], [0, 1, 1]], [[1, 1, -1], [1, 1, 1]]], np.int32)
  samples = [sample | {"sampler": name} for sample, name in zip(samples, "aabb", strict=True)]
  (tmp_path / "config.json").write_text(runs.sums_config(updates=2).to_json_best_effort())
  stored.write(tmp_path / "rollouts", [(version, arrays, samples)])
  read = rollouts.load(tmp_path)
  assert [r.versions.tolist() for r in read] == [[0], [0, 1, 1], [1, 1], [1, 1, 1]]
  assert [r.sampler for r in read] == ["a", "a", "b", "b"]
