"""docs/reproduction.md: every claim once, no number of a result written by hand, up to date."""

import collections
import functools
import importlib
import json
import re
import statistics
import subprocess

import pytest
from matplotlib.figure import Figure
from scipy import stats

from docs import deciding, reproduction
from docs import runs as committed
from docs.verdicts import IN_SHORT, VERDICTS_BY_ID
from experiments import evidence, full_size
from experiments.large_ratios.sweep import LOWER, SUFFIX, longer
from experiments.low_precision import sweep as low_precision
from experiments.p3o_mismatch import config as p3o_config
from experiments.p3o_mismatch import sweep as p3o_sweep
from experiments.p3o_mismatch import testbed as p3o_testbed
from experiments.testbed import config as testbed_config
from experiments.testbed import report
from experiments.testbed.arms import SEEDS, committed_runs
from rlvr_jax.ops import caches

# Digits that are conditions, not results: they are of the arms, the claims and the methods.
CONDITION = re.compile(
  r"\b[GUS] = \d+|[εκμα] = [\d.]+|pass@\d+|α is 0\b|above 1\b|α fixed at [01]|int8|fp8|bf(loat)?16"
  r"|float32|(temperature|bonus of|rise of|lag) [\d.]+|95 %|1024|256 rollouts|\[0, 5\]|of (a )?7B"
  r"|\b[SPFM]\d\b|P3O|\b[36]0 s\b|160 updates|256 updates|rate of \de-\d|up to 15"
)
PAGE = reproduction.PAGE.read_text(encoding="utf-8")
_P3O = committed.results("p3o_mismatch")
SETTINGS = tuple(p3o_sweep.SETTINGS)


def test_the_page_is_up_to_date():
  assert reproduction.page() == PAGE, f"write it by: {reproduction.COMMAND}"


ROWS = [row for name, known in VERDICTS_BY_ID.items() for row in known.rows(name)]


def test_every_claim_is_on_the_page_once():
  assert len(reproduction.IDS) == 26
  assert sorted(VERDICTS_BY_ID) == sorted(reproduction.IDS)
  rows = re.findall(r"^\| ([SPFM]\d+[a-z]?) \|", PAGE, re.MULTILINE)
  assert sorted(rows) == sorted([*ROWS, *reproduction.IDS])  # the verdicts, and the evidence
  assert set(deciding.DECIDED_BY) <= set(ROWS)


def test_what_a_reader_is_told_first_has_ten_lines_and_counts_the_verdicts():
  title, summary, after, *_ = PAGE.split("\n\n")
  assert title == "# Reproduction" and "earlier sampler" in after
  assert len(summary.splitlines()) == 10
  for said in ("**Tried on**", "held**", "did not**", "**Nobody may conclude**"):
    assert said in summary
  (counts,) = re.findall(r"44 parts of 26 claims\*\*: (.*)\.", summary)
  shown = {verdict: int(n) for n, verdict in (x.split(" ", 1) for x in counts.split(", "))}
  cells = re.findall(r"^\| [SPFM]\d+[a-z]? \| .*? \| \*\*(.*?)\*\* \|", PAGE, re.MULTILINE)
  assert shown == collections.Counter(cells) and sum(shown.values()) == 44


@pytest.mark.parametrize("name", reproduction.IDS)
def test_a_verdict_has_its_evidence(name):
  verdict = VERDICTS_BY_ID[name]
  rows = verdict.rows(name)
  assert {reproduction.verdict_of(row, verdict) for row in rows} <= reproduction.VERDICTS.keys()
  assert verdict.evidence.count("{}") == len(verdict.values)
  assert not re.findall(r"\d", CONDITION.sub("", verdict.evidence)), "a result written by hand"
  assert set(verdict.arms) <= set(evidence.FIRST) | set(evidence.REST)
  if rows.keys() & deciding.DECIDED_BY.keys():
    assert verdict.values and verdict.conditions and verdict.link


def test_each_paper_has_its_summary_without_results():
  assert IN_SHORT.keys() == reproduction.PAPERS.keys()
  for text in IN_SHORT.values():
    assert text in PAGE and not re.findall(r"\d", CONDITION.sub("", text))


def test_a_result_written_by_hand_is_seen():
  for text in ("PR is 11.6", "it rises by 0.04", "in 3 of 5 seeds"):
    assert re.findall(r"\d", CONDITION.sub("", text))


