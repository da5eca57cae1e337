"""A trainer with a fleet of sampling programs, see docs/fleet.md."""

__all__ = [
  "policies",
  "roles",
]
