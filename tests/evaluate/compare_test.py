"""Tables and curves of a sweep's results, and their files."""

import json
import math

import numpy as np
import pytest

from rlvr_jax.evaluate import compare, curves

STEPS = [0, 5, 10]


def result(label, seed, final, **more):
  accuracy = np.linspace(0.2, final, 3).tolist()
  columns = {"updates": STEPS, "flops": [0, 50, 100], "eval/pass@1": accuracy}
  columns["eval/pass@1_low"] = [x - 0.1 for x in accuracy]
  columns["eval/pass@1_high"] = [x + 0.1 for x in accuracy]
  return dict(label=label, seed=seed, evaluations=columns, commit="abc", **more)


RESULTS = [
  *(result("grpo", seed, final) for seed, final in enumerate([0.4, 0.5, 0.3])),
  *(result("rloo", seed, final) for seed, final in enumerate([0.5, 0.7, 0.6])),
  *(result("cispo", seed, final) for seed, final in ((2, 0.31), (1, 0.49))),
  result("fade", 0, 0.4),
]


def test_a_table_has_paired_differences():
  lines = compare.comparison_table(RESULTS).splitlines()
  header, rows = lines[0], {line.split("|")[1].strip(): line for line in lines[2:]}
  assert "p, Holm | seeds for 0.02" in header and list(rows) == ["grpo", "rloo", "cispo", "fade"]
  cells = lambda label: [cell.strip() for cell in rows[label].split("|")[2:-1]]
  error = 0.1 / np.sqrt(3)
  problems = "0.051"  # 0.2 / (2 · 1.96)
  assert cells("grpo") == ["3", "0.4", f"{error:.2g}", problems, *["–"] * 6]
  half = 4.302653 * error  # of 0.1, 0.2, 0.3
  interval = f"[{0.2 - half:+.4f}, {0.2 + half:+.4f}]"
  found = ["+0.2000", interval, "[+0.1000, +0.3000]", "0.074", "0.15", "199"]
  assert cells("rloo") == ["3", "0.6", f"{error:.2g}", problems, *found]
  assert cells("cispo")[0] == "2" and cells("cispo")[4] == "+0.0000"
  assert cells("cispo")[7:9] == ["1", "1"]
  assert cells("fade") == ["1", "0.4", "–", problems, *["–"] * 6]


def test_a_difference_that_does_not_vary_has_no_interval():
  same = [result("same", seed, final) for seed, final in enumerate([0.4, 0.5, 0.3])]
  rows = compare.comparison_table([*RESULTS, *same]).splitlines()
  cells = [cell.strip() for cell in rows[-1].split("|")[2:-1]]
  assert cells[4:] == ["+0.0000", *["–"] * 5]
  # It is no comparison that p-values must be adjusted for.
  assert [row.split("|")[10] for row in rows[3:5]] == [" 0.15 ", " 1 "]


def test_equal_but_for_rounding_and_not_finite_are_no_comparisons():
  of_other = compare.comparison_table(RESULTS).splitlines()[3]
  rounded = [result("more", seed, x + 0.1) for seed, x in enumerate([0.4, 0.5, 0.3])]
  odd = [result("odd", seed, x) for seed, x in enumerate([0.4, math.nan, 0.3])]
  for added in (rounded, odd):
    rows = compare.comparison_table([*RESULTS, *added]).splitlines()
    assert rows[-1].endswith("| – | – | – | – | – |")
    assert of_other in rows  # its p-value is adjusted as before


def test_differences_have_an_interval_from_three_seeds_on():
  axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
  compare.plot_differences(axes, RESULTS, "grpo")
  rows = [label.get_text() for label in axes.get_yticklabels()]
  assert rows == ["rloo (3 seeds)", "cispo (2 seeds)", "fade (1 seed)"]
  dots = [line.get_xdata() for line in axes.lines if line.get_label() == "seed"]
  np.testing.assert_allclose(dots[0], [0.1, 0.2, 0.3])
  np.testing.assert_allclose(dots[1], [-0.01, 0.01])
  np.testing.assert_allclose(dots[2], [0.0], atol=1e-12)
  (interval,) = axes.containers  # of rloo alone
  (segment,) = interval.lines[2][0].get_segments()
  half = 4.302653 * 0.1 / np.sqrt(3)
  np.testing.assert_allclose(segment[:, 0], [0.2 - half, 0.2 + half], rtol=1e-5)
  names = [text.get_text() for text in axes.get_legend().get_texts()]
  assert sorted(names) == ["grpo", "mean of two seeds", "mean, 95 % (t)", "seed"]
  assert axes.get_xlabel() == "eval/pass@1, less that of grpo"


def test_another_baseline_and_what_is_missing():
  lines = compare.comparison_table(RESULTS, baseline="rloo", difference=0.1).splitlines()
  assert "-0.2000" in lines[2] and "seeds for 0.1" in lines[0]
  with pytest.raises(ValueError, match=r"no run has the label 'gpro'; choose one of \['grpo', "):
    compare.comparison_table(RESULTS, baseline="gpro")
  with pytest.raises(ValueError, match=r"grpo, seed 0: curve: none of the 3 .* 'eval/pass@8'"):
    compare.comparison_table(RESULTS, metric="eval/pass@8")
  with pytest.raises(ValueError, match=r"'reward/mean'; metrics of updates need --phase=train;"):
    compare.comparison_table(RESULTS, metric="reward/mean")
  expected = "grpo, seed 0: the file of results has no curve of 'policy/entropy' over 'updates'"
  with pytest.raises(ValueError, match=expected):
    compare.comparison_table(RESULTS, metric="policy/entropy", phase="train")


