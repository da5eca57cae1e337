"""P3O and GRPO where half of the rollouts are another model's, larger or equal; see README.md."""

from rlvr_jax.commands.sweep import Run

CONFIG = "experiments/p3o_mismatch/config.py"
SEEDS = range(8)
UPDATES = 80
LARGER, EQUAL = "larger model", "equal model"  # the other models, trained before
OTHER_SEED = 1000  # which no comparison uses
OTHERS = {  # label → fields
  LARGER: {"config": "configs/quickstart.py"},
  EQUAL: {"config": f"{CONFIG}:grpo,refresh", "num_updates": UPDATES},
}
METHODS = {"GRPO": "grpo", "P3O": "p3o"}  # label → method of the configuration


def half_from(model: str, method: str) -> str:
  """Label of a method with half of the rollouts from another model."""
  return f"{method}, half from the {model}"


def _half(model: str) -> dict[str, object]:
  folder = Run(model, OTHER_SEED, ()).name
  return {
    "sources.checkpoint.fraction": 0.5,
    "sources.checkpoint.workdir": f"{{workdir}}/{folder}",
  }


RUNS = {  # label → fields
  label: {
    "config": f"{CONFIG}:{name},refresh",
    "num_updates": UPDATES,
    "evaluation.every": 10,
    **fields,
  }
  for method, name in METHODS.items()
  for label, fields in {
    method: {},
    **{half_from(model, method): _half(model) for model in OTHERS},
  }.items()
}


def get_sweep():
  """The other models, then the comparison, whose outer loop are the seeds."""
  others = [{"label": label, "seed": OTHER_SEED, **fields} for label, fields in OTHERS.items()]
  compared = [
    {"label": label, "seed": seed, **fields} for seed in SEEDS for label, fields in RUNS.items()
  ]
  return others + compared
