"""One update of the policy as a pure function: `step` is the algorithm, other files its parts."""

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
