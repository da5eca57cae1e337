"""Samples, grades and scores the batches that updates train on."""

__all__ = [
  "async_generator",
  "generator",
  "raw_logprobs",
  "scoring",
  "streams",
]