def run(label, seed, last):
  evaluations = {"updates": [0, 10], "eval/pass@1": [0.25, last]}
  return {"label": label, "seed": seed, "evaluations": evaluations}


def test_values_are_those_of_the_runs():
  found = {
    "a": [run("a", seed, 0.5 + 0.1 * seed) for seed in range(3)],
    "b": [run("b", seed, 0.4 + 0.1 * seed) for seed in range(3)],
  }
  final = lambda result: result["evaluations"]["eval/pass@1"][-1]
  assert reproduction.paired(found, "a", "b", final) == "+0.100"  # an interval without width
  found["a"][2] = run("a", 2, 0.72)
  assert reproduction.paired(found, "a", "b", final) == "+0.107 [+0.078, +0.135]"
  assert reproduction.paired(found, "a", "b", final, 5) == "+0.10667 [+0.07798, +0.13535]"
  found["a"][2] = run("a", 2, 0.7)
  assert reproduction.mean(found["a"], final) == "0.6 ± 0.2"
  with pytest.raises(ValueError, match="share fewer than two seeds"):
    reproduction.paired({"a": found["a"][:1], "b": found["b"][1:]}, "a", "b", final)


def settings(recipe):
  """What the page says of a recipe: KL term, average of the loss, updates per refresh."""
  config = importlib.import_module(f"rlvr_jax.configs.{recipe}").get_config()
  return config.reference.kl_coefficient > 0, config.aggregation, config.schedule


def test_f3_names_what_the_quickstart_recipes_differ_in():
  evidence = VERDICTS_BY_ID["F3"].evidence
  assert "that recipe alone has a KL term, and averages the loss by response" in evidence
  assert settings("grpo") == (True, "sequence_mean", "updates_per_refresh")
  for recipe in ("fade", "pass_at_k"):
    assert settings(recipe) == (False, "token_mean", "updates_per_refresh")
  assert "μ = 1" in VERDICTS_BY_ID["F3"].conditions


def test_p3_names_what_the_int8_runs_differ_in():
  """Their policy computes in bfloat16, from the warm start on; no other setting changes it."""
  evidence = VERDICTS_BY_ID["P3"].evidence
  assert "int8 rollouts and a policy that computes in bfloat16, warm start included," in evidence
  assert "in written steps the warm start is in bfloat16 too" in evidence
  dtype = "model.overrides.compute_dtype"
  found = {name: fields.get(dtype) for name, (_, fields) in p3o_sweep.SETTINGS.items()}
  assert found.pop("int8 rollouts") == "bfloat16" and set(found.values()) == {None}
  starts = {
    name: [r["evaluations"]["eval/pass@1"][0] for r in _P3O[f"{name}: P3O"]] for name in SETTINGS
  }
  assert starts.pop("int8 rollouts") != starts["matched"]
  assert all(start == starts["matched"] for start in starts.values())
  of_steps = {**p3o_testbed.CLAIMS, **p3o_testbed.ABLATIONS}
  assert dtype not in of_steps["P3O, fp8 rollouts"]
  assert "P3O, fp8 rollouts, bf16 training" in VERDICTS_BY_ID["P3"].arms


def test_p5_and_p1_name_a_baseline_that_lags():
  """Rollouts of a baseline with four updates per refresh are up to three updates old."""
  assert "without lag" not in PAGE and "the policy's own" not in VERDICTS_BY_ID["P1"].evidence
  on_steps = testbed_config.get_config().schedule
  on_quickstart = p3o_config.get_config("grpo,refresh").schedule
  assert on_steps == on_quickstart == "updates_per_refresh(batches=4)"
  ess = {name: [r["ess"] for r in _P3O[f"{name}: GRPO, ε = 0.2"]] for name in SETTINGS}
  assert all(a < b for a, b in zip(ess["matched"], ess["lag 1"], strict=True))
  assert "minus its on-policy run" in VERDICTS_BY_ID["P5"].evidence


def test_what_decides_a_claim_is_not_queued():
  """Both sides of a comparison on `steps` are among the first arms, which have all their seeds."""
  on_steps = [c for c in deciding.DECIDED_BY.values() if c.regime.startswith("`steps`")]
  arms = {side.name for comparison in on_steps for side in (comparison.arm, comparison.control)}
  assert arms and arms <= set(evidence.FIRST)
  assert reproduction.queued(list(evidence.FIRST), committed_runs()) == 0


