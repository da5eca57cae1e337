"""Helpers for the notebooks in colabs/: tiny runs, a toy policy, and rollouts."""

__all__ = ["methods", "rollouts", "runs", "toy"]
