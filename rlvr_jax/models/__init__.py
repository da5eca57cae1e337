"""The network, its files and its variants; no other folder of the package imports flax."""

from importlib.metadata import version

__all__ = [
  "describe_import_error",
  "functional",
  "huggingface",
  "lora",
  "memory",
  "presets",
  "transformer",
]


def describe_import_error(flax_version: str, jax_version: str, cause: Exception) -> str:
  """A message, with the remedy, for a flax version that does not work with this jax version."""
  return (
    f"flax {flax_version} cannot be imported with jax {jax_version} ({cause}): a release of flax"
    " supports the jax releases of its time. Install the newest flax for this jax:"
    f" pip install --upgrade flax jax=={jax_version}"
  )


try:
  import flax.nnx  # noqa: F401
except (AttributeError, ImportError) as error:
  raise ImportError(describe_import_error(version("flax"), version("jax"), error)) from error