def test_f1_is_over_the_complete_run():
  """An independent computation from the committed spans, of success-heavy against GRPO and FADE."""
  runs = json.loads((committed.EXPERIMENTS / "fade" / "testbed.json").read_text("utf-8"))
  entropy = {
    (r["label"], r["seed"]): sum(r["train"]["policy/entropy"]) / report.SPANS for r in runs
  }
  for baseline, expected in (
    ("GRPO", (-0.00137, -0.00201, -0.00072)),
    ("FADE", (-0.00159, -0.00196, -0.00123)),
  ):
    gaps = [entropy["success-heavy", s] - entropy[baseline, s] for s in SEEDS]
    mean = statistics.mean(gaps)
    half = 2.776445 * statistics.stdev(gaps) / len(gaps) ** 0.5  # t of 4 degrees of freedom
    assert [round(x, 5) for x in (mean, mean - half, mean + half)] == list(expected)
    assert max(gaps) < 0
    text = "{:+.5f} [{:+.5f}, {:+.5f}]".format(*expected)
    assert f"{text}, with 5 of 5" in VERDICTS_BY_ID["F1"].evidence.format(
      *VERDICTS_BY_ID["F1"].values
    )


@pytest.mark.parametrize("name", deciding.DECIDED_BY)
def test_what_decides_a_claim_is_of_committed_runs(name):
  """Its cells and its verdict are those of an independent computation."""
  comparison = deciding.DECIDED_BY[name]
  arm, control, margin = comparison.arm, comparison.control, comparison.margin
  gaps = [
    arm.by_seed.get(seed, arm.number) - control.by_seed.get(seed, control.number)
    for seed in (arm.by_seed or control.by_seed)
    if seed in (control.by_seed or arm.by_seed)
  ]
  compared, number, *_ = deciding.describe(comparison)
  assert f"*{arm.name}* minus *{control.name}*" in compared  # the control that is named
  shown = [float(x) for x in re.findall(r"[+-]\d+\.\d+", number)]
  digits = 0.0006 if margin < 1 else 0.06
  if len(gaps) < deciding.FEWEST_SEEDS:  # no interval of two seeds
    assert shown == pytest.approx(gaps, abs=digits) and "[" not in number
    assert deciding.verdict(comparison) == "undecided"
    return
  mean, half = statistics.mean(gaps), stats.t.ppf(0.975, len(gaps) - 1) * stats.sem(gaps)
  low, high = mean - half, mean + half
  assert shown == pytest.approx([mean, low, high], abs=digits)
  if comparison.claimed == "more":
    expected = "found" if low > 0 else "reversed" if high < 0 else "undecided"
    if -margin < low and high < margin:
      expected = "excluded beyond the margin"
  elif comparison.claimed == "not less":
    expected = "found" if low > -margin else "reversed" if high < -margin else "undecided"
  else:
    assert comparison.claimed == "equal" and low < -margin < 0 < margin < high
    expected = "undecided"
  assert deciding.verdict(comparison) == expected


PLANNED = {  # row of a plan → labels of the runs that it came before, if not those of the two arms
  "S5": tuple(f"{method}, G = {size}" for method in ("SALT", "GRPO") for size in (64, 4)),
  "P4": ("P3O, float32", *map(low_precision.clip, low_precision.CLIPS)),
  "M1, vetoed": (longer(SUFFIX),),  # what it is compared with had run before, as the plan says
}


def test_margins_were_committed_before_the_runs():
  """The plan, at the commit of each of the runs, has the row, its arms, direction and margin."""
  planned = {name: c for name, c in deciding.DECIDED_BY.items() if c.plan}
  experiments = {c.plan.partition(" ")[0] for c in planned.values()}
  assert experiments == {
    *("large_ratios", "high_entropy", "sampled_feature", "other_samplers", "low_precision")
  }
  for comparison in planned.values():
    experiment, _, row_name = comparison.plan.partition(" ")
    runs = committed.results(experiment)
    arm, control = comparison.arm.name, comparison.control.name
    labels = PLANNED.get(row_name, (arm, control))
    for commit in {run["commit"] for label in labels for run in runs[label]}:
      page = page_at(commit, f"experiments/{experiment}/README.md")
      plan = page.partition("written before any run")[2].partition("## Results")[0]
      (row,) = [line for line in plan.splitlines() if line.startswith(f"| {row_name} |")]
      of_arm, of_control = (side.removesuffix(f", rate {LOWER}") for side in (arm, control))
      assert any(
        re.search(rf"\b{re.escape(x)} less {re.escape(y)}( is |, in )", row)
        for x, y in ((of_arm, of_control), (of_arm, "static"), ("static", of_control))
      )
      margin = f"{comparison.margin:g}"
      bound = "above 0" if comparison.claimed == "more" else f"above −{margin}"
      assert bound in row
      assert re.search(rf"\| {margin} .*\|$|\| {margin} \|$", row) or (
        f"The difference that would matter is {margin}" in plan
      )


