"""GRPO, GSPO and P3O on a mixture, with routes recomputed and replayed; see README.md."""

CONFIG = "experiments/mixtures/config.py"
METHODS = {"GRPO": "grpo", "GSPO": "gspo", "P3O": "p3o"}
LAGS = (0, 8)
ROUTINGS = ("recomputed", "replayed")
SEEDS = range(5)


def label(method: str, lag: int, routing: str) -> str:
  return f"{method}, lag {lag}, {routing}"


RUNS = {  # label → fields of the configuration
  label(method, lag, routing): {
    "config": f"{CONFIG}:{name}",
    "schedule": f"fixed_lag(lag={lag})",
    "model.routing": routing,
  }
  for lag in LAGS
  for method, name in METHODS.items()
  for routing in ROUTINGS
}


def get_sweep():
  """Seeds are the outer loop, so that an early end leaves fewer seeds, not fewer arms."""
  return [
    {"label": label, "seed": seed, **fields} for seed in SEEDS for label, fields in RUNS.items()
  ]
