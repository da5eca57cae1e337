"""One update of the policy as a pure function: `step` is the algorithm, the rest are its parts."""

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
