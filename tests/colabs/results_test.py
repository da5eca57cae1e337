"""Claims and runs are read as they are committed; what the pictures show of them."""

import json
import pathlib

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from colabs import notebooks
from docs import reproduction as page
from rlvr_jax.colab import reproduction, results
from rlvr_jax.colab.display import COLORS

ROOT = pathlib.Path(__file__).parents[2]
TABLE = """# Reproduction

## SALT, arXiv 1

| id | claim | verdict | compared | difference, 95 % | p, Holm | margin | task |
|---|---|---|---|---|---|---|---|
| S1a | n_eff is low | **found** | n_eff: *a* minus *b* | +0.1 | 0.04 | 0.03 | steps |
| S1b | PR too | **not tested** | – | – | – | – | – |
| S2 | it rises | **reversed** | – | – | – | – | – |

| id | evidence | conditions | link | queued |
|---|---|---|---|---|
| S1 | it is [low](a.md), 0.1 | 3 seeds | – | 5 runs |
| S2 | no | – | – | – |

## P3O, arXiv 2

| id | claim | verdict | compared | difference, 95 % | p, Holm | margin | task |
|---|---|---|---|---|---|---|---|
| P1 | it wins | **reversed** | – | – | – | – | – |

| id | evidence | conditions | link | queued |
|---|---|---|---|---|
| P1 | no | – | – | – |
"""


@pytest.fixture
def checkout(tmp_path):
  (tmp_path / "docs").mkdir()
  (tmp_path / "docs" / "reproduction.md").write_text(TABLE, encoding="utf-8")
  return tmp_path


@pytest.fixture
def axes():
  return Figure().subplots()


@pytest.fixture(autouse=True)
def closed():
  yield
  pyplot.close("all")


# --- claims ---------------------------------------------------------------------------------------


def test_claims_are_read_with_their_papers(checkout, capsys):
  claims = reproduction.read_claims(checkout)
  assert reproduction.names(claims) == ["S1a", "S1b", "S2", "P1"]
  decided_by = "n_eff: a minus b, +0.1, Holm's p 0.04; margin 0.03"
  assert claims[0] == reproduction.Claim(
    "S1a", "SALT, arXiv 1", "n_eff is low", "found", decided_by,
    "it is [low](a.md), 0.1", "3 seeds", "5 runs",
  )  # fmt: skip
  assert (claims[1].evidence, claims[1].decided_by) == (claims[0].evidence, "")
  assert reproduction.summary(claims) == (
    "SALT, arXiv 1: 1 found, 1 reversed, 1 not tested\nP3O, arXiv 2: 1 reversed"
  )
  reproduction.show_claim(claims, "S1a")
  assert capsys.readouterr().out == (
    f"S1a (SALT, arXiv 1): n_eff is low\nFOUND: {decided_by}\n"
    "it is low, 0.1\n"
    "Conditions: 3 seeds. Queued: 5 runs.\n"
  )
  with pytest.raises(
    ValueError, match=r"no claim 'S9'; choose one of \['S1a', 'S1b', 'S2', 'P1'\]"
  ):
    reproduction.show_claim(claims, "S9")


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    ("| it wins | **reversed** |", "| it wins |", r"7 cells in '\| P1 .*, which needs 8"),
    (
      "| it wins | **reversed** |",
      "| it wins | **won** |",
      "P1 has the verdict 'won'; known verdicts are",
    ),
    ("| P1 | it", "| S2 | it", r"\['S2'\] occur more than once"),
    ("| P1 | no", "| P2 | no", r"\['P1'\] have no evidence"),
    ("| id |", "| name |", r"no table has the columns \['id', 'claim'"),
  ],
)
def test_a_page_that_cannot_be_read_is_named(checkout, old, new, message):
  file = checkout / "docs" / "reproduction.md"
  file.write_text(TABLE.replace(old, new), encoding="utf-8")
  with pytest.raises(ValueError, match=message):
    reproduction.read_claims(checkout)


