"""A run whose rollouts other programs sample, see docs/fleet.md: what `fleet` needs of a run."""

__all__ = [
  "policies",
  "roles",
]
