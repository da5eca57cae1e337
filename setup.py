"""Package metadata. Commands are run from a checkout: pip install -e ".[dev,plot]"."""

import pathlib

import setuptools

EXTRAS = {
  "tpu": ["jax[tpu]>=0.10.2"],
  "cuda13": ["jax[cuda13]>=0.10.2"],
  "hf": ["jinja2>=3.1.6", "tokenizers>=0.22", "transformers>=5.23.0"],
  "gcs": ["gcsfs>=2026.9.0"],
  "math": ["math-verify>=0.9.0"],
  "torch": ["peft>=0.21", "torch==2.13.0"],  # tests against transformers' own networks
  "plot": ["matplotlib>=3.11.2"],
  "dev": [
    "hypothesis>=6.170.15",
    "ipykernel>=7.4.0",
    "jinja2>=3.1.6",
    "math-verify>=0.9.0",
    "matplotlib>=3.11.2",
    "mypy>=2.4.1",
    "nbclient>=0.11.0",
    "pytest>=9.2.0",
    "pytest-xdist>=3.8.0",
    "ruff>=0.17.5",
    "safetensors>=0.8.0",
    "tokenizers>=0.22",
    "transformers>=5.23.0",
  ],
}

README = pathlib.Path(__file__).parent / "README.md"

setuptools.setup(
  name="rlvr_jax",
  version="0.1.0",
  description="Reinforcement learning from verifiable rewards, in JAX, readable end to end",
  long_description=README.read_text(encoding="utf-8") if README.exists() else "",
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=setuptools.find_packages(include=["rlvr_jax", "rlvr_jax.*"]),
  package_data={"rlvr_jax": ["py.typed"]},
  install_requires=[
    "absl-py>=2.5.1",
    "array-record>=0.8.2",
    "chex>=0.1.92",
    "flax>=0.12.8",
    "fsspec>=2026.9.0",
    "grain>=0.2.18",
    "importlib_resources>=7.1.0",  # tensorflow-datasets imports it and does not always ask for it
    "jax>=0.10.2",
    "ml-collections>=1.1.0",
    "numpy>=2.4.6",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "qwix>=0.1.8",
    "reasoning-gym>=0.1.25",
    "scipy>=1.15",
    "tensorboardX>=2.6.5",
    "tensorflow-datasets>=4.9.10",
    "tqdm>=4.70.1",
  ],
  extras_require=EXTRAS,
)
