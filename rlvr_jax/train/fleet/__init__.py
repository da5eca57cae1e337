"""A trainer with a fleet of samplers, which are processes of their own; see docs/fleet.md."""

__all__ = [
  "policies",
  "roles",
]
