"""Pure array mathematics: no state, no configuration."""

__all__ = [
  "aggregate",
  "checks",
  "keys",
  "kl",
  "logprobs",
  "masked",
  "overlong",
  "ratios",
  "reductions",
  "spectral",
  "veto",
]
