"""An emulator of Google Cloud Storage, in memory: as much of its JSON API as a run needs.

gcsfs finds it by STORAGE_EMULATOR_HOST, tensorstore by TENSORSTORE_GCS_HTTP_URL. It has uploads in
one request (media, multipart) and in several (resumable), preconditions on generations, listing
with prefix and delimiter, reading of ranges, and removal. Objects become visible as a whole and at
once, as in a bucket. It refuses to copy or move objects, of which gcsfs makes renames, and `Strict`
refuses before the request is made: no run may need them.
"""

import base64
import contextlib
import datetime
import email.parser
import email.policy
import functools
import hashlib
import http.server
import itertools
import json
import re
import threading
import urllib.parse
import uuid
from typing import NamedTuple

import fsspec
import pytest

BUCKET = "bucket"
_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)")
_COPY = re.compile(r".*/(rewriteTo|copyTo|moveTo|compose)(/.*)?")
_LIST = re.compile(r"/storage/v1/b/([^/]+)/o")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")


class Stored(NamedTuple):
  data: bytes
  generation: int
  updated: str


class Refusal(Exception):
  """A request that is answered with this status."""


class Emulator:
  """The server, in a thread of this process.

  Attributes:
    objects: name → `Stored`, of the one bucket; tests may change them.
    requests: (method, path without query) of all requests so far.
    refuses: status of the answer to all requests; None to answer them.
    damages: whether the network flips a bit of what is put.
    before_answer: called with a request's method and path after it has had its effect; a
      ConnectionError loses the answer.
  """

  def __init__(self):
    self.objects: dict[str, Stored] = {}
    self.refuses: int | None = None
    self.damages = False
    self.before_answer = lambda method, path: None
    self.requests: list[tuple[str, str]] = []
    self.uploads: dict[str, tuple[str, dict, bytearray]] = {}
    self.lock = threading.Lock()
    self._generations = itertools.count(1)
    handler = type("Handler", (_Handler,), {"emulator": self})
    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    self._server.daemon_threads = True
    threading.Thread(target=self._server.serve_forever, daemon=True).start()
    self.url = f"http://127.0.0.1:{self._server.server_port}"

  def put(self, name, data, conditions=()):
    """Stores an object if its generation is as the conditions of the request say."""
    with self.lock:
      self.check(name, dict(conditions))
      now = datetime.datetime.now(datetime.UTC)
      data = bytearray(data)
      if self.damages:
        data[0] ^= 4
      stored = Stored(bytes(data), next(self._generations), now.isoformat().replace("+00:00", "Z"))
      self.objects[name] = stored
      return self.described(name, stored)

  def check(self, name, conditions):
    found = self.objects.get(name)
    generation = found.generation if found else 0
    if "generation" in conditions and int(conditions["generation"]) != generation:
      raise Refusal(404)
    if "ifGenerationMatch" in conditions and int(conditions["ifGenerationMatch"]) != generation:
      raise Refusal(412)
    if int(conditions.get("ifGenerationNotMatch", -1)) == generation:
      raise Refusal(304)

  def described(self, name, stored):
    digest = base64.b64encode(hashlib.md5(stored.data).digest()).decode()
    return {
      "kind": "storage#object",
      "bucket": BUCKET,
      "name": name,
      "generation": str(stored.generation),
      "metageneration": "1",
      "size": str(len(stored.data)),
      "md5Hash": digest,
      "updated": stored.updated,
      "timeCreated": stored.updated,
    }

  def names(self, folder):
    """Names of the objects of a folder, without it."""
    with self.lock:
      return sorted(
        n.removeprefix(f"{folder}/") for n in self.objects if n.startswith(f"{folder}/")
      )

  def damage(self, name):
    """Flips one bit of an object, whose generation and time stay."""
    data = bytearray(self.objects[name].data)
    data[len(data) // 2] ^= 4
    self.objects[name] = self.objects[name]._replace(data=bytes(data))


@functools.cache
def _of_this_process():
  """One for all tests, since tensorstore looks for its address once."""
  return Emulator()


@contextlib.contextmanager
def emulated():
  """The emulator, which this process and those that it starts use meanwhile."""
  gcsfs = pytest.importorskip("gcsfs", reason='gcsfs is missing: pip install "rlvr_jax[gcs]"')
  emulator = _of_this_process()

  class Strict(gcsfs.core.GCSFileSystem):
    """Raises on append and rename; there is nothing to lock."""

    def _open(self, path, mode="rb", **kwargs):
      assert "a" not in mode and "+" not in mode, f"{path} is opened to append"
      return super()._open(path, mode, **kwargs)

    async def _cp_file(self, *args, **kwargs):
      raise AssertionError(f"a copy or rename of {args}")

    _mv = _mv_file = _cp_file

  with pytest.MonkeyPatch.context() as patch:
    for name, value in environment_of(emulator.url).items():
      patch.setenv(name, value)
    for protocol in ("gcs", "gs"):
      fsspec.register_implementation(protocol, Strict, clobber=True)
    yield emulator
    for protocol in ("gcs", "gs"):
      fsspec.register_implementation(protocol, gcsfs.GCSFileSystem, clobber=True)


def environment_of(url):
  """The variables that send a program to an emulator."""
  return {
    "STORAGE_EMULATOR_HOST": url,
    "TENSORSTORE_GCS_HTTP_URL": url,
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "emulator",  # or tensorstore looks for a real one
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks for the kind of bucket over gRPC
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
  }


class _Handler(http.server.BaseHTTPRequestHandler):
  """One connection."""

  protocol_version = "HTTP/1.1"
  disable_nagle_algorithm = True
  emulator: Emulator

  def log_message(self, *args):
    pass

  def handle_one_request(self):
    with contextlib.suppress(ConnectionError):  # the client was killed
      super().handle_one_request()

  def do_GET(self):
    self.answer_with(self.get)

  def do_POST(self):
    self.answer_with(self.post)

  def do_PUT(self):
    self.answer_with(self.post)

  def do_DELETE(self):
    self.answer_with(self.delete)

  def answer_with(self, action):
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    self.emulator.requests.append((self.command, url.path))
    try:
      if self.emulator.refuses:
        raise Refusal(self.emulator.refuses)
      status, content, headers = action(url.path, query, body)
      self.emulator.before_answer(self.command, url.path)
    except ConnectionError:
      self.close_connection = True
      return
    except Refusal as refusal:
      status, content, headers = (
        refusal.args[0],
        {"error": {"code": refusal.args[0], "message": "refused"}},
        {},
      )
    if not isinstance(content, bytes):
      content, headers = (
        json.dumps(content).encode(),
        {"Content-Type": "application/json"} | headers,
      )
    if status in (204, 304):
      content = b""
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, value)
    self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    self.wfile.write(content)

  def get(self, path, query, body):
    if match := _OBJECT.fullmatch(path):
      name = urllib.parse.unquote(match[2])
      with self.emulator.lock:
        stored = self.emulator.objects.get(name)
        if stored is None:
          raise Refusal(404)
        self.emulator.check(name, query)
      if query.get("alt") == "media":
        return self.media(stored)
      return 200, self.emulator.described(name, stored), {}
    if _LIST.fullmatch(path):
      return 200, self.listing(query), {}
    if path.startswith("/storage/v1/b/"):
      return 200, {"kind": "storage#bucket", "name": path.rpartition("/")[2]}, {}
    raise Refusal(404)

  def media(self, stored):
    headers = {
      "Content-Type": "application/octet-stream",
      "X-Goog-Generation": str(stored.generation),
    }
    if not (wanted := self.headers.get("Range")):
      return 200, stored.data, headers
    first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted).groups()
    size = len(stored.data)
    begin = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if begin >= size:
      raise Refusal(416)
    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    return 206, stored.data[begin:end], headers

  def listing(self, query):
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    start = max(query.get("startOffset", ""), query.get("pageToken", ""))
    end, limit = query.get("endOffset", ""), int(query.get("maxResults", 1000))
    items, prefixes, following = [], [], None
    with self.emulator.lock:
      names = sorted(n for n in self.emulator.objects if n.startswith(prefix) and n >= start)
      for name in names:
        if end and name >= end:
          break
        if len(items) + len(prefixes) >= limit:
          following = name
          break
        folder, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        if not found:
          items.append(self.emulator.described(name, self.emulator.objects[name]))
        elif prefix + folder + delimiter not in prefixes[-1:]:
          prefixes.append(prefix + folder + delimiter)
    page = {"nextPageToken": following} if following else {}
    return {"kind": "storage#objects", "items": items, "prefixes": prefixes} | page

  def post(self, path, query, body):
    if "upload_id" in query:
      return self.resume(query["upload_id"], body)
    if _UPLOAD.fullmatch(path):
      return self.upload(query, body)
    raise Refusal(405 if _COPY.fullmatch(path) else 404)

  def upload(self, query, body):
    kind = query["uploadType"]
    if kind == "media":
      return 200, self.emulator.put(query["name"], body, query), {}
    if kind == "multipart":
      boundary = self.headers["Content-Type"].partition("boundary=")[2].strip("\"'").encode()
      _, about, data, *_ = body.split(b"--" + boundary)
      message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(about.strip())
      head = re.match(rb"\r?\n.*?\r?\n\r?\n", data, re.DOTALL)
      name = json.loads(message.get_payload())["name"]
      ending = b"\r\n" if data.endswith(b"\r\n") else b"\n"
      return 200, self.emulator.put(name, data[head.end() :].removesuffix(ending), query), {}
    identity = uuid.uuid4().hex
    name = query.get("name") or json.loads(body)["name"]
    with self.emulator.lock:
      self.emulator.check(name, query)
    self.emulator.uploads[identity] = name, query, bytearray()
    return (
      200,
      {},
      {"Location": f"{self.emulator.url}{self.path.split('?')[0]}?upload_id={identity}"},
    )

  def resume(self, identity, body):
    """One part of an upload, which is complete with the one that knows the total."""
    if identity not in self.emulator.uploads:
      raise Refusal(404)
    name, query, data = self.emulator.uploads[identity]
    span, _, total = self.headers.get("Content-Range", "bytes */*").split()[1].partition("/")
    if span != "*":
      first = int(span.partition("-")[0])
      if first > len(data):
        raise Refusal(400)
      data[first:] = body
    elif "Content-Range" not in self.headers:
      data[:], total = body, str(len(body))
    if total != "*" and len(data) == int(total):
      del self.emulator.uploads[identity]
      return 200, self.emulator.put(name, data, query), {}
    return 308, b"", {"Range": f"bytes=0-{len(data) - 1}"} if data else {}

  def delete(self, path, query, body):
    if "upload_id" in query:
      self.emulator.uploads.pop(query["upload_id"], None)
      return 204, b"", {}
    match = _OBJECT.fullmatch(path)
    name = urllib.parse.unquote(match[2])
    with self.emulator.lock:
      if name not in self.emulator.objects:
        raise Refusal(404)
      self.emulator.check(name, query)
      del self.emulator.objects[name]
    return 204, b"", {}
