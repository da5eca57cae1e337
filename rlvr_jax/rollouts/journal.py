"""Journal of the finished groups of unfinished batches, so that a kill does not lose them.

A finished group reaches a bucket some seconds later. If a machine vanishes without notice, the
groups of these seconds are lost as well.
"""

from __future__ import annotations

import base64
import contextlib
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from rlvr_jax.rollouts.serve import Group, Owner
from rlvr_jax.rollouts.shards import MARKER, decode_group, encode_group, read_line
from rlvr_jax.storage.files import JsonLines, read_lines, with_crc32


class GroupJournal:
  """One file of finished groups per draw of prompts, removed when its batch is in the store.

  A crash of the machine may tear or damage a line; its group is then sampled again, to the same
  bits. So writes do not wait for the disk.
  """

  def __init__(
    self, directory: pathlib.Path, follow: Callable[[pathlib.Path], None] = lambda path: None
  ):
    """Opens nothing yet; the folder is created with the first group.

    Args:
      directory: for the journal only.
      follow: called with the path of a file that has grown or was removed; see `Workdir.follow`.
    """
    self._directory = directory
    self._follow = follow

  def append(self, draw: int, fingerprint: str, groups: Iterable[Group]) -> None:
    """Writes groups of a draw; they survive a kill of the process when this returns.

    Args:
      draw: number of the draw of prompts.
      fingerprint: of the policy that sampled them.
      groups: with the index of their prompt in the draw.
    Raises:
      DiskFullError: no space is left.
    """
    about = {"format": MARKER, "fingerprint": fingerprint}
    self._directory.mkdir(exist_ok=True)
    with contextlib.closing(JsonLines(self._path(draw))) as lines:
      lines.append(with_crc32(about | _to_json(group)) for group in groups)
    self._follow(self._path(draw))

  def read(self, draw: int, fingerprint: str) -> list[dict[str, Any]]:
    """Reads the groups of a draw that this policy has sampled, as JSON; see `from_json`."""
    path = self._path(draw)
    records = [read_line(line, path) for line in read_lines(path)]
    return [r for r in records if r is not None and r["fingerprint"] == fingerprint]

  def forget(self, *, before: int) -> None:
    """Removes the files of draws with a number below `before`."""
    for path in self._directory.glob("*.jsonl"):
      if int(path.stem) < before:
        path.unlink()
        self._follow(path)

  def _path(self, draw: int) -> pathlib.Path:
    return self._directory / f"{draw:08d}.jsonl"


def _to_json(group: Group) -> dict[str, Any]:
  """Converts a group to its index and its record in base64; see `encode_group`."""
  about = ("owner", "prompt_index", "details")
  arrays = {k: v for k, v in group._asdict().items() if k not in about and v is not None}
  record = encode_group(arrays, samples=group.details or ())
  return {"index": group.prompt_index, "group": base64.b64encode(record).decode()}


def from_json(record: dict[str, Any], owner: Owner) -> Group[Owner]:
  """Converts a record from `GroupJournal.read` to a group of the draw's owner."""
  arrays, details = decode_group(base64.b64decode(record["group"]))
  return Group(owner=owner, prompt_index=record["index"], **arrays, details=details or None)