def test_a_swapped_or_wider_plan_is_seen(monkeypatch):
  first = deciding.DECIDED_BY["P1"]
  for changed in (
    first._replace(arm=first.control, control=first.arm),
    first._replace(margin=0.2),
    first._replace(claimed="more"),
    first._replace(plan="large_ratios M1, rate 6e-4"),
  ):
    monkeypatch.setitem(deciding.DECIDED_BY, "P1", changed)
    with pytest.raises(AssertionError):
      test_margins_were_committed_before_the_runs()


@functools.cache
def page_at(commit, path):
  """A file at a commit; skips the test where the checkout has no such commit."""
  command = ["git", "show", f"{commit}:{path}"]
  found = subprocess.run(
    command, cwd=committed.EXPERIMENTS, capture_output=True, text=True, check=False
  )
  if found.returncode:
    pytest.skip(f"this checkout has no commit {commit[:8]}")
  return found.stdout


def test_a_comparison_of_three_seeds_has_an_interval_and_a_verdict():
  first = deciding.Side("a", {0: 0.50, 1: 0.55, 2: 0.63})
  second = deciding.Side("b", {0: 0.40, 1: 0.45, 2: 0.50, 7: 0.9})
  comparison = deciding.Comparison("pass@1", first, second, "more", 0.03, "a task")
  assert deciding.describe(comparison) == [
    "pass@1: *a* minus *b*", "+0.110 [+0.067, +0.153], 3 seeds", "0.03, set later", "a task"
  ]  # fmt: skip
  assert deciding.verdict(comparison) == "found"
  swapped = comparison._replace(arm=second, control=first, plan="x/README.md")
  assert deciding.verdict(swapped) == "reversed" and deciding.describe(swapped)[2] == "0.03"
  two = comparison._replace(arm=deciding.Side("a", {0: 0.5, 1: 0.55}))
  assert deciding.describe(two)[1] == "+0.100 and +0.100, 2 seeds"
  assert deciding.verdict(two) == "undecided"
  constant = comparison._replace(control=deciding.Side("0.5", {}, 0.5))
  assert list(deciding.differences(constant).values()) == pytest.approx([0, 0.05, 0.13])


def test_a_figure_has_the_differences_in_margins():
  first = deciding.DECIDED_BY["S2c"]  # of eight seeds
  of_two = {seed: first.arm.by_seed[seed] for seed in (0, 1)}
  decided = {"S2": first, "two": first._replace(arm=deciding.Side("two seeds", of_two))}
  axes = Figure().subplots()
  deciding.plot(axes, decided)
  assert [label.get_text() for label in axes.get_yticklabels()] == ["S2: pass@1", "two: pass@1"]
  dots = [line.get_xdata() for line in axes.lines if line.get_marker() == "o"]
  for comparison, shown in zip(decided.values(), dots, strict=True):
    gaps = deciding.differences(comparison).values()
    assert list(shown) == pytest.approx([gap / comparison.margin for gap in gaps])
  (bar,) = axes.containers  # two seeds have no interval
  found = deciding.interval(decided["S2"])
  (segment,) = bar.lines[2][0].get_segments()
  assert [*bar.lines[0].get_xdata(), *segment[:, 0]] == pytest.approx(
    [x / 0.03 for x in (found.mean, found.low, found.high)]
  )
  assert all(reproduction.figure(prefix).exists() for prefix in reproduction.PAPERS)


def test_a_claim_keeps_to_the_paper():
  assert "across prompts" in VERDICTS_BY_ID["S6"].claim
  assert "have not been measured" in VERDICTS_BY_ID["S6"].evidence


