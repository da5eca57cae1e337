"""Rollouts are read from a run's store as they were written, and filtered and counted rightly."""

import collections
import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from colabs import stored
from rlvr_jax.colab import first_run, rollouts, runs
from rlvr_jax.evaluate.pass_at_k import wilson_interval

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
  assert first[:10] == (0, 0, "p0", "0", "0", "correct", "correct", 1.0, 1, 0)
  assert first.turns == ("0",) and first.policy_turns == 1 and not second.turn_numbers.any()
  assert (second.kind, second.group, second.length) == ("cut off", 0, 3)
  assert (third.kind, fourth.kind, fourth.group) == ("unparseable", "not graded", 1)
  np.testing.assert_allclose(first.surprisals, [0.0])
  np.testing.assert_allclose(third.surprisals, [0.6, 0.7], rtol=1e-6)


def test_a_folder_without_a_run_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"has no config.json: give the --workdir of a run"):
    rollouts.load(tmp_path)


def test_a_schedule_of_its_author_s_code_needs_trust(tmp_path, monkeypatch):
  (tmp_path / "their_code.py").write_text("raise SystemError('it was run')\n")
  monkeypatch.syspath_prepend(tmp_path)
  config = {"schedule": "their_code:schedule", "num_updates": 1, "seed": 0}
  for text, message in ((json.dumps(config), "give trust_run=True"), ("[1, 2]", "a JSON list")):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
      rollouts.load(tmp_path)
  (tmp_path / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match="it was run"):
    rollouts.load(tmp_path, trust_run=True)


def test_rollouts_are_chosen_by_kind_length_and_age(samples):
  count = lambda **how: len(rollouts.select(samples, **how))
  assert count() == 16 and count(kind="correct") == 4 and count(age=1) == 8
  assert count(longest=2) == 8 and count(shortest=3) == 8 and count(shortest=2, longest=2) == 4
  assert count(kind="cut off", longest=2) == 0 and count(kind="unparseable", age=0) == 2
  assert rollouts.ages(samples) == [0, 1] and rollouts.lengths(samples) == [1, 2, 3]
  with pytest.raises(ValueError, match="kind = 'right' is unknown; choose one of"):
    count(kind="right")


def test_the_share_of_the_correct_has_an_interval(samples):
  found = rollouts.correct_shares(samples, "length")
  np.testing.assert_array_equal(found.values, [1, 2, 3])
  np.testing.assert_array_equal(found.counts, [4, 4, 8])
  np.testing.assert_array_equal(found.share, [1, 0, 0])
  np.testing.assert_allclose([found.low[0], found.high[0]], wilson_interval(1.0, 4))
  np.testing.assert_array_equal(rollouts.correct_shares(samples, "age").share, [0.25, 0.25])
  with pytest.raises(ValueError, match="name = 'kind' is unknown"):
    rollouts.correct_shares(samples, "kind")


def test_values_with_few_rollouts_are_left_out(samples):
  axes = Figure().subplots()
  rollouts.plot_correct(axes, samples, "length", least=5)
  ((points, _, _),) = axes.containers
  np.testing.assert_array_equal(points.get_xydata(), [[3, 0]])


def axes_of(plot, *args):
  axes = Figure().subplots()
  plot(axes, *args)
  return axes


def texts(axes):
  return [text.get_text() for text in axes.get_legend().get_texts()]


def test_kinds_stand_on_one_another(samples):
  axes = axes_of(rollouts.plot_kinds, samples)
  assert texts(axes) == ["not graded", "cut off", "unparseable", "correct"]
  edges = [area.get_paths()[0].get_extents().get_points()[:, 1] for area in axes.collections]
  np.testing.assert_allclose(edges, [[0, 0.25], [0.25, 0.5], [0.5, 0.75], [0.75, 1]])


def test_lengths_are_counted_by_kind(samples):
  axes = axes_of(rollouts.plot_lengths, samples)
  heights = [[bar.get_height() for bar in container] for container in axes.containers]
  assert heights == [[4, 0, 0], [0, 4, 0], [0, 0, 4], [0, 0, 4]]