def test_a_folder_that_is_no_checkout_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"set root to the folder of a checkout"):
    reproduction.read_claims(tmp_path)
  with pytest.raises(FileNotFoundError, match=r"set root to the folder of a checkout"):
    results.files(tmp_path)


def test_the_page_that_is_committed_is_read_in_full():
  assert sorted(reproduction.STYLES) == sorted(page.VERDICTS)
  claims = reproduction.read_claims(ROOT)
  of_claims = dict.fromkeys(name.rstrip("abc") for name in reproduction.names(claims))
  assert tuple(of_claims) == page.IDS
  assert {claim.paper for claim in claims} == set(page.PAPERS.values())


def test_the_committed_outputs_are_those_of_the_present_page():
  expected = reproduction.summary(reproduction.read_claims(ROOT))
  assert expected in notebooks.printed(notebooks.read("results")), (
    "the verdicts have changed: run `python -m colabs.execute colabs/results.ipynb`, and see"
    " whether its last section still holds"
  )


def test_a_claim_has_the_color_of_its_verdict(checkout):
  reproduction.draw_claims(reproduction.read_claims(checkout))
  axes = pyplot.gca()
  assert [to_hex(square.get_edgecolor()) for square in axes.patches] == [
    COLORS[name].lower() for name in ("success", "reference", "failure", "failure")
  ]
  shown = [text.get_text() for text in axes.texts]
  assert shown[:3] == ["SALT, arXiv 1", "S1a", r"$n_\mathrm{eff}$ is low"]
  legend = axes.get_legend()
  assert [text.get_text() for text in legend.get_texts()] == [
    "found (1)", "reversed (2)", "not tested (1)"
  ]  # fmt: skip


# --- runs -----------------------------------------------------------------------------------------


def run(label, seed, values, **fields):
  evaluations = {"updates": [0, 10][: len(values)], "eval/pass@1": values}
  return {"label": label, "seed": seed, "number": 0, "evaluations": evaluations, **fields}


RUNS = [
  run("a", 0, [0.1, 0.2], kl=1.0, curves={"policy/entropy": [[1, 3.0], [9, 1.0]]}),
  run("a", 1, [0.1, 0.4], kl=2.0, train={"loss/ess": [0.5, 0.7]}),
  run("b", 0, [0.1, 0.3], kl=3.0),
  run("b", 1, [0.1, 0.7], kl=None),
  run("c", 1, [0.1, 0.3]),
  run("d", 7, [0.1]),
]


def test_a_number_of_a_run_is_its_last_value_its_measurement_or_its_mean():
  assert results.metrics(RUNS) == ["eval/pass@1", "kl", "loss/ess", "policy/entropy"]
  assert results.value(RUNS[0], "eval/pass@1") == 0.2
  assert results.value(RUNS[1], "kl") == 2.0
  assert results.value(RUNS[0], "policy/entropy") == 2.0
  assert results.value(RUNS[1], "loss/ess") == pytest.approx(0.6)
  assert results.values_by_seed(RUNS, "kl") == {"a": {0: 1.0, 1: 2.0}, "b": {0: 3.0}}
  with pytest.raises(ValueError, match=r"no run has the metric 'x'; choose one of \['eval/pass@1'"):
    results.values_by_seed(RUNS, "x")


def test_differences_have_a_row_for_each_label(axes):
  results.plot_differences(axes, RUNS, "eval/pass@1", "a")
  assert [label.get_text() for label in axes.get_yticklabels()] == [
    "b (2 seeds)", "c (1 seed)", "d (0 seeds)"
  ]  # fmt: skip
  dots = [line.get_xdata() for line in axes.lines if line.get_label() == "seed"]
  np.testing.assert_allclose(dots[0], [0.1, 0.3])
  np.testing.assert_allclose(dots[1], [-0.1])
  assert len(dots[2]) == 0
  (mean,) = [line for line in axes.lines if line.get_label() == "mean of two seeds"]  # of b alone
  np.testing.assert_array_equal(mean.get_xydata(), [[pytest.approx(0.2), 0]])


