"""Starts a run: as processes on this machine, on TPU VMs, or on GKE through xpk.

The guide is docs/launch.md. This package works without jax: it imports only the standard library
and nothing else of rlvr_jax.
"""

__all__ = [
  "local",
  "tpu_vm",
  "xpk",
]
