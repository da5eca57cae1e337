"""The page of a run: one file that contains everything, or a server that reads data on request.

Whatever a run has stored reaches the page as compressed numbers and JSON, never as HTML.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import html
import http.server
import itertools
import json
import pathlib
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from rlvr_jax.rollouts.store import StoreError, TornShardError
from rlvr_jax.storage.files import JSON, DamagedFileError, replace_file
from rlvr_jax.storage.places import make_absolute
from rlvr_jax.view import read
from rlvr_jax.view.read import Part, Run

PAGE_FILE = "view.html"
MAX_BYTES = 2**26  # the most bytes of the file
HOST = "127.0.0.1"
_ALIGNMENT = 8
_REQUEST = re.compile(r"/data/([01])/(?:(summary)|(batch|geometry)/([0-9]{1,12}))")
_FIELD = re.compile(r"\{\{(\w+)\}\}")  # a placeholder in page.html
_MIB = 2**20


class Written(NamedTuple):
  """The page that was written, with its size and the parts that are left out."""

  path: pathlib.Path
  size: int  # bytes
  left_out: list[str]  # batches and measurements that are missing, and why


# --- parts ----------------------------------------------------------------------------------------


def encode(part: Part) -> bytes:
  """The compressed bytes of a part: size of the header u32, the header as JSON, the arrays.

  The header's "arrays" has (name, dtype, shape, offset in bytes after the header) of each array.
  """
  places: list[JSON] = []
  blocks: list[bytes] = []
  end = 0
  for name, array in part.arrays.items():
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = little.tobytes()
    places.append([name, array.dtype.name, list(array.shape), end])
    blocks.append(data + bytes(-len(data) % _ALIGNMENT))
    end += len(blocks[-1])
  header = json.dumps({**part.header, "arrays": places}, allow_nan=False).encode()
  header += b" " * (-(4 + len(header)) % _ALIGNMENT)
  content = b"".join([len(header).to_bytes(4, "little"), header, *blocks])
  return gzip.compress(content, compresslevel=6, mtime=0)


# --- the page -------------------------------------------------------------------------------------


def _asset(name: str) -> str:
  return resources.files("rlvr_jax.view").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
  digest = hashlib.sha256(text.encode()).digest()
  return f"'sha256-{base64.b64encode(digest).decode()}'"


def page_ends(names: Sequence[str], *, served: bool) -> tuple[str, str]:
  """The parts of a page before and after its data, for runs with these names.

  The page's security policy lets a browser use only the page's own script and style. A served page
  may load data from its server, and no page may load anything else.
  """
  style, script = _asset("page.css"), _asset("page.js")
  policy = (
    f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)};"
    f" connect-src {chr(39)}{'self' if served else 'none'}{chr(39)}; base-uri 'none';"
    " form-action 'none'"
  )
  values = {
    "policy": html.escape(policy),
    "title": html.escape(" and ".join(names)),
    "runs": str(len(names)),
    "style": style,
    "served": "true" if served else "false",
    "script": script,
  }
  start, end = (
    _FIELD.sub(lambda match: values[match[1]], half)  # in one pass: values may have braces
    for half in _asset("page.html").split("{{data}}")
  )
  return start, end


def write_page(
  path: pathlib.Path,
  runs: Sequence[Run],
  base: Mapping[str, JSON],
  batches: Sequence[Sequence[int]],
  *,
  max_bytes: int = MAX_BYTES,
) -> Written:
  """Writes one file with the metrics of runs and some of their batches; needs memory for one batch.

  Args:
    path: the path of the file, which is replaced atomically.
    runs: one run, or two runs that are shown beside each other.
    base: the configuration with which recipes are compared.
    batches: the batches of each run, the most important first.
    max_bytes: the most bytes of the file; batches that do not fit are left out, and the page lists
      them.
  """
  start, end = page_ends([make_absolute(run.folder).name for run in runs], served=False)
  left_out: list[str] = []
  with replace_file(path) as file:
    size = file.write(start.encode())
    room = max_bytes - len(end.encode()) - _MIB // 16  # leaves room for the names in `left_out`
    for index, run in enumerate(runs):
      size += _write_part(file, f"{index}/summary", read.read_summary(run, base))
    for name, make in _parts(runs, batches):
      try:
        data = base64.b64encode(encode(make()))
      except (TornShardError, DamagedFileError):
        left_out.append(f"{name} (missing or damaged)")
        continue
      if size + len(data) > room:
        left_out.append(f"{name} ({len(data) / _MIB:.1f} MiB, no room)")
      else:
        size += _write_element(file, name, data)
    size += _write_part(file, "left_out", Part({"names": left_out}, {}))
    size += file.write(end.encode())
  return Written(path, size, left_out)


def _parts(
  runs: Sequence[Run], batches: Sequence[Sequence[int]]
) -> Iterator[tuple[str, Callable[[], Part]]]:
  """Yields (name, reader) of each part that the page should contain, the most important first.

  Batches and measurements of all runs are interleaved.
  """
  steps = [read.geometry_steps(run.folder) for run in runs]
  measured = [
    read.choose_batches(read.DEFAULT_BATCHES, of_run) if of_run else () for of_run in steps
  ]
  columns: list[list[tuple[str, Callable[[], Part]]]] = []
  for index, run in enumerate(runs):
    columns.append(
      [(f"{index}/batch/{n}", functools.partial(read.read_batch, run, n)) for n in batches[index]]
    )
    columns.append(
      [
        (f"{index}/geometry/{n}", functools.partial(read.read_geometry, run, n))
        for n in measured[index]
      ]
    )
  for row in itertools.zip_longest(*columns):
    yield from filter(None, row)


def _write_part(file: IO[bytes], name: str, part: Part) -> int:
  return _write_element(file, name, base64.b64encode(encode(part)))


def _write_element(file: IO[bytes], name: str, data: bytes) -> int:
  """Writes an element of base64 text, which a browser does not parse; returns its size."""
  tag = f'<script type="text/plain" id="{name}">'.encode()
  return file.write(tag) + file.write(data) + file.write(b"</script>\n")


# --- the server -----------------------------------------------------------------------------------


class Server(http.server.ThreadingHTTPServer):
  """Serves the page and parts of runs to this machine; reads batches as they are asked for.

  A request is answered only if its Host header is 127.0.0.1 or localhost, so that no web site can
  reach the server by DNS rebinding. Paths are matched as a whole, and contain numbers, never file
  names.
  """

  daemon_threads = True

  def __init__(self, runs: Sequence[Run], base: Mapping[str, JSON], port: int = 0):
    """Listens on 127.0.0.1 at `port`, 0 for any free port; OSError if the port is in use."""
    super().__init__((HOST, port), _Handler)
    self._runs, self._base = [*runs], base
    self._reading = threading.Lock()  # one batch at a time is in memory

  @property
  def address(self) -> str:
    """The URL of the page."""
    return f"http://{HOST}:{self.server_address[1]}/"

  def answer(self, path: str) -> tuple[str, bytes] | None:
    """(content type, bytes) of the part of the page with this path; None if no part has it.

    Raises:
      StoreError, TornShardError, OSError, ValueError: a file cannot be read.
    """
    if path == "/":
      names = [make_absolute(run.folder).name for run in self._runs]
      return "text/html; charset=utf-8", "".join(page_ends(names, served=True)).encode()
    match = _REQUEST.fullmatch(path)
    if match is None or int(match[1]) >= len(self._runs):
      return None
    run = self._runs[int(match[1])]
    with self._reading:
      if match[2]:
        part = read.read_summary(run, self._base)
      elif match[3] == "geometry":
        if int(match[4]) not in read.geometry_steps(run.folder):
          return None
        part = read.read_geometry(run, int(match[4]))
      elif int(match[4]) in read.stored_numbers(run.folder):
        part = read.read_batch(run, int(match[4]))
      else:
        return None
      return "application/octet-stream", encode(part)


class _Handler(http.server.BaseHTTPRequestHandler):
  server: Server

  def do_GET(self) -> None:
    """Answers a request of a browser on this machine."""
    host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
    if host not in (HOST, "localhost"):
      self.send_error(403, "this server answers to 127.0.0.1 only")
      return
    try:
      found = self.server.answer(self.path)
    except (StoreError, TornShardError, DamagedFileError, OSError, ValueError, zlib.error) as error:
      self.send_error(500, "a file of the run cannot be read", str(error))
      return
    if found is None:
      self.send_error(404, "the page has no such part")
      return
    content_type, data = found
    self.send_response(200)
    for name, value in {
      "Content-Type": content_type,
      "Content-Length": str(len(data)),
      "Cache-Control": "no-store",
      "X-Content-Type-Options": "nosniff",
      "Cross-Origin-Resource-Policy": "same-origin",
    }.items():
      self.send_header(name, value)
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, format: str, *args: object) -> None:
    """Prints nothing: requests are of no interest."""
