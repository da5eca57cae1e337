"""What trainer and samplers of a fleet write into the workdir for each other; no jax."""

__all__ = [
  "leases",
  "records",
]
