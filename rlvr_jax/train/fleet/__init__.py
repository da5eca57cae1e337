"""Training and sampling as separate programs that meet in the workdir; see docs/staleness.md."""

__all__ = [
  "board",
  "desk",
  "generation",
  "policies",
  "roles",
  "sampler",
]
