"""What the panels of a run show."""

import numpy as np
import pytest

from rlvr_jax.evaluate import learning_curves
from rlvr_jax.evaluate.figures import COLORS


def train(step, **values):
  return {"step": step, "phase": "train", **{k.replace("__", "/"): v for k, v in values.items()}}


def panel(plot, records):
  from matplotlib.figure import Figure  # a second, which few tests need

  axes = Figure(figsize=(6, 3)).subplots()
  plot(axes, records)
  return axes


def labels(axes):
  return [text.get_text() for text in axes.get_legend().get_texts()]


def test_accuracy_has_every_k_with_its_interval():
  held_out = {"eval/pass@1": 0.3, "eval/pass@1_low": 0.2, "eval/pass@1_high": 0.4}
  records = [
    {"step": 0, "phase": "eval", **held_out, "eval/pass@16": 0.7},
    train(1, reward__pass_rate=0.25),
    {"step": 2, "phase": "eval", **held_out, "eval/pass@16": 0.8},
  ]
  axes = panel(learning_curves.plot_accuracy, records)
  assert labels(axes) == ["training rollouts", "held-out pass@1", "held-out pass@16"]
  of_train, at_1, at_16 = axes.lines
  np.testing.assert_array_equal(of_train.get_xydata(), [[1, 0.25]])
  np.testing.assert_array_equal(at_1.get_xydata(), [[0, 0.3], [2, 0.3]])
  np.testing.assert_array_equal(at_16.get_ydata(), [0.7, 0.8])
  assert (at_1.get_color(), at_16.get_color()) == (COLORS["result"], COLORS["success"])
  (band,) = axes.collections  # pass@16 has no interval here
  assert band.get_paths()[0].vertices[:, 1].min() == 0.2
  assert axes.get_ylim() == (0, 1)


def test_groups_stand_on_one_another_and_add_up_to_one():
  from matplotlib.colors import to_rgb

  shares = dict(groups__all_wrong=0.5, groups__effective=0.25, groups__all_correct=0.25)
  axes = panel(learning_curves.plot_groups, [train(1, **shares), train(2, **shares)])
  wrong, effective, right = axes.collections
  edges = [area.get_paths()[0].get_extents().get_points()[:, 1] for area in axes.collections]
  np.testing.assert_allclose(edges, [[0, 0.5], [0.5, 0.75], [0.75, 1]])
  for area, meaning in ((wrong, "failure"), (effective, "effective"), (right, "success")):
    assert to_rgb(area.get_facecolor()[0]) == to_rgb(COLORS[meaning])
  assert labels(axes) == ["all right", "effective: both", "all wrong"]  # as they stand


def test_lengths_name_the_truncated_share():
  values = dict(response__length=3.5, response__length_p10=2.0, response__length_p90=6.0)
  records = [train(1, **values, response__truncated=0.0), train(2, response__truncated=0.125)]
  axes = panel(learning_curves.plot_lengths, records)
  assert axes.get_title() == "Response length; truncated: at most 12.5%"
  np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[1, 3.5]])
  low, high = axes.collections[0].get_paths()[0].get_extents().get_points()[:, 1]
  assert (low, high) == (2, 6) and axes.get_ylim()[0] == 0


def test_rounding_noise_has_no_scale_of_its_own():
  def tops(kl, clip):
    records = [train(n, behavior__kl_k3=kl * n, loss__clip_fraction=clip * n) for n in (1, 2)]
    axes = panel(learning_curves.plot_shift, records)
    (beside,) = set(axes.figure.axes) - {axes}
    return axes.get_ylim()[1], beside.get_ylim()[1]

  least = (learning_curves.SMALLEST_KL, learning_curves.SMALLEST_FRACTION)
  assert tops(1e-13, 1e-9) == least
  assert tops(0.25, 0.2) == pytest.approx((0.5125, 0.41))


@pytest.mark.parametrize(
  ("kl", "clip", "shown"), [(1e-13, 0.0, False), (1e-3, 0.0, True), (1e-13, 0.01, True)]
)
def test_a_run_on_policy_has_no_panel_of_its_distance(kl, clip, shown):
  records = [train(1, behavior__kl_k3=kl, loss__clip_fraction=clip, policy__entropy=0.5)]
  panels = learning_curves.panels_with_data(records)
  assert panels == [learning_curves.plot_entropy, *[learning_curves.plot_shift] * shown]


def test_a_figure_has_the_panels_with_data_alone(tmp_path):
  from matplotlib.image import imread

  one = [train(n, policy__entropy=0.5) for n in (1, 2)]
  assert learning_curves.draw(one, tmp_path / "one.png")
  image = imread(tmp_path / "one.png")
  assert image.shape == (432, 1728, 4)
  assert (image[:, 864:, :3] < 0.9).any()  # it has the whole width
  assert not learning_curves.draw([{"step": 1, "phase": "train"}], tmp_path / "none.png")
  assert not (tmp_path / "none.png").exists()
