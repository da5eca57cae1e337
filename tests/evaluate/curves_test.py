"""Learning curves on every axis, their mean over seeds, first reaching a level, time by phase."""

import math

import numpy as np
import pytest

from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.figures import METHODS
from rlvr_jax.train.reporting.writer import open_writer


def counters(step):
  """Totals after so many updates, each with a rate of its own."""
  return {
    "counter/tokens_generated": 50 * step,
    "counter/tokens_trained": 40 * step,
    "counter/flops_generate": 1000 * step,
    "counter/flops_score": 200 * step,
    "counter/flops_optimise": 3000 * step,
    "counter/flops_evaluate": 70 * (step + 1),
    "time/elapsed_seconds": 3.0 + 2.0 * step,
  }


def run(slope=0.1):
  """Records as a run writes them: ten updates, evaluated before the first and after every fifth."""
  accuracy = lambda step: {"step": step, "phase": "eval", "eval/pass@1": 0.2 + slope * step}
  records = [accuracy(0) | counters(0)]
  for step in range(1, 11):
    times = {"time/generate_seconds": 1.0, "time/optimise_seconds": 0.5}
    train = {"step": step, "phase": "train", "reward/mean": step / 20}
    records.append(train | counters(step) | times)
    if step % 5 == 0:
      records.append(accuracy(step) | counters(step) | {"time/evaluate_seconds": 0.25})
  return records


@pytest.mark.parametrize(
  ("over", "per_update", "start"),
  [
    ("updates", 1, 0),
    ("generated_tokens", 50, 0),
    ("trained_tokens", 40, 0),
    ("flops", 4200, 0),
    ("seconds", 2, 3),
  ],
)
def test_a_curve_over_every_axis(over, per_update, start):
  x, y = curves.curve(run(), "eval/pass@1", over)
  np.testing.assert_array_equal(x, start + per_update * np.array([0, 5, 10]))
  np.testing.assert_allclose(y, [0.2, 0.7, 1.2])
  x, y = curves.curve(run(), "reward/mean", over, phase="train")
  np.testing.assert_array_equal(x, start + per_update * np.arange(1, 11))
  np.testing.assert_allclose(y, np.arange(1, 11) / 20)


def test_records_without_the_metric_are_left_out():
  records = run()
  records[1]["geometry/rank"] = 7.0  # measured at some updates only
  x, y = curves.curve(records, "geometry/rank", phase="train")
  assert (x.tolist(), y.tolist()) == ([1.0], [7.0])


def test_what_cannot_be_drawn_is_named():
  with pytest.raises(ValueError, match=r"over = 'tokens' is unknown; .*'generated_tokens'"):
    curves.curve(run(), "eval/pass@1", "tokens")
  with pytest.raises(ValueError, match=r"3 records of phase 'eval' .* 'eval/pass@2'; .*pass@1'"):
    curves.curve(run(), "eval/pass@2")
  records = run()
  del records[6]["counter/flops_score"], records[6]["time/elapsed_seconds"]
  expected = (
    r"'flops' needs \['counter/flops_score'\], which the eval record of step 5 lacks: the run was"
    r" made .* one of \['updates', 'generated_tokens', 'trained_tokens'\]"
  )
  with pytest.raises(ValueError, match=expected):
    curves.curve(records, "eval/pass@1", "flops")


# --- several seeds --------------------------------------------------------------------------------


def test_the_mean_lies_where_all_curves_do():
  """Three lines at 1, 2 and 6 times x: their interval is Student's, t = 4.302653 at 2 degrees."""
  lines = [(x, slope * np.array(x)) for slope, x in ((1, [0, 8]), (2, [2, 3, 9]), (6, [1, 5, 6]))]
  found = curves.mean_curve(lines, num=5)
  np.testing.assert_allclose(found.x, [2, 3, 4, 5, 6])
  np.testing.assert_allclose(found.mean, 3 * found.x)
  half = 4.302653 * np.sqrt(7) / np.sqrt(3) * found.x  # variance of 1, 2, 6 is 7
  np.testing.assert_allclose(found.high - found.mean, half, rtol=1e-6)
  np.testing.assert_allclose(found.mean - found.low, half, rtol=1e-6)


def test_the_last_of_several_points_with_the_same_x_counts():
  """A stage's updates all train on tokens that were generated before the first of them."""
  steps = ([0, 0, 10, 10], [0.1, 0.3, 0.5, 0.9])
  found = curves.mean_curve([steps, steps], num=3)
  np.testing.assert_allclose(found.mean, [0.3, 0.4, 0.9])
  np.testing.assert_allclose(found.high, found.mean)


def test_an_interval_is_clipped_to_the_range_of_the_metric():
  lines = [([0, 1], [0, slope]) for slope in (0.1, 0.9)]  # half: 12.7062 * 0.4
  found = curves.mean_curve(lines, num=2, within=(0.0, 1.0))
  np.testing.assert_allclose([found.mean[1], found.low[1], found.high[1]], [0.5, 0, 1])
  within = {
    "eval/pass@1": (0, 1),
    "behavior/ess": (0, 1),
    "loss/clip_fraction_negative": (0, 1),
    "policy/entropy": (0, math.inf),
    "behavior/ratio_max": (0, math.inf),
    "response/length_p90": (0, math.inf),
    "behavior/kl_k1": (-math.inf, math.inf),
    "reward/mean": (-math.inf, math.inf),
    "eval/gap_to_best_play": (-math.inf, math.inf),
  }
  assert {metric: curves.metric_range(metric) for metric in within} == within


