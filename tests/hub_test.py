"""Checkpoints of a hub, hf://: here a small server of its HTTP interface."""

import contextlib
import http.server
import json
import re
import threading
import urllib.parse

import fsspec
import pytest
from models.huggingface_test import SETTINGS, assert_equal, load, published_tensors, write

from rlvr_jax.storage.folders import list_files

hub = pytest.importorskip("huggingface_hub", reason='pip install "rlvr_jax[hf]"')
SHA = "0" * 40  # of the only commit
# Long: fsspec's part. Folders of any of its file systems: storage/folders_test.py; a remote
# tokenizer and data set, by memory://, are in the tests of each.
pytestmark = pytest.mark.slow


class _Handler(http.server.BaseHTTPRequestHandler):
  """The repositories are the folders models/OWNER/NAME and datasets/OWNER/NAME of `root`."""

  protocol_version = "HTTP/1.1"

  def log_message(self, *args):
    pass

  def do_GET(self):
    path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
    if found := re.fullmatch(r"/api/(\w+/\w+/\w+)/tree/[^/]+/?(.*)", path):
      return self.answer(self.tree(*found.groups()))
    if found := re.fullmatch(r"/api/(\w+/\w+/\w+)(/revision/.*)?", path):
      known = (self.server.root / found[1]).is_dir()
      return self.answer({"id": found[1].partition("/")[2], "sha": SHA} if known else None)
    if found := re.fullmatch(r"/(datasets/)?(\w+/\w+)/resolve/[^/]+/(.*)", path):
      file = self.server.root / (found[1] or "models/") / found[2] / found[3]
      return self.answer(file.read_bytes() if file.is_file() else None)
    return self.answer(None)

  def do_HEAD(self):
    self.do_GET()

  def tree(self, repository, below):
    root = self.server.root / repository
    paths = sorted(path for path in (root / below).rglob("*"))
    about = lambda path: {"path": path.relative_to(root).as_posix(), "oid": SHA}
    kind = lambda path: (
      {"type": "directory"} if path.is_dir() else {"type": "file", "size": path.stat().st_size}
    )
    return [about(path) | kind(path) for path in paths]

  def answer(self, content):
    status, headers = 200 if content is not None else 404, {"X-Repo-Commit": SHA, "ETag": '"a"'}
    data = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
    if isinstance(content, list):
      data = json.dumps(content).encode()
    if status == 404:
      headers["X-Error-Code"] = "RepoNotFound"
    if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
      first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
      headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
      status, data = 206, data[first : last + 1]
    self.send_response(status)
    for name, value in (headers | {"Content-Length": str(len(data))}).items():
      self.send_header(name, value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(data)


@pytest.fixture
def root(tmp_path, monkeypatch):
  """The folder of repositories that hf:// paths lead to."""
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
  server.daemon_threads, server.root = True, tmp_path
  threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
  url = f"http://127.0.0.1:{server.server_port}"
  monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": url, "token": False})
  for name in ("NO_PROXY", "no_proxy"):
    monkeypatch.setenv(name, "127.0.0.1")
  with contextlib.closing(server.socket):
    yield tmp_path
    server.shutdown()


def test_a_checkpoint_of_a_hub(root):
  (root / "models" / "qwen").mkdir(parents=True)
  local = write(root / "models" / "qwen" / "tiny", published_tensors(SETTINGS))
  assert list_files("hf://qwen/tiny") == ["config.json", "model.safetensors"]
  assert_equal(load("hf://qwen/tiny"), load(local))
  with pytest.raises(FileNotFoundError, match="absent"):
    list_files("hf://qwen/absent")
