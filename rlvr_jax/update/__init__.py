"""One update of the policy as a pure function; `step` is the algorithm and uses the other files."""

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
