"""What the notebooks in colabs/ call besides the package: tiny runs, a toy policy, and rollouts."""

__all__ = ["methods", "rollouts", "runs", "toy"]
