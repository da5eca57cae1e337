"""A short run of every recipe on the quickstart's task, over seeds, one run at a time.

  python -m experiments.recipes.run --seeds=3

Run it from the repository root; 20 to 40 seconds a run on two CPU cores. Prints the table of
README.md, and writes results.json beside this file. Finished runs are not repeated.
"""

from __future__ import annotations

import pathlib

from absl import app, flags

from experiments.runs import RECIPES, interval, mean_and_half_width, run_all, write_results

RUNS = {name: [f"--config=configs/{name}.py"] for name in RECIPES}
for nats in (0.25, 0.5, 1.0):  # where the initial entropy is small, half of it leaves δ at 1
  RUNS[f"fade, H* = {nats} nats"] = [
    *RUNS["fade"],
    f"--config.advantage=fade(target_is_relative=False, target_entropy={nats})",
  ]
HERE = pathlib.Path(__file__).parent

_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds 0, 1, ... of each recipe.", lower_bound=2)
_UPDATES = flags.DEFINE_integer("updates", 64, "Updates of each run.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", "runs/experiment_recipes", "Holds the runs' workdirs.")


def standard_error(result: dict, index: int) -> float:
  """Of one evaluation, from its 95 % interval."""
  return (result["high"][index] - result["low"][index]) / (2 * 1.96)


def rise_in_standard_errors(result: dict) -> float:
  """How far the end lies above the start; the two evaluations taken as independent."""
  error = (standard_error(result, 0) ** 2 + standard_error(result, -1) ** 2) ** 0.5
  return (result["pass@1"][-1] - result["pass@1"][0]) / error


def table(results: list[dict]) -> str:
  """Markdown: one row per recipe, one column per seed, the mean rise with its t interval."""
  seeds = sorted({r["seed"] for r in results})
  first = [r for r in results if r["label"] == RECIPES[0]]
  ends = " | ".join(f"end, seed {seed}" for seed in seeds)
  lines = [
    f"| recipe | {ends} | mean rise | smallest rise, standard errors | seconds |",
    "|---" * (len(seeds) + 4) + "|",
    "| start, all | " + " | ".join(interval(r, 0) for r in first) + " | | | |",
  ]
  for label in RUNS:
    of_recipe = [r for r in results if r["label"] == label]
    mean, half = mean_and_half_width([r["pass@1"][-1] - r["pass@1"][0] for r in of_recipe])
    smallest = min(rise_in_standard_errors(r) for r in of_recipe)
    seconds = sum(r["seconds"] for r in of_recipe) / len(of_recipe)
    lines.append(
      f"| {label} | {' | '.join(interval(r, -1) for r in of_recipe)}"
      f" | {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}] | {smallest:.1f} | {seconds:.0f} |"
    )
  return "\n".join(lines)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  shorter = [f"--config.num_updates={_UPDATES.value}"]
  runs = {label: [*recipe, *shorter] for label, recipe in RUNS.items()}
  root = pathlib.Path(_WORKDIR.value)
  results = run_all(runs, root, num_seeds=_SEEDS.value, same_warm_start=True)
  write_results(HERE / "results.json", results)
  print(table(results))


if __name__ == "__main__":
  app.run(main)
