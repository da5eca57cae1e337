"""The quickstart, its control and a longer warm start, over seeds; see README.md."""

RUNS = {
  "quickstart": {"config": "configs/quickstart.py"},
  "control: rewards permuted": {"config": "configs/quickstart_control.py"},
  "longer warm start, same time": {"config": "configs/quickstart_longer_warm_start.py"},
  "longer warm start, best length": {  # chosen by held-out pass@1, in its favor
    "config": "configs/quickstart_longer_warm_start.py",
    "warm_start.num_steps": 350,
  },
}


def get_sweep():
  return [
    {"label": label, "seed": seed, **fields} for label, fields in RUNS.items() for seed in range(3)
  ]
