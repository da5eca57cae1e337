"""One update of the policy as a pure function, `step.train_step`, and functions around it."""

__all__ = [
  "accumulate",
  "agreement",
  "diagnostics",
  "learning_rate",
  "objective",
  "optimizer",
  "step",
  "supervised",
]
