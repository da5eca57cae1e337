"""What is to be said of a published data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import tensorflow_datasets as tfds

from rlvr_jax.data.published.rows import Record, Row


@dataclasses.dataclass(eq=False, kw_only=True)
class Dataset(tfds.core.BuilderConfig):
  """Where the files of a published data set are and how a row of them is read."""

  # Split → patterns of `PublishedFiles.matching`. Where rows themselves say their split, the files
  # of all splits stand under "".
  files: Mapping[str, tuple[str, ...]]
  read: Callable[[Row], Record]
  split_of: Callable[[Row], str] | None = None
  grader: str  # import path
  prompt: str  # template of the completion's prompt, over the fields of `tasks.published`


def split_files(split: str) -> tuple[str, ...]:
  """Where a split's files usually are."""
  return (
    split, f"data/{split}-*", f"{split}-*", f"{split}/*", f"*/{split}", f"*/{split}-*",
    f"*/{split}/*", f"*_{split}", f"*-{split}",
  )  # fmt: skip
