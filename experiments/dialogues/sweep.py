"""The game of guessing by GRPO and by FADE, five seeds each; see README.md."""

NUM_UPDATES, EVALUATED_EVERY = 80, 20
RUNS = {"GRPO": {}, "FADE": {"advantage": "fade"}}  # label → fields of the configuration


def get_sweep():
  return [
    {
      "label": label,
      "seed": seed,
      "num_updates": NUM_UPDATES,
      "evaluation.every": EVALUATED_EVERY,
      **fields,
    }
    for seed in range(5)
    for label, fields in RUNS.items()
  ]
