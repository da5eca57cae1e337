"""Reinforcement learning from verifiable rewards, in JAX, readable end to end."""

__all__ = [
  "advantages",
  "data",
  "evaluate",
  "geometry",
  "losses",
  "models",
  "ops",
  "parts",
  "reweighting",
  "rewards",
  "rollouts",
  "train",
]
__version__ = "0.1.0"


def page(name: str) -> str:
  """The path of a documentation page, such as "costs.md"; the package contains all pages."""
  return f"{__path__[0]}/docs/{name}"
