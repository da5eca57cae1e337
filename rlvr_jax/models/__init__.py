"""The network, its files and its variants; the only room that imports flax."""

from importlib.metadata import version

__all__ = [
  "cannot_import",
  "functional",
  "huggingface",
  "lora",
  "memory",
  "presets",
  "transformer",
]


def cannot_import(flax_version: str, jax_version: str, cause: Exception) -> str:
  """A message for a flax that this version of jax cannot support, with the remedy."""
  return (
    f"flax {flax_version} cannot be imported with jax {jax_version} ({cause}): a release of flax"
    " goes with the releases of jax of its time. Take the newest flax for this jax:"
    f" pip install --upgrade flax jax=={jax_version}"
  )


try:
  import flax.nnx  # noqa: F401
except (AttributeError, ImportError) as error:
  raise ImportError(cannot_import(version("flax"), version("jax"), error)) from error
