"""The description of a published data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import tensorflow_datasets as tfds

from rlvr_jax.data.published.rows import Record, Row

# The layouts in which a split is published, each a tuple of names of files, all of which are read.
# Names are relative to data_dir and have no format. A name that ends in "/" is a folder, all of
# whose files are read; "/" is data_dir itself.
Layouts = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(eq=False, kw_only=True)
class Dataset(tfds.core.BuilderConfig):
  """Description of a published data set: its files, and how a row becomes a problem."""

  # Split → its layouts; the first one that is complete is read. If rows name their split, the key
  # "" has the files of all splits.
  files: Mapping[str, Layouts]
  read: Callable[[Row], Record]
  split_of: Callable[[Row], str] | None = None
  grader: str  # by its string
  prompt: str  # template of the prompt, over the fields of `tasks.published`


def split_files(split: str, folder: str = "data") -> Layouts:
  """A file named after the split, or a hub's Parquet file, in `folder` or next to it."""
  return (split,), (hub_file(split, folder),), (hub_file(split),)


def hub_file(split: str, folder: str = "") -> str:
  """A split's only Parquet file, as hubs name it."""
  return f"{folder}/{split}-00000-of-00001".lstrip("/")


def listed(layouts: Layouts) -> str:
  """The layouts as text, for messages."""
  short = [layout if len(layout) < 4 else (layout[0], "…", layout[-1]) for layout in layouts]
  return " or ".join(" with ".join(layout) for layout in short)