def test_curves_of_a_result_over_its_axes():
  x, y = compare.result_curve(RESULTS[0], over="flops")
  np.testing.assert_allclose((x, y), ([0, 50, 100], [0.2, 0.3, 0.4]))
  with pytest.raises(ValueError, match=r"seed 0: .* 'seconds' needs .* before this axis existed"):
    compare.result_curve(RESULTS[0], over="seconds")
  assert compare.final_value(RESULTS[1]) == 0.5 and compare.rise(RESULTS[1]) == pytest.approx(0.3)


def test_curves_of_training_are_pairs_or_means_over_equal_spans():
  result = RESULTS[0] | {
    "curves": {"policy/entropy": [[1, 3.0], [9, 1.0]]},
    "train": {"loss/ess": [0.5, 0.7]},
  }
  np.testing.assert_array_equal(compare.result_curve(result, "policy/entropy"), [[1, 9], [3, 1]])
  end = result["evaluations"]["updates"][-1]
  expected = [[end / 4, 3 * end / 4], [0.5, 0.7]]
  np.testing.assert_array_equal(compare.result_curve(result, "loss/ess"), expected)
  assert compare.final_value(result, "loss/ess", phase="train") == 0.7
  expected = "grpo, seed 0: the file of results has no curve of 'loss/ess' over 'seconds'"
  with pytest.raises(ValueError, match=expected):
    compare.result_curve(result, "loss/ess", over="seconds", phase="train")


def test_evaluations_have_every_axis():
  flops = dict.fromkeys(("generate", "score", "optimise"), 2.0)
  counters = {f"counter/flops_{name}": value for name, value in flops.items()}
  counters |= {"counter/tokens_generated": 7, "counter/tokens_trained": 5}
  record = {"step": 3, "phase": "eval", "eval/pass@1": 0.5, "time/elapsed_seconds": 1.234}
  found = compare.evaluations([{"step": 3, "phase": "train"}, record | counters])
  assert found == {
    "updates": [3],
    "generated_tokens": [7],
    "trained_tokens": [5],
    "flops": [6.0],
    "seconds": [1.23],
    "eval/pass@1": [0.5],
  }
  for axis in curves.AXES:
    x, _ = compare.result_curve(dict(label="a", seed=0, evaluations=found), over=axis)
    assert x.tolist() == found[axis]
  assert compare.evaluations([]) == {}
  third = record | counters | {"eval/majority": 0.5}  # in one between, no sample had an answer
  with_gap = compare.evaluations([third, record | counters, third])
  assert with_gap["eval/pass@1"] == [0.5] * 3 and "eval/majority" not in with_gap


def test_results_of_a_workdir_come_in_the_order_of_the_sweep(tmp_path):
  for number, name in enumerate(("z_0", "a_0")):
    (tmp_path / name).mkdir()
    (tmp_path / name / "result.json").write_text(json.dumps(result(name, 0, 0.5, number=number)))
  (tmp_path / "b_0").mkdir()  # has not finished
  found = compare.read_results(tmp_path)
  assert [r["label"] for r in found] == ["z_0", "a_0"]
  assert found[0]["workdir"] == str(tmp_path / "z_0")
  with pytest.raises(ValueError, match="b_0 has no results: give the --workdir of a sweep"):
    compare.read_results(tmp_path / "b_0")


@pytest.mark.parametrize("text", ["[]", "{}", '[{"label": "a"}]'])
def test_a_file_without_results_is_named(tmp_path, text):
  (tmp_path / "some.json").write_text(text)
  with pytest.raises(ValueError, match=r"some\.json has no results"):
    compare.read_results(tmp_path / "some.json")


def test_two_sweeps_with_one_label_are_refused(tmp_path, capsys):
  file = tmp_path / "results.json"
  compare.write_results(file, RESULTS)
  with pytest.raises(SystemExit):
    compare.main([str(file), str(file)])
  assert "two results have the label 'grpo' and the seed 0" in capsys.readouterr().err


def test_the_program_prints_a_table_and_saves_a_figure(tmp_path, capsys):
  pytest.importorskip("matplotlib")
  file = tmp_path / "results.json"
  compare.write_results(file, [r for r in RESULTS if r["label"] in ("grpo", "rloo")])
  figures = [f"--figure={tmp_path / 'a.png'}", f"--differences={tmp_path / 'b.png'}"]
  compare.main([str(file), *figures, "--over=flops"])
  printed = capsys.readouterr().out
  assert "| rloo | 3 | 0.6 |" in printed and "commit: abc (6 runs)" in printed
  assert "device: not recorded (6 runs)" in printed
  assert compare.DASHES in printed
  assert all((tmp_path / name).stat().st_size > 1000 for name in ("a.png", "b.png"))
  with pytest.raises(SystemExit):
    compare.main([str(file), "--metric=eval/pass@2"])
  assert "error: grpo, seed 0: curve: none of the 3 records" in capsys.readouterr().err
