"""The tensorflow-datasets builder of GSM8K, and the checks on the files it reads."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator

import tensorflow_datasets as tfds

SPLITS = ("train", "test")
_FINAL_ANSWER = re.compile(r"#### \S+\s*$")
_EXPECTED = (
  'every line is to be a JSON object {"question": text, "answer": text} whose answer ends with '
  "'#### number', as in the published files"
)

Record = dict[str, str]  # "question" and "answer", as published


def _path(source_dir: str | os.PathLike, split: str) -> pathlib.Path:
  return pathlib.Path(source_dir) / f"{split}.jsonl"


def read_jsonl(path: str | os.PathLike) -> list[Record]:
  """Reads and checks one published file.

  Raises:
    FileNotFoundError, OSError: the file is not there or cannot be read.
    ValueError: the file is empty, or a line is not as published; names the file and the line.
  """
  try:
    lines = pathlib.Path(path).read_bytes().splitlines()
  except OSError as error:
    raise type(error)(
      error.errno,
      f"cannot read the GSM8K file ({error.strerror}); the data directory is to hold train.jsonl "
      "and test.jsonl as published",
      os.fspath(path),
    ) from error
  if not lines:
    raise ValueError(f"{path} is empty: {_EXPECTED}")
  return [_parse_line(line, f"{path}, line {n}") for n, line in enumerate(lines, start=1)]


def _parse_line(line: bytes, where: str) -> Record:
  shown = repr(line[:80])[1:]
  try:
    row = json.loads(line)
  except ValueError as error:  # not JSON, or not UTF-8
    raise ValueError(
      f"{where} is torn or not JSON ({error}): {shown}; {_EXPECTED}. Fetch the file again."
    ) from error
  if not isinstance(row, dict):
    raise ValueError(f"{where} is not a JSON object: {shown}; {_EXPECTED}")
  for field in ("question", "answer"):
    if not isinstance(row.get(field), str) or not row[field].strip():
      raise ValueError(f"{where} has {field} = {row.get(field)!r}, expected a text; {_EXPECTED}")
  if not _FINAL_ANSWER.search(row["answer"]):
    raise ValueError(f"{where} has an answer ending in {row['answer'][-40:]!r}; {_EXPECTED}")
  return {"question": row["question"], "answer": row["answer"]}


class Gsm8kJsonl(tfds.core.GeneratorBasedBuilder):
  """GSM8K, grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168), splits train and test.

  Args:
    source_dir: holds train.jsonl and test.jsonl as published.
    data_dir: for the prepared records.
  """

  VERSION = tfds.core.Version("1.0.0")

  def __init__(self, *, source_dir: str | os.PathLike, **kwargs):
    self._source_dir = source_dir
    super().__init__(file_format="array_record", **kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    return self.dataset_info_from_configs(
      features=tfds.features.FeaturesDict(
        {"question": tfds.features.Text(), "answer": tfds.features.Text()}
      ),
      homepage="https://github.com/openai/grade-school-math",
      disable_shuffling=True,  # the order as published: "the first N" means what it says
    )

  def _split_generators(self, dl_manager):
    del dl_manager  # nothing is downloaded
    return {split: self._generate_examples(_path(self._source_dir, split)) for split in SPLITS}

  def _generate_examples(self, path) -> Iterator[tuple[int, Record]]:
    yield from enumerate(read_jsonl(path))


def load_records(
  source_dir: str | os.PathLike, prepared_dir: str | os.PathLike
) -> dict[str, list[Record]]:
  """Prepares GSM8K where that has not been done yet, and returns its records, {split: records}.

  Args:
    source_dir: holds train.jsonl and test.jsonl as published.
    prepared_dir: for the prepared records; one folder per content of the source files, so that
      changed sources are never mistaken for the prepared ones.
  Raises:
    OSError: a source cannot be read, or the records cannot be written.
    ValueError: a source is not as published, or the prepared records are damaged.
  """
  published = {split: read_jsonl(_path(source_dir, split)) for split in SPLITS}
  digest = hashlib.sha256(json.dumps(published).encode()).hexdigest()[:16]
  tfds.disable_progress_bar()
  builder = Gsm8kJsonl(source_dir=source_dir, data_dir=pathlib.Path(prepared_dir) / digest)
  builder.download_and_prepare()
  problem = "they differ from the source"
  try:
    prepared = {split: _records(builder.as_data_source(split)) for split in SPLITS}
  except (OSError, RuntimeError, ValueError) as error:
    prepared, problem = {}, str(error)
  if prepared != published:
    raise ValueError(
      f"the prepared GSM8K records in {builder.data_dir} are damaged ({problem}): delete that "
      "folder, and the next run prepares them again"
    )
  return prepared


def _records(source) -> list[Record]:
  rows = (source[index] for index in range(len(source)))
  return [{name: text.decode() for name, text in row.items()} for row in rows]
