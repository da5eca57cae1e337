"""Training in float32 and bfloat16, with rollouts of the policy or an 8-bit copy; see README.md."""

from experiments.steps import sweep as steps

CONFIG = "experiments/mu_grpo/config.py:refresh"  # the quickstart in written steps
SEEDS = range(8)
PILOT_SEEDS = (100, 101)  # which no comparison uses
FIELDS = {
  "config": CONFIG,
  "num_updates": 144,
  "batch.group_size": 8,
  "batch.prompts": 16,
  "evaluation.num_samples": 8,
  "evaluation.ks": (1, 8),
  "store.keep_used": False,
}
METHODS = {"GRPO": {}, "P3O": steps.P3O}
TRAINING = ("float32", "bfloat16")
FORMATS = {  # of rollouts → of the copy of the policy that samples them
  "int8 rollouts": "int8",
  "fp8 rollouts": "float8_e4m3fn",
}
CLIPS = (0.2, 0.4, 0.6)  # GRPO's is the first where no label says otherwise
HOT = "temperature 1.2"  # of rollouts; log-probabilities are recorded without it
ANCHORS = "P3O, two anchors"


def label(method: str, training: str = TRAINING[0], rollouts: str = "") -> str:
  """Label of a method, of a dtype to train in, and of a format of rollouts if they have one."""
  return ", ".join(part for part in (method, training, rollouts) if part)


def clip(epsilon: float) -> str:
  """Label of GRPO with a clip, trained in float32."""
  return label("GRPO") if epsilon == CLIPS[0] else label(f"GRPO, ε = {epsilon}")


PRECISION = {  # label → fields
  label(method, training, rollouts): {
    "model.overrides.compute_dtype": training,
    **fields,
    **(steps.quantized(FORMATS[rollouts]) if rollouts else {}),
  }
  for method, fields in METHODS.items()
  for training in TRAINING
  for rollouts in ("", *FORMATS)
}
HARDEST = (TRAINING[1], "fp8 rollouts")  # dtype and rollouts of the paper's claim
CLIPPED = {clip(epsilon): steps.clip(epsilon) for epsilon in CLIPS[1:]}
_TWO = {**METHODS["P3O"], "reference.kl_coefficient": 0.04}
_HOT = steps.temperature(1.2, "raw")
ANCHORED = {
  label(ANCHORS): _TWO,
  f"{label('P3O')}, {HOT}": {**METHODS["P3O"], **_HOT},
  f"{label(ANCHORS)}, {HOT}": {**_TWO, **_HOT},
}
RUNS = {**PRECISION, **CLIPPED, **ANCHORED}
WHY_SEEDS = range(5)
WHY = {  # of what fp8 rollouts do
  label(name, *HARDEST): {**PRECISION[label("GRPO", *HARDEST)], "loss": loss}
  for name, loss in (
    ("GRPO without a clip", "ppo_clip(epsilon_low=1.0, epsilon_high=1e6)"),
    ("P3O's cap", "p3o(kl_term=False)"),
    ("P3O's pull", "p3o(cap='none')"),
  )
}
PILOT = {
  f"pilot, {training}{', fp8' if rollouts else ''}": PRECISION[label("GRPO", training, rollouts)]
  for training in TRAINING
  for rollouts in ("", "fp8 rollouts")
}


def get_sweep():
  """The pilot, then the comparisons, whose outer loop are the seeds."""
  return [
    {"label": name, "seed": seed, **FIELDS, **fields}
    for arms, seeds in ((PILOT, PILOT_SEEDS), (RUNS, SEEDS), (WHY, WHY_SEEDS))
    for seed in seeds
    for name, fields in arms.items()
  ]
