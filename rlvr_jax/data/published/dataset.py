"""Descriptions of published data sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import tensorflow_datasets as tfds

from rlvr_jax.data.published.rows import Record, Row

# The layouts in which a split may be published. A layout is a tuple of file names, relative to
# data_dir and without format; all of these files are read. A name that ends in "/" is a folder,
# whose files are all read; "/" is data_dir itself.
Layouts = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(eq=False, kw_only=True)
class Dataset(tfds.core.BuilderConfig):
  """Description of a published data set: its files, and how a row becomes a problem."""

  # Split → layouts, of which the first complete one is read. If rows name their split, the only key
  # is "", with the files of all splits.
  files: Mapping[str, Layouts]
  read: Callable[[Row], Record]
  split_of: Callable[[Row], str] | None = None  # row → its split, if rows name it
  grader: str  # spec of the grader
  prompt: str  # prompt template over the fields listed in `tasks.published`


def split_files(split: str, folder: str = "data") -> Layouts:
  """Layouts of a split in one file: `split`, or its name on a hub, with or without `folder`."""
  return (split,), (hub_file(split, folder),), (hub_file(split),)


def hub_file(split: str, folder: str = "") -> str:
  """The name that a hub gives the Parquet file of a split that has only one file."""
  return f"{folder}/{split}-00000-of-00001".lstrip("/")


def describe_layouts(layouts: Layouts) -> str:
  """Returns the layouts as text, for messages."""
  shortened = [layout if len(layout) < 4 else (layout[0], "…", layout[-1]) for layout in layouts]
  return " or ".join(" with ".join(layout) for layout in shortened)
