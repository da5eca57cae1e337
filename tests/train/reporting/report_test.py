import builtins
import sys

import pytest

from rlvr_jax.train.reporting import report
from rlvr_jax.train.reporting import writer as metrics


@pytest.fixture
def workdir(tmp_path):
  with metrics.open_writer(tmp_path) as writer:
    for step, solved in ((0, 0.3), (5, 0.7), (10, 0.6)):
      for train_step in range(max(step - 4, 1), step + 1):
        writer.write(
          train_step,
          "train",
          {
            "reward/mean": 0.25 + train_step / 100,
            "reward/pass_rate": 0.25 + train_step / 100,
            "policy/entropy": 0.5 - train_step / 50,
            "behavior/kl_k3": 1e-4 if train_step != 3 else float("nan"),
            "loss/clip_fraction": 0.01,
            "update/gradient_norm": 0.4,
            "counter/tokens_generated": 1500 * train_step,
            "counter/tokens_trained": 1000 * train_step,
            "counter/flops_optimise": 2e12 * train_step,
            "counter/flops_evaluate": 3e9 * (train_step - 1),
            "time/elapsed_seconds": 5.0 * train_step,
            "time/generate_seconds": 2.0,
          },
        )
      interval = {"eval/pass@1_low": solved - 0.05, "eval/pass@1_high": solved + 0.05}
      values = {"eval/pass@1": solved, "eval/pass@8": solved + 0.2, "time/evaluate_seconds": 7}
      counters = {"counter/flops_evaluate": 3e9 * step, "time/elapsed_seconds": 6.0 * step}
      writer.write(step, "eval", values | interval | counters)
  return tmp_path


def test_table_places_and_curves(workdir):
  from matplotlib.image import imread  # a second, which few tests need

  text = report.write_report(workdir)
  lines = text.splitlines()
  assert lines[0].split() == ["start", "best", "final"]
  assert lines[1].split("  ")[0] == "held-out pass@1"
  assert "0.300 [0.250, 0.350]" in lines[1]
  assert "0.700 [0.650, 0.750] at 5" in lines[1]
  assert lines[1].endswith("0.600 [0.550, 0.650]")
  assert lines[2].split() == ["held-out", "pass@8", "0.500", "0.900", "at", "5", "0.800"]
  assert lines[3].split() == ["train", "reward", "0.260", "0.350", "at", "10", "0.350"]
  assert lines[4].split() == ["entropy", "(nats/token)", "0.480", "0.300"]
  assert lines[5] == "updates: 10, generate 20 s, evaluate 21 s"
  assert lines[6] == "tokens: generated 15,000, trained 10,000"
  assert lines[7] == "model FLOPs: optimise 2e+13, evaluate 3e+10"
  for name in ("learning_curves.png", "metrics.jsonl", "rollouts.jsonl", "tensorboard"):
    assert str(workdir / name) in text
  image = imread(workdir / report.CURVES_FILE)
  assert image.shape == (864, 1728, 4)  # accuracy, entropy, distance, norm
  assert 0.005 < (image[..., :3].min(axis=-1) < 0.9).mean() < 0.5


def test_without_matplotlib_the_table_stands(workdir, monkeypatch):
  genuine = builtins.__import__

  def without(name, *args, **kwargs):
    if name.startswith("matplotlib"):
      raise ImportError(name)
    return genuine(name, *args, **kwargs)

  for name in [name for name in sys.modules if name.startswith("matplotlib")]:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.setattr(builtins, "__import__", without)
  text = report.write_report(workdir)
  assert 'pip install "rlvr_jax[plot]"' in text and "held-out pass@1" in text
  assert not (workdir / report.CURVES_FILE).exists()


def test_a_run_without_evaluation_or_updates(tmp_path):
  with metrics.open_writer(tmp_path) as writer:
    writer.write(1, "warm_start", {"loss": 1.0})
  assert "metrics.jsonl" in report.write_report(tmp_path)
