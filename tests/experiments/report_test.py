"""What is kept of a run, tables and figures of experiments, and the price of a hand-over."""

import json
import math

import numpy as np
import pytest

from experiments.mu_grpo import hand_over
from experiments.steps import tables as steps
from experiments.testbed import report
from rlvr_jax.evaluate import compare


def result(label, seed, level, **more):
  """Of a run whose pass@1 rises to `level`, with every metric that a table may ask for."""
  updates = [0, 32, 64, 96, 128, 160, 192]
  values = list(np.linspace(0.4, level, len(updates)))
  return {
    "label": label,
    "seed": seed,
    "number": seed,
    "commit": "abc",
    "layout": {"device": "cpu"},
    "evaluations": {
      **{f"eval/pass@{k}": values for k in (1, 2, 4, 8, 16, 64)},
      **{"updates": updates, "seconds": [2.0 * u for u in updates]},
      "flops": [1e12 * u for u in updates],
    },
    "train": {name: list(np.linspace(0.1, 0.2, 12)) for name in report.TRAIN},
    "geometry": {"geometry/participation_ratio": 5.0, "geometry/participation_ratio_sampled": 2.0},
    "last": {"geometry/head_rank_one_fraction": 0.25},
    "signs": 0.9,
    "signs_by_chance": 0.7,
    **more,
  }


# --- what is kept ---------------------------------------------------------------------------------


def test_metrics_are_averaged_over_spans():
  assert report.span_means(np.arange(24)) == [0.5 + 2 * i for i in range(12)]
  assert report.span_means([1.0, 3.0]) == [1.0, 3.0]


def test_signs_of_large_cosines_are_compared():
  rng = np.random.default_rng(0)
  features = rng.normal(size=(12, 3))
  gram = features @ features.T
  both = lambda other: report.sign_agreement([{"gram": gram, "gram_compared": other}])
  agree = lambda other: both(other)[0]
  assert agree(2.0 * gram) == 1.0 and agree(-gram) == 0.0
  assert report.sign_agreement([{"gram": gram}]) == (None, None)
  other = gram.copy()
  small = np.unravel_index(np.argmin(np.abs(gram)), gram.shape)
  other[small] *= -1  # a sign that is not of a large entry
  assert agree(other) == 1.0
  # By chance: large cosines that are all positive agree anyway; half and half, by half.
  positive = np.exp(-np.abs(np.subtract.outer(np.arange(12), np.arange(12))) / 4.0)
  assert report.sign_agreement([{"gram": positive, "gram_compared": positive}]) == (1.0, 1.0)
  cosines = gram / np.sqrt(np.outer(np.diag(gram), np.diag(gram)))
  values = cosines[np.triu_indices(12, k=1)]
  share = np.mean(values[np.abs(values) >= np.quantile(np.abs(values), 0.9)] > 0)
  assert both(gram)[1] == pytest.approx(share**2 + (1 - share) ** 2, rel=1e-5)


