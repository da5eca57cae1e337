"""The package's metadata; its version is in rlvr_jax/__init__.py."""

import pathlib
import posixpath
import re
from collections.abc import Callable

import setuptools
from setuptools.command.build_py import build_py

# Lower bounds are what Colab has installed, or else what the tests have passed with: an install
# replaces nothing that works. `make test-lowest` runs them with exactly these.
# transformers before 5.20 lets a problem's text spell a chat template's control tokens; from 5.23
# on `encode_marked_chat`, which encodes replies of environments, has the form that we call.
HF = ["jinja2>=3.1.6", "tokenizers>=0.23.1", "transformers>=5.23"]
GCS = ["gcsfs>=2025.3"]
GGUF = ["gguf>=0.17.1"]  # earlier ones bring sentencepiece
MATH = ["mpmath>=1.3.0"]
OPENENV = ["aiohttp>=3.11"]  # the client; openenv itself brings some 60 packages
PLOT = ["matplotlib>=3.10"]
REASONING_GYM = ["reasoning-gym>=0.1.25"]  # with some 20 packages that nothing else needs

EXTRAS = {
  "tpu": ["jax[tpu]>=0.7.2"],
  "cuda12": ["jax[cuda12]>=0.7.2"],
  "cuda13": ["jax[cuda13]>=0.7.2"],
  "hf": HF,
  "gcs": GCS,
  "gguf": GGUF,
  "math": MATH,
  "openenv": OPENENV,
  "openenv-server": ["openenv>=0.10"],  # tests against the server of openenv
  "trackio": ["trackio>=0.43"],
  "wandb": ["wandb>=0.31"],
  "quantized": ["qwix>=0.1.4"],  # needs flax 0.12; not in dev, for the tests with flax 0.11
  "torch": ["peft>=0.21", "torch==2.13.0"],  # tests against transformers' own networks
  "tunix": ["google-tunix>=0.1.7"],  # its safetensors < 0.8 is too old for hf and dev
  "plot": PLOT,
  "reasoning-gym": REASONING_GYM,  # pip before 23.3 knows a name with hyphens only
  "docs": ["latex2mathml>=3.81", "mkdocs-material>=9.8.1", "mkdocstrings[python]>=1.0.8"],
  "dev": [
    *GCS,
    *GGUF,
    *HF,
    *MATH,
    *OPENENV,
    *PLOT,
    *REASONING_GYM,
    "hypothesis>=6.100",
    "ipykernel>=6.17.1",
    "mypy>=2.4.1",
    "nbclient>=0.10.2",
    "pytest>=8.4",
    "pytest-xdist>=3.8.0",
    "ruff>=0.17.5",
    "sympy>=1.13",  # tests rewrite formulas with it
    "setuptools>=75",  # tests/install_test.py builds the package
  ],
}

HERE = pathlib.Path(__file__).parent
INIT = (HERE / "rlvr_jax" / "__init__.py").read_text(encoding="utf-8")


def description() -> str:
  """The README as an index shows it, where paths of the repository lead nowhere: without them."""
  readme = HERE / "README.md"
  return relinked(readme.read_text(encoding="utf-8"), lambda _: "") if readme.exists() else ""


def relinked(text: str, place: Callable[[str], str]) -> str:
  """A page with other links to files; `place` says where one leads, "" makes it plain text."""

  def link(match: re.Match[str]) -> str:
    path, mark, heading = match[2].partition("#")
    target = place(path)
    return f"[{match[1]}]({target}{mark}{heading})" if target else match[1]

  text = re.sub(r"^!\[.*\]\((?!https:).*\)\n\n", "", text, flags=re.MULTILINE)  # pictures
  return re.sub(r"\[((?:[^][`]|`[^`]*`)+)\]\((?!https?:|#)([^)\s]+)\)", link, text)


class Build(build_py):
  """Pages in the package lead to what it holds: other pages, modules and recipes."""

  def build_package_data(self) -> None:
    super().build_package_data()
    for page in [] if self.editable_mode else (HERE / "rlvr_jax" / "docs").rglob("*.md"):
      folder = page.relative_to(HERE / "rlvr_jax").parent

      def place(path: str, folder: pathlib.PurePath = folder) -> str:
        found = posixpath.normpath(folder / path).removeprefix("rlvr_jax/")  # in the package
        held = (HERE / "rlvr_jax" / found).exists()
        held &= found.endswith(".md") or not found.startswith("docs/")  # only pages are packaged
        return posixpath.relpath(found, folder) if held else ""

      text = relinked(page.read_text(encoding="utf-8"), place)
      built = pathlib.Path(self.build_lib, page.relative_to(HERE))
      built.write_text(text, encoding="utf-8")


setuptools.setup(
  name="rlvr_jax",
  version=re.findall(r'^__version__ = "(.+)"$', INIT, re.MULTILINE)[0],
  description="Reinforcement learning from verifiable rewards, in JAX, readable end to end",
  long_description=description(),
  long_description_content_type="text/markdown",
  author="The rlvr_jax authors",
  license="Apache-2.0",
  license_files=["LICENSE"],
  keywords=["reinforcement learning", "verifiable rewards", "RLVR", "language models", "JAX"],
  classifiers=[
    "Development Status :: 3 - Alpha",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
  ],
  python_requires=">=3.11",
  cmdclass={"build_py": Build},
  packages=setuptools.find_packages(include=["rlvr_jax", "rlvr_jax.*"]),
  package_data={
    "rlvr_jax": ["py.typed", "docs/*.md", "docs/methods/*.md"],
    "rlvr_jax.data": ["chat_templates/*", "tools/*"],
    "rlvr_jax.codejudge": ["README.md"],
    "rlvr_jax.view": ["page.*"],
  },
  entry_points={"console_scripts": ["rlvr_jax = rlvr_jax.console:run"]},
  install_requires=[
    "absl-py>=1.4",
    "array-record>=0.8.1",
    "chex>=0.1.90",
    "flax>=0.11.2",
    "fsspec>=2025.3",
    "grain>=0.2.12",
    "importlib_resources>=6.0",  # tensorflow-datasets imports it and does not always ask for it
    "jax>=0.7.2",
    "ml-collections>=1.1.0",
    "numpy>=2.1",
    "optax>=0.2.7",
    "orbax-checkpoint>=0.12.4",
    "safetensors>=0.6",
    "scipy>=1.15",
    "tensorboardX>=2.6.4",
    "tensorflow-datasets>=4.9.9",
    "tqdm>=4.67",
  ],
  extras_require=EXTRAS,
)
