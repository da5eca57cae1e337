"""The policies and samplers of a run, and their comparison with the trainer."""

__all__ = [
  "agreement",
  "policies",
  "printing",
  "raw_logprobs",
  "samplers",
  "scoring",
]
