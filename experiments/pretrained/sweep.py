"""Sums by a small pretrained model, over seeds, and its controls; see README.md."""

RUNS = {
  "pretrained": {},
  "control: rewards permuted": {"permute_rewards": True},
  # What the format alone gives: two solved examples in the prompt, no update.
  "control: two examples": {
    "prompts.template": "experiments/pretrained/two_examples.jinja",
    "max_prompt_length": 96,
    "num_updates": 0,
  },
}


def get_sweep():
  runs = [
    {"label": label, "seed": seed, "config": "configs/pretrained.py", **fields}
    for label, fields in RUNS.items()
    for seed in range(3)
  ]
  # Evaluations have one seed of their own: without updates all runs are alike.
  return [run for run in runs if run.get("num_updates") != 0 or run["seed"] == 0]
