"""Pure array mathematics: no state, no configuration."""

__all__ = [
  "aggregate",
  "checks",
  "checksums",
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
