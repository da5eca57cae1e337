"""What samples for a run: its policies and samplers, and their comparison with the trainer."""

__all__ = [
  "agreement",
  "policies",
  "printing",
  "raw_logprobs",
  "samplers",
  "scoring",
]