def write_metrics(workdir):
  records = [
    {
      **{"phase": "train", "step": step, "policy/entropy": 0.1 * step},
      **{"time/sync_weights_seconds": 0.25, "time/elapsed_seconds": 1.0},
      **({"geometry/participation_ratio": 4.0} if step % 2 else {}),
    }
    for step in range(1, 5)
  ]
  (workdir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_a_run_is_measured(tmp_path):
  write_metrics(tmp_path)
  found = report.measure_run(str(tmp_path))
  assert found["train"] == {"policy/entropy": [0.1, 0.2, 0.3, 0.4]}
  assert found["geometry"] == {"geometry/participation_ratio": 4.0}
  assert found["signs"] is None and found["signs_by_chance"] is None


def test_runs_of_another_sitting_join_the_committed_ones(tmp_path):
  committed = [result("B", 0, 0.5), result("A", 1, 0.6)]
  compare.write_results(tmp_path / "results.json", committed)
  for label, seed, level in (("A", 0, 0.7), ("B", 0, 0.8), ("another experiment's", 0, 0.9)):
    run = tmp_path / "sweep" / f"{label}_{seed}"
    run.mkdir(parents=True)
    write_metrics(run)
    (run / "result.json").write_text(json.dumps(result(label, seed, level)))
  read = lambda *argv: report.load_results(
    tmp_path / "results.json", report.measure_run, ["A", "B"], argv
  )
  assert read() == (committed, False)
  found, are_new = read(f"--workdir={tmp_path / 'sweep'}")
  ends = {(r["label"], r["seed"]): r["evaluations"]["eval/pass@1"][-1] for r in found}
  assert list(ends.items()) == [(("A", 0), 0.7), (("A", 1), 0.6), (("B", 0), 0.8)]
  assert (
    are_new
    and found[0]["train"] == {"policy/entropy": [0.1, 0.2, 0.3, 0.4]}
    and "workdir" not in found[0]
  )  # measured anew
  assert read() == (found, False)


# --- values and tables ----------------------------------------------------------------------------


def test_values_of_a_run():
  run = result("GRPO", 0, 1.0)
  assert report.late_mean()(run) == pytest.approx(0.9) and report.peak_value()(run) == 1.0
  assert report.training_mean("no/metric")(run) is None
  assert report.geometry_value("participation_ratio", "score")(run) == 5.0
  assert report.geometry_value("participation_ratio", "sampled")(run) == 2.0
  assert report.peak_update(run) == 192.0


def test_differences_are_paired_by_seed():
  runs = [result("GRPO", seed, 0.6 + 0.1 * seed) for seed in range(3)]
  runs += [result("FADE", seed, 0.7 + 0.1 * seed) for seed in range(3)]
  table = report.table(
    runs, ["GRPO", "FADE", "none"], {"pass@1": report.late_mean()}, compared=report.late_mean()
  )
  lines = table.splitlines()
  assert lines[0] == "| run | seeds | pass@1 | less GRPO's, paired |"
  assert lines[2].startswith("| GRPO | 3 |") and lines[2].endswith("| – |")
  assert "| +0.083 |" in lines[3]  # the same for all seeds: no interval
  assert lines[4:] == ["", "No run of these arms has finished: none."]
  assert report.cell([0.5, 0.5]) == "0.5" and report.cell([0.5, 0.6]) == "0.55 ± 0.6"
  runs[-1] = result("FADE", 2, 0.92)
  found = [
    report.table(
      runs, ["GRPO", "FADE"], {}, compared=report.late_mean(), digits=digits
    ).splitlines()[3]
    for digits in (3, 4)
  ]
  assert found[0].startswith("| FADE | 3 | +0.089 [+0.065, +0.113] |")
  assert found[1].startswith("| FADE | 3 | +0.0889 [+0.0650, +0.1128] |")
  assert report.table([], ["GRPO"], {}) == "No run of these arms has finished: GRPO."


def test_the_panels_of_a_figure_are_of_its_arms():
  assert all(set(panel.labels) <= set(steps.ARMS) for panel in steps.PANELS)


def test_runs_of_a_sweep_replace_a_file_of_results(tmp_path):
  for number, label in enumerate(("z", "a", "other")):
    (tmp_path / "sweep" / label).mkdir(parents=True)
    text = json.dumps({"label": label, "seed": 1, "number": number, "evaluations": {}})
    (tmp_path / "sweep" / label / "result.json").write_text(text)
  file, measure = tmp_path / "results.json", lambda workdir: {"from": workdir[-3:]}
  argv = [f"--workdir={tmp_path / 'sweep'}"]
  replaced, are_new = report.load_results(file, measure, argv=argv)
  assert are_new and [r["label"] for r in replaced] == ["z", "a", "other"]
  first = {"label": "z", "seed": 1, "number": 0, "evaluations": {}, "from": "p/z"}
  assert replaced[0] == first
  assert report.load_results(file, measure, argv=[]) == (replaced, False)
  assert report.load_results(tmp_path / "none.json", measure, argv=[]) == ([], False)


def test_tables_are_written_between_the_marks(tmp_path):
  page = tmp_path / "README.md"
  page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
  write = lambda: report.write_page(tmp_path, lambda results: f"{len(results)} runs", argv=[])
  write()
  text = page.read_text()
  assert "\n0 runs\n" in text and "old" not in text and "commit" not in text
  compare.write_results(tmp_path / "results.json", [result("GRPO", 0, 0.8)])
  write()
  text = page.read_text()
  assert "\n1 runs\n\ncommit: abc (1 runs)" in text and text.endswith("after\n")
  with pytest.raises(ValueError, match="the page must have the lines"):
    report.insert_text("no marks", "text")


# --- the price of a hand-over ---------------------------------------------------------------------


def test_the_cost_of_a_level_is_interpolated():
  cost = hand_over.cost_to(result("GRPO", 0, 1.0), 0.55, mu=4)
  assert cost == pytest.approx((48.0, 96.0, 12, 2.0))  # a quarter of the way from 0.4 to 1.0
  assert hand_over.cost_to(result("GRPO", 0, 0.5), 0.6, mu=4) is None


def test_stages_are_faster_above_the_break_even_price():
  grpo = hand_over.Cost(updates=24, seconds=24.0, refreshes=6, seconds_per_update=1.0)
  stages = hand_over.Cost(updates=72, seconds=72.0, refreshes=1, seconds_per_update=1.0)
  price = hand_over.break_even(grpo, stages)
  assert price == pytest.approx((72 - 24) / (6 - 1))
  found = hand_over.make_curve(0, grpo, stages, (0.0, price, 1e9))
  assert found.speedup == pytest.approx((1 / 3, 1.0, 6.0))
  assert found.break_even == price
  assert hand_over.break_even(stages, grpo) == math.inf  # it pays more and is faster without price
  assert hand_over.break_even(grpo, stages._replace(seconds=10.0)) == 0.0


def test_prices_of_7b_are_those_of_its_cost_report():
  prices = hand_over.prices_of_7b()
  report_7b = json.loads(hand_over.COSTS_7B.read_text(encoding="utf-8"))["costs"]
  update = max(report_7b["update"]["seconds"].values())
  assert list(prices.values())[1:] == [30 / update, 60 / update]
  weights = 2 * 7_615_616_512  # bytes in bfloat16; of 16 chips each holds a part
  assert next(iter(prices.values())) == pytest.approx(weights * 15 / 16 / 600e9 / update)


def test_prices_need_a_seed_that_reached_the_level():
  assert hand_over.table(lambda prices: []) == "No seed with which both reached the level."