def test_what_cannot_be_compared_is_named(axes):
  with pytest.raises(ValueError, match=r"no run has the label 'x'; choose one of \['a', 'b'"):
    results.plot_differences(axes, RUNS, "eval/pass@1", "x")
  with pytest.raises(ValueError, match="all runs have the label 'a': add runs of another"):
    results.plot_differences(axes, RUNS, "policy/entropy", "a")
  with pytest.raises(ValueError, match="'a' and 'd' share no seed"):
    results.plot_pairs(axes, RUNS, "eval/pass@1", "a", "d")
  with pytest.raises(ValueError, match=r"label = 'a' is unknown; choose one of \['b', 'c', 'd'\]"):
    results.plot_pairs(axes, RUNS, "eval/pass@1", "a", "a")
  with pytest.raises(ValueError, match=r"\['d'\] have one value of eval/pass@1"):
    results.draw_curves(RUNS, "eval/pass@1", "a", ["d"])
  with pytest.raises(ValueError, match=r"labels = \['a'\]; choose some of \['b', 'c', 'd'\]"):
    results.draw_curves(RUNS, "eval/pass@1", "a", ["a"])


def test_a_pair_is_joined_by_a_line(axes):
  results.plot_pairs(axes, RUNS, "eval/pass@1", "a", "b")
  lines = [line.get_ydata() for line in axes.lines if len(line.get_xdata()) == 2]
  np.testing.assert_array_equal(lines, [[0.2, 0.3], [0.4, 0.7]])
  assert [text.get_text() for text in axes.texts] == ["seed 0", "seed 1"]
  assert axes.get_title() == "difference +0.200, 95 % [-1.071, +1.471]"
  other = Figure().subplots()
  results.plot_pairs(other, RUNS, "eval/pass@1", "a", "c")
  assert other.get_title() == "one seed: no interval"


def test_curves_have_a_panel_for_every_label():
  results.draw_curves(RUNS, "eval/pass@1", "a", ["b", "c"])
  first, second = pyplot.gcf().axes
  assert (first.get_title(), second.get_title()) == ("b", "c")
  means = {line.get_label(): line for line in first.lines if not line.get_label().startswith("_")}
  assert {name: line.get_color() for name, line in means.items()} == {
    "a, 2 seeds": COLORS["plain"], "b, 2 seeds": COLORS["result"]
  }  # fmt: skip
  np.testing.assert_allclose(means["b, 2 seeds"].get_ydata()[[0, -1]], [0.1, 0.5])
  assert len(pyplot.gcf().legends[0].get_texts()) == 2
  results.draw_curves(RUNS, "eval/pass@1", "a", ["b", "c", "b", "c"])
  assert len(pyplot.gcf().axes) == 4  # of two rows of three: no empty panel


def test_files_are_those_that_hold_runs(tmp_path):
  for path, content in (
    ("two/results.json", RUNS), ("two/testbed.json", RUNS[:1]), ("one/results.json", {"0": {}})
  ):  # fmt: skip
    (tmp_path / "experiments" / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "experiments" / path).write_text(json.dumps(content))
  assert results.files(tmp_path) == ["two/results.json", "two/testbed.json"]
  assert results.load(tmp_path, "two/results.json") == RUNS
  assert results.overview(tmp_path).splitlines() == [
    "two/results.json: 6 runs of 4 labels", "    eval/pass@1, kl, loss/ess, policy/entropy",
    "two/testbed.json: 1 runs of 1 labels", "    eval/pass@1, kl, policy/entropy",
  ]  # fmt: skip
  with pytest.raises(ValueError, match=r"file = 'one/results\.json' is unknown; choose one of"):
    results.load(tmp_path, "one/results.json")
  results.draw_file(tmp_path, "kl", "two/results.json")
  assert [label.get_text() for label in pyplot.gca().get_yticklabels()] == ["b (1 seed)"]
