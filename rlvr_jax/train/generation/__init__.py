"""Samples, grades and scores the batches that updates train on."""

__all__ = [
  "agreement",
  "async_generator",
  "dynamic_sampling",
  "generator",
  "modes",
  "new_weights",
  "on_demand",
  "policies",
  "raw_logprobs",
  "scoring",
  "streams",
]