def test_groups_are_sorted_and_counted(samples):
  axes = axes_of(rollouts.plot_groups, samples, 2)
  assert axes.get_title() == "batch 2: 1 of 2 groups have both"
  (image,) = axes.images
  assert image.get_array().shape == (2, 2, 3)
  assert texts(axes) == ["correct", "unparseable", "cut off", "not graded"]
  with pytest.raises(ValueError, match=r"no batch 9; choose one of \[0, 1, 2, 3\]"):
    axes_of(rollouts.plot_groups, samples, 9)


def test_surprisals_stand_above_their_tokens(samples):
  axes = axes_of(rollouts.plot_surprisals, samples[2])
  np.testing.assert_allclose([bar.get_height() for bar in axes.patches], [0.6, 0.7], rtol=1e-6)
  labels_of = lambda axes: [label.get_text() for label in axes.get_xticklabels()]
  assert labels_of(axes) == ["\N{REPLACEMENT CHARACTER}", "end"]
  assert labels_of(axes_of(rollouts.plot_surprisals, samples[1])) == ["1", "2", "3"]
  assert labels_of(axes_of(rollouts.plot_surprisals, samples[3])) == ["⏎", "#258", "end"]


def test_a_token_s_label_is_its_own_text_of_however_many_characters(workdir, tmp_path):
  """Not the characters of the response, one for each token."""

  class Words:
    stop_ids = (0,)

    def decode(self, ids):
      return "".join(["", "16", " -", " 11"][i] for i in ids)

  assert rollouts._token_texts([1, 2, 3, 0], Words()) == ("16", " -", " 11", "end")
  config = json.loads((workdir / "config.json").read_text()) | {"tokenizer": "nowhere"}
  (tmp_path / "config.json").write_text(json.dumps(config))
  (tmp_path / "rollouts").symlink_to(workdir / "rollouts")
  assert rollouts.load(tmp_path)[1].token_texts == ("1", "2", "3")  # its places


def test_some_are_printed_spread_over_all(samples, capsys):
  rollouts.show(rollouts.select(samples, kind="correct"), count=2)
  lines = capsys.readouterr().out.splitlines()
  assert [line.split()[:4] for line in lines[::2]] == [
    ["batch", "0", "age", "0"], ["batch", "3", "age", "1"]
  ]  # fmt: skip
  assert lines[1] == "    'p0' → '0'   (answer 0)"
  rollouts.show([])
  assert capsys.readouterr().out == ""


def test_exploring_counts_what_is_chosen(samples, capsys):
  from matplotlib import pyplot

  rollouts.explore(samples, kind="cut off", longest=3, age=1, count=1)
  left, right = pyplot.gcf().axes
  assert [bar.get_height() for bar in left.containers[0]] == [0, 4, 4, 8]
  assert [bar.get_height() for bar in left.containers[1]] == [0, 0, 0, 2]
  np.testing.assert_array_equal(right.lines[0].get_ydata(), [0, 1, 0, 1])
  pyplot.close("all")
  assert capsys.readouterr().out.startswith("2 of 16 rollouts\n")


# --- dialogues ------------------------------------------------------------------------------------