def test_curves_without_a_mean():
  with pytest.raises(ValueError, match="the curves of two seeds or more, got 1; run more seeds"):
    curves.mean_curve([([0, 1], [0, 1])])
  with pytest.raises(ValueError, match="no range of x: 0 to 1, 2 to 3; train the runs for longer"):
    curves.mean_curve([([0, 1], [0, 1]), ([2, 3], [0, 1])])
  with pytest.raises(ValueError, match="x is not finite or does not ascend; leave out points"):
    curves.mean_curve([([1, 0], [0, 1]), ([2, 3], [0, 1])])


@pytest.mark.parametrize(
  ("y", "level", "x"),
  [
    ([0.0, 0.5, 0.4, 1.0], 0.45, 9.0),  # the first time, though it falls back
    ([0.0, 0.5, 0.4, 1.0], 0.5, 10.0),
    ([0.0, 0.5, 0.4, 1.0], 0.7, 30.0),
    ([0.3, 0.5, 0.4, 1.0], 0.2, 0.0),  # from the start
    ([0.0, 0.5, 0.4, 1.0], 1.1, math.nan),
    ([0.0, math.nan, 0.4, math.inf], 0.1, 5.0),
    ([0.0, math.nan, 0.4, math.inf], 0.5, math.nan),
    ([math.nan] * 4, 0.5, math.nan),
  ],
)
def test_first_reaching_a_level(y, level, x):
  found = curves.first_crossing([0, 10, 20, 40], y, level)
  assert found == pytest.approx(x, nan_ok=True)


# --- time -----------------------------------------------------------------------------------------


def test_time_by_phase_and_its_share_of_the_wall_clock():
  assert curves.time_table(run()) == {
    "generate": (10.0, 10 / 23),
    "optimise": (5.0, 5 / 23),
    "evaluate": (0.5, 0.5 / 23),
  }
  with pytest.raises(ValueError, match="none of the 1 records has time/elapsed_seconds: the run"):
    curves.time_table([{"step": 1, "phase": "train", "time/generate_seconds": 1.0}])


@pytest.fixture
def workdirs(tmp_path):
  """Three seeds of one method, two of another, one of a third."""
  slopes = {"a_0": 0.0, "a_1": 0.04, "a_2": 0.08, "b_0": 0.08, "c_0": 0.05, "c_1": 0.07}
  for name, slope in slopes.items():
    with open_writer(tmp_path / name) as writer:
      for record in run(slope):
        writer.write(record.pop("step"), record.pop("phase"), record)
  return {label: sorted(tmp_path.glob(f"{label}_*")) for label in "abc"}


def test_what_is_plotted(workdirs):
  axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
  curves.plot(axes, workdirs, "eval/pass@1", "flops")
  lines = {line.get_label(): line for line in axes.lines}
  x, y = lines["a, 3 seeds"].get_data()
  assert (x[0], x[-1]) == (0, 42_000)
  np.testing.assert_allclose(y, 0.2 + 0.04 * x / 4200)
  np.testing.assert_allclose(lines["b"].get_ydata(), [0.2, 0.6, 1.0])
  assert len(axes.lines) == 8  # with the seeds of a and c
  colors = [lines[name].get_color() for name in ("a, 3 seeds", "b", "c, 2 seeds")]
  assert colors == list(METHODS[:3])
  (band,) = axes.collections  # of a; that of two seeds would hide the curves
  x, edges = band.get_paths()[0].vertices.T
  updates = x.max() / 4200 / 199  # of the grid's second point
  second = edges[np.isclose(x, 4200 * updates)]
  half = 4.302653 * 0.04 / np.sqrt(3)
  assert second.max() == pytest.approx(0.2 + updates * (0.04 + half), rel=1e-4)
  assert second.min() == pytest.approx(0.2 + updates * (0.04 - half), rel=1e-4)
  assert (edges.min(), edges.max()) == (0, 1)  # beyond, it would be no accuracy
  assert "FLOPs" in axes.get_xlabel() and axes.get_ylabel() == "eval/pass@1"
  with pytest.raises(ValueError, match=r"a_0: curve: none of the 3 records .* 'pass@1'"):
    curves.plot(axes, workdirs, "pass@1", "flops")


def test_the_picture_has_colored_lines(workdirs, tmp_path):
  pytest.importorskip("matplotlib")
  from matplotlib.image import imread

  curves.draw(workdirs, "reward/mean", "seconds", tmp_path / "picture.png", phase="train")
  image = imread(tmp_path / "picture.png")
  assert image.shape == (480, 960, 4)
  assert 0.002 < (np.ptp(image[..., :3], axis=-1) > 0.3).mean() < 0.5


@pytest.mark.parametrize("name", ["curves.png", "curves.svg", "curves"])
def test_a_figure_takes_the_place_of_a_link(tmp_path, name):
  theirs = tmp_path / "theirs"
  theirs.write_text("theirs")
  (tmp_path / name).symlink_to(theirs)
  with curves.save_figure(tmp_path / name) as axes:
    axes.plot([1, 2])
  assert theirs.read_text() == "theirs" and not (tmp_path / name).is_symlink()
  begins = b"<?xml" if name.endswith("svg") else b"\x89PNG"
  assert (tmp_path / name).read_bytes().startswith(begins)
