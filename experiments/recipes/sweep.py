"""A short run of every recipe on the quickstart's task, over seeds; see README.md."""

import pathlib

# Recipes of methods name a card. GRPO comes first, because the others are compared with it.
RECIPES = sorted(
  (
    path.stem
    for path in (pathlib.Path(__file__).parents[2] / "configs").glob("*.py")
    if "Card: docs/methods/" in path.read_text(encoding="utf-8")
  ),
  key=lambda name: (name != "grpo", name),
)
RUNS = {name: {"config": f"configs/{name}.py"} for name in RECIPES}
for nats in (0.25, 0.5, 1.0):  # where the initial entropy is small, half of it leaves δ at 1
  advantage = f"fade(target_is_relative=False, target_entropy={nats})"
  RUNS[f"fade, H* = {nats} nats"] = {**RUNS["fade"], "advantage": advantage}


def get_sweep():
  return [
    {"label": label, "seed": seed, "num_updates": 64, **fields}
    for label, fields in RUNS.items()
    for seed in range(3)
  ]