def dialogue(outcome, *turns, surprisals):
  """A rollout of these turns; a policy's has a stop token too, an environment's has none."""
  numbers = [n for n, text in enumerate(turns) for _ in [*text, "end"][: len(text) + (n + 1) % 2]]
  labels = [c for n, text in enumerate(turns) for c in [*text, *["end"][: (n + 1) % 2]]]
  sample = dict(outcome=outcome, stopped=outcome != "length_limit")
  return rollouts.Rollout(
    0, 0, "p", "".join(turns), "7", rollouts.rollout_kind(sample), outcome, 0.0, len(numbers), 0,
    np.asarray(surprisals, float), turns, np.asarray(numbers), tuple(labels),
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
  assert rollouts.by_turns(DIALOGUES) == [DIALOGUES[1], DIALOGUES[0], DIALOGUES[2]]
  rollouts.show(DIALOGUES[:1])
  assert capsys.readouterr().out == (
    "batch   0  age 0    5 tokens  2 turns  reward 0  correct\n"
    "    'p'   (answer 7, outcome correct)\n"
    "    policy       '9'\n"
    "    environment  '<'\n"
    "    policy       '7'\n"
  )


def test_means_of_turns_are_over_the_policys_tokens():
  found = rollouts.turn_means(DIALOGUES)
  np.testing.assert_array_equal(found.counts, [3, 2, 1])
  np.testing.assert_allclose(found.tokens, [2, 2, 2])
  np.testing.assert_allclose(found.surprisal, [1.0, 0.6 / 4, 0.6])
  axes = axes_of(rollouts.plot_turn_surprisals, DIALOGUES)
  assert [line.get_ydata().tolist() for line in axes.lines] == [[1.0, 0.2], [1.0, 0.1, 0.6]]


def test_dialogues_are_counted_by_turns():
  axes = axes_of(rollouts.plot_turns, DIALOGUES)
  assert [[bar.get_height() for bar in container] for container in axes.containers] == [
    [1, 1, 0], [0, 0, 1]
  ]  # fmt: skip
  assert texts(axes) == ["out of turns", "correct"]
  np.testing.assert_array_equal(rollouts.correct_shares(DIALOGUES, "policy_turns").share, [1, 1, 0])


def test_an_environments_tokens_have_a_ground_and_no_height(capsys):
  from matplotlib import pyplot

  rollouts.draw_dialogue(DIALOGUES, 1)
  axes = pyplot.gca()
  labels = [label.get_text() for label in axes.get_xticklabels()]
  assert labels == ["9", "end", "<", "x", "end", "?", "?", "3", "end"]
  ground, other, *bars = axes.patches
  assert [(x.get_x(), x.get_x() + x.get_width()) for x in (ground, other)] == [
    (1.5, 2.5), (4.5, 6.5)
  ]  # fmt: skip
  assert [bar.get_height() for bar in bars] == [2, 0, 0, 0.2, 0, 0, 0, 0.6, 0.6]
  pyplot.close("all")
  assert capsys.readouterr().out.splitlines()[1:] == [
    "    policy       '9'             2 tokens, mean 1.00 nats",
    "    environment  '<'             1 tokens",
    "    policy       'x'             2 tokens, mean 0.10 nats",
    "    environment  '??'            2 tokens",
    "    policy       '3'             2 tokens, mean 0.60 nats",
    "    outcome      turn_limit",
  ]


# --- the first run --------------------------------------------------------------------------------


def answered(*completions):
  blank = rollouts.Rollout(
    0, 0, "", "", "5", "wrong", "wrong", 0.0, 1, 0, np.zeros(1), ("",), np.zeros(1, int), ("",)
  )
  return [blank._replace(completion=text, batch=n) for n, text in enumerate(completions)]


def test_errors_are_of_integers_alone_and_bounded():
  found = first_run.answer_errors(answered("5", "-5", "4", "x", "99", " 6"))
  np.testing.assert_array_equal(found, [0, -10, -1, 10, 1])


def test_errors_of_some_batches_beside_the_first(capsys):
  from matplotlib import pyplot

  first_run.draw_errors(answered("5", "6", "6", "5"), batch=2, width=2)
  axes = pyplot.gca()
  shares = [dict(zip(*line.get_data(), strict=True)) for line in axes.lines]
  assert (shares[0][0], shares[0][1], shares[1][0], shares[1][-1]) == (0.5, 0.5, 0.5, 0)
  assert texts(axes) == ["batches 0 to 1", "batches 2 to 3"]
  pyplot.close("all")
  with pytest.raises(ValueError, match="no batch 4; choose one of 0 to 3"):
    first_run.draw_errors(answered("5", "6", "6", "5"), batch=4)


def test_seconds_and_the_summary_are_of_the_records(tmp_path):
  records = [
    {"step": 1, "phase": "train", "time/generate_seconds": 6.0, "time/grade_seconds": 0.001},
    {"step": 1, "phase": "eval"}
    | {"eval/pass@1": 0.5, "eval/pass@1_low": 0.4, "eval/pass@1_high": 0.6}
    | {"time/evaluate_seconds": 2.0, "time/elapsed_seconds": 10.0},
  ]  # fmt: skip
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
  found = first_run.read_records(tmp_path)
  assert first_run.summary(tmp_path) == "after   1 updates: held-out pass@1 0.500 [0.400, 0.600]"
  axes = axes_of(first_run.plot_seconds, found)
  assert [bar.get_width() for bar in axes.patches] == [2, 6]  # grading is too short to be seen
  assert [text.get_text().strip() for text in axes.texts] == ["20%", "60%"]
  assert collections.Counter(r["phase"] for r in found) == {"train": 1, "eval": 1}
