"""The tensorflow-datasets builder for all published data sets, and its records."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from rlvr_jax.data.published import mathematics, programs
from rlvr_jax.data.published.dataset import Dataset, describe_layouts
from rlvr_jax.data.published.files import FORMATS, PublishedFiles
from rlvr_jax.data.published.rows import Record
from rlvr_jax.data.sources import question_key
from rlvr_jax.storage.files import open_own, report_full_disk
from rlvr_jax.storage.places import parse_path

DATASETS: dict[str, Dataset] = {
  dataset.name: dataset
  for dataset in (
    mathematics.GSM8K,
    mathematics.MATH,
    mathematics.MATH_500,
    mathematics.AIME_2024,
    mathematics.AIME_2025,
    mathematics.AMC,
    mathematics.DEEPSCALER,
    programs.MBPP,
    programs.HUMANEVAL,
    programs.LIVECODEBENCH,
  )
}


class Published(tfds.core.GeneratorBasedBuilder):
  """Builder of published data sets: one configuration per data set, records in published order.

  Args:
    source: published files.
    paths: split → paths of its files. If rows name their split, the key "" has all files.
    config: name of the data set.
    data_dir: folder for the prepared records.
  """

  VERSION = tfds.core.Version("1.1.0")  # raise it when the same files give different records
  BUILDER_CONFIGS: ClassVar = list(DATASETS.values())

  def __init__(self, *, source: PublishedFiles, paths: dict[str, list[str]], **kwargs):
    self._source, self._paths = source, paths
    super().__init__(file_format="array_record", **kwargs)

  def records(self, split: str) -> Records:
    """The prepared records of one split.

    Raises:
      ValueError: the split does not exist, or the prepared records are damaged.
    """
    splits = sorted(self.info.splits)
    if split in splits:
      return Records(self, split)
    dataset: Dataset = self.builder_config
    layouts = dataset.files.get(split)
    remedy = (
      f"give the files of this split the names {describe_layouts(layouts)}"
      if layouts
      else "choose one of these splits"
    )
    raise ValueError(
      f"{dataset.name} has no split {split!r} in {self._source.data_dir}, only {splits}: {remedy}"
    )

  def _info(self) -> tfds.core.DatasetInfo:
    texts = ("id", "question", "answer", "solution", "reference", "subject")
    return self.dataset_info_from_configs(
      features=tfds.features.FeaturesDict(
        {name: tfds.features.Text() for name in texts}
        | {"difficulty": tfds.features.Scalar(np.float32)}
      ),
      metadata=tfds.core.MetadataDict(),  # split → columns by which problems are chosen
      disable_shuffling=True,  # published order: "the first N" is well-defined
    )

  def _split_generators(self, dl_manager):
    del dl_manager  # nothing is downloaded
    split_of = self.builder_config.split_of
    splits = self._paths
    if split_of:
      splits = dict.fromkeys(split_of(row) for row in self._source.rows(self._paths[""]))
    return {split: self._generate_examples(split) for split in splits}

  def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
    dataset = self.builder_config
    columns: dict[str, list] = {"key": [], "difficulty": [], "characters": [], "has_solution": []}
    self.info.metadata[split] = columns
    rows = self._source.rows(self._paths[split if split in self._paths else ""])
    if dataset.split_of:
      rows = (row for row in rows if dataset.split_of(row) == split)
    for number, row in enumerate(rows):
      record = dataset.read(row)
      columns["key"].append(question_key(record.question))
      columns["difficulty"].append(record.difficulty)
      columns["characters"].append(len(record.question))
      columns["has_solution"].append(bool(record.solution))
      yield number, vars(record) | {"reference": json.dumps(record.reference)}


class Records:
  """The records of one split, read on access.

  Attributes:
    dataset: data set of the records.
    split: name of the split.
    keys: U16[N], `question_key` of each question.
    difficulty: f64[N]; NaN where unknown.
    characters: i64[N], length of the question in characters.
    has_solution: bool[N], whether a solution is published.
  """

  def __init__(self, builder: Published, split: str):
    self.dataset: Dataset = builder.builder_config
    self.split = split
    self._folder = builder.data_dir
    with self._reporting_damage():
      columns = builder.info.metadata[split]
      self.keys = np.array(columns["key"])
      self.difficulty = np.array(columns["difficulty"], float)
      self.characters = np.array(columns["characters"])
      self.has_solution = np.array(columns["has_solution"], bool)
      self._source = builder.as_data_source(split)
      if len(self._source) != len(self.keys):
        raise ValueError(f"{len(self._source)} records instead of {len(self.keys)}")
    for index in {0, len(self) - 1}:
      self[index]

  def __len__(self) -> int:
    return len(self.keys)

  def __getitem__(self, index: int) -> Record:
    with self._reporting_damage():
      fields = dict(self._source[index])
      difficulty = float(fields.pop("difficulty"))
      texts = {name: text.decode() for name, text in fields.items()}
      if question_key(texts["question"]) != self.keys[index]:
        raise ValueError(f"the question of record {index} does not match the record's key")
      reference = json.loads(texts.pop("reference"))
      return Record(**texts, reference=reference, difficulty=difficulty)

  @contextlib.contextmanager
  def _reporting_damage(self) -> Iterator[None]:
    with reporting_damage(self.dataset.name, self._folder):
      yield


@contextlib.contextmanager
def reporting_damage(dataset: str, folder: str | os.PathLike[str]) -> Iterator[None]:
  """Turns any error while reading prepared records into a ValueError that says what to do."""
  try:
    yield
  except (AssertionError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
    raise ValueError(
      f"the prepared {dataset} records in {folder} are damaged ({type(error).__name__}: {error}): "
      "delete that folder, and the next run prepares them again"
    ) from error


def prepare(
  name: str, data_dir: str | os.PathLike[str], prepared_dir: str | os.PathLike[str]
) -> Published:
  """Prepares a published data set, unless it is already prepared.

  Args:
    name: name of the data set, one of `DATASETS`.
    data_dir: folder or file as published, local or a URL such as gs://bucket/folder.
    prepared_dir: local folder for the prepared records, with a subfolder per content digest, so
      that changed files are prepared again. Several processes may share the folder.
  Raises:
    OSError: a file is missing or cannot be read, or the records cannot be written.
    ValueError: the name is unknown, a file is not as published (the message names it, and the line
      or record), or the prepared records are damaged.
  """
  if name not in DATASETS:
    raise ValueError(f"unknown data set {name!r}; choose one of {sorted(DATASETS)}")
  source = PublishedFiles(data_dir)
  files = DATASETS[name].files
  if source.is_single_file and len(files) == 1:  # the name of the file is arbitrary
    files = dict.fromkeys(files, (tuple(source.names()),))
  paths_by_split = {split: source.layout_paths(layouts) for split, layouts in files.items()}
  paths = {split: split_paths for split, split_paths in paths_by_split.items() if split_paths}
  if not paths:
    alternative = ", or give the file itself as data_dir" if len(files) == 1 else ""
    raise FileNotFoundError(
      errno.ENOENT,
      f"no file of {name} in data_dir: expected"
      f" {'; or '.join(map(describe_layouts, files.values()))} (with one of the extensions"
      f" {', '.join(FORMATS)}), found {source.names()[:20]}; rename the files found{alternative}",
      os.fspath(data_dir),
    )
  digest = source.digest([path for split in sorted(paths) for path in paths[split]])
  root = parse_path("prepared_dir", os.path.expanduser(prepared_dir), must_be_on_disk=True)
  folder = root / digest
  tfds.disable_progress_bar()

  def make_builder() -> Published:
    with reporting_damage(name, folder):
      return Published(source=source, paths=paths, config=name, data_dir=folder)

  builder = make_builder()
  if not builder.info.splits:
    logging.info("preparing %s from %s in %s", name, data_dir, folder)
    with report_full_disk(folder):
      folder.mkdir(parents=True, exist_ok=True)
      with open_own(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for another process that prepares them
        builder = make_builder()
        # The library logs a download, but nothing is downloaded.
        with contextlib.redirect_stdout(io.StringIO()):
          builder.download_and_prepare()
  return builder