def test_s5_and_s10_have_the_alpha_of_each_group_size():
  runs = json.loads((committed.EXPERIMENTS / "salt_geometry/results.json").read_text("utf-8"))
  found = {}
  for r in runs:
    if re.fullmatch(r"SALT, G = \d+", r["label"]):
      alphas = [alpha for _, alpha in r["curves"]["reweighting/alpha"]]
      found.setdefault(int(r["label"].split()[-1]), []).append(statistics.mean(alphas))
  assert all(min(found[size]) > 0 for size in (4,)) and max(found[8]) > 0
  assert all(max(found[size]) == 0 for size in (16, 32, 64))
  four, eight, larger = VERDICTS_BY_ID["S10"].values[5:8]
  assert four.startswith(f"{statistics.mean(found[4]):.3g} ±") and larger == "0"
  assert eight.startswith(f"{statistics.mean(found[8]):.3g} ±")
  assert "every G" not in PAGE


def test_the_adjusted_p_is_of_all_comparisons_that_decide():
  """An independent computation: the k-th smallest of m times m − k + 1, and never falling."""
  p = {}
  for name, comparison in deciding.DECIDED_BY.items():
    gaps = list(deciding.differences(comparison).values())
    p[name] = stats.ttest_1samp(gaps, 0.0).pvalue
  expected, least = {}, 0.0
  for rank, name in enumerate(sorted(p, key=p.get)):
    least = max(least, min(1.0, p[name] * (len(p) - rank)))
    expected[name] = least
  assert deciding.holm_p(deciding.DECIDED_BY) == pytest.approx(expected)
  for name, value in expected.items():
    (row,) = [
      line for line in PAGE.splitlines() if line.startswith(f"| {name} | ") and "**" in line
    ]
    assert f" seeds | {value:.2g} | " in row


def test_a_comparison_without_an_interval_is_not_counted_by_holm():
  first = deciding.DECIDED_BY["S2c"]
  two = first._replace(arm=deciding.Side("two", {0: 0.5, 1: 0.5}))
  alone = deciding.holm_p({"S2c": first})
  assert alone == {"S2c": deciding.interval(first).p}
  assert deciding.holm_p({"S2c": first, "two": two}) == alone


def test_only_pages_that_have_holm_s_p_are_said_to():
  of_steps = ["fade/README.md", "together/README.md"]
  of_steps += [f"{name}/TESTBED.md" for name in ("salt_geometry", "p3o_mismatch", "mu_grpo")]
  of_quickstart = [f"{name}/README.md" for name in ("salt_geometry", "p3o_mismatch", "mu_grpo")]
  has = {
    name: "p, Holm" in (committed.EXPERIMENTS / name).read_text("utf-8")
    for name in (*of_steps, *of_quickstart, "recipes/README.md")
  }
  assert {name for name, holm in has.items() if holm} == set(of_steps)
  assert "The pages of the runs on `steps` have Holm's p" in PAGE


def test_what_has_finished_is_no_longer_queued(tmp_path):
  assert reproduction.queued(["GRPO", "P3O"], set()) == 2 * len(SEEDS)
  (tmp_path / "fade").mkdir()
  (tmp_path / "fade" / "testbed.json").write_text(json.dumps([run("GRPO", 0, 0.5)]))
  done = committed_runs(tmp_path)
  assert done == {("GRPO", 0)} and reproduction.queued(["GRPO"], done) == len(SEEDS) - 1
  assert reproduction.hours(12) == "1.0"


def test_hours_on_hardware_are_those_of_the_compiled_programs():
  assert full_size.BURST == caches._STEPS
  path = full_size.COSTS / "gsm8k_qwen25_15b_lora" / "costs_v5e_1x1.json"
  report = json.loads(path.read_text(encoding="utf-8"))
  update, burst = (max(report["costs"][x]["seconds"].values()) for x in ("update", "generation"))
  assert (
    report["conditions"]["prompts"] * report["conditions"]["group_size"]
  ) == full_size.ROLLOUTS
  expected = 192 * (update + 2 * 32 * burst) * 3 / 3600  # 256 rollouts in 128 slots
  assert full_size.hours("gsm8k_qwen25_15b_lora", "v5e_1x1") == pytest.approx(expected)


def test_the_arms_on_hardware_have_their_rollouts():
  listed = full_size.get_sweep()
  assert len(listed) == 1 + 3 * len(evidence.CLAIMS)
  large = [fields for fields in listed if fields["label"] == "GRPO, G = 32"]
  assert [fields["batch.prompts"] * fields["batch.group_size"] for fields in large] == 3 * [256]
  stages = [fields for fields in listed if fields["label"] == "suffix, μ = 96"]
  assert stages[0]["schedule"] == "stages(count=2)" and stages[0]["num_updates"] == 192
