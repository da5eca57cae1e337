"""The file and the server: what they hold, what they let a browser do, and what they refuse."""

import base64
import contextlib
import gzip
import hashlib
import html.parser
import http.client
import json
import re
import shutil
import socket
import threading
import tracemalloc

import numpy as np
import pytest
from view import made

from rlvr_jax.commands.view import view
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.bucket import Bucket
from rlvr_jax.storage.places import parse_path
from rlvr_jax.view import read, write
from rlvr_jax.view.read import Part


class Elements(html.parser.HTMLParser):
  """The texts of scripts and styles by id or tag, and the attributes of meta elements."""

  def __init__(self, page):
    super().__init__()
    self.texts, self.metas, self.tags, self._name = {}, [], [], None
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    if tag == "meta":
      self.metas.append(dict(attrs))
    self._name = dict(attrs).get("id", tag) if tag in ("script", "style", "title") else None

  def handle_endtag(self, tag):
    self._name = None

  def handle_data(self, data):
    if self._name:
      self.texts[self._name] = self.texts.get(self._name, "") + data


def decode(data):
  """The inverse of `write.encode`, as the page does it."""
  content = gzip.decompress(data)
  start = 4 + int.from_bytes(content[:4], "little")
  header = json.loads(content[4:start])
  arrays = {
    name: np.frombuffer(content, dtype, int(np.prod(shape)), start + offset).reshape(shape)
    for name, dtype, shape, offset in header.pop("arrays")
  }
  return Part(header, arrays)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  gram = np.eye(4)
  measured = [(step, gram, [1, -1, 0.5, 0], [[1, 0], [0, 0]]) for step in (0, 2)]
  return made.write_run(tmp_path_factory.mktemp("write") / "run", measured=measured)


def write_file(folder, path, **options):
  run = read.open_run(folder)
  return write.write_page(path, [run], {}, [read.stored_numbers(folder)], **options)


def test_parts_are_read_back_as_they_were():
  dtypes = ["uint8", "uint16", "int32", "float16", "float32", "float64"]
  arrays = {dtype: np.arange(3, dtype=dtype) for dtype in dtypes}
  part = Part({"text": made.ATTACK}, arrays | {"empty": np.ones((2, 0), "float32")})
  found = decode(write.encode(part))
  assert found.header == part.header and found.arrays["empty"].shape == (2, 0)
  for dtype in dtypes:
    assert found.arrays[dtype].dtype == dtype and found.arrays[dtype].tolist() == [0, 1, 2]


def test_a_file_holds_all_batches_as_they_were_stored(folder, tmp_path):
  written = write_file(folder, tmp_path / "page.html")
  assert written.size == (tmp_path / "page.html").stat().st_size and written.left_out == []
  texts = Elements((tmp_path / "page.html").read_text()).texts
  names = {f"0/batch/{number}" for number in range(4)} | {"0/geometry/0", "0/geometry/2"}
  assert {"0/summary", "left_out"} | names <= texts.keys()
  run = read.open_run(folder)
  for number in range(4):
    found = decode(base64.b64decode(texts[f"0/batch/{number}"]))
    expected = read.read_batch(run, number)
    assert found.header == expected.header and found.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
      np.testing.assert_array_equal(found.arrays[name], array)


def test_texts_of_a_run_are_in_no_place_that_a_browser_reads(folder, tmp_path):
  attacked = folder.parent / "a <script> {{script}} &lt; b"
  shutil.copytree(folder, attacked)
  write_file(attacked, tmp_path / "page.html")
  page = (tmp_path / "page.html").read_text()
  assert "attacked" not in page and "onerror" not in page and "\u202e" not in page
  elements = Elements(page)
  assert elements.texts["title"] == attacked.name
  assert elements.tags.count("script") == 9  # 8 hold data
  (policy,) = (m["content"] for m in elements.metas if "http-equiv" in m)
  for tag in ("script", "style"):
    digest = hashlib.sha256(elements.texts[tag].encode()).digest()
    assert f"{tag}-src 'sha256-{base64.b64encode(digest).decode()}';" in policy
  assert "default-src 'none'" in policy and "connect-src 'none'" in policy


def test_the_script_makes_elements_from_no_text_and_loads_nothing_from_elsewhere():
  script, style = write._asset("page.js"), write._asset("page.css")
  assert not re.search(
    r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|Function\(", script
  )
  assert not re.search(r"https?:|//[a-z]", re.sub(r"^\s*//.*$", "", script, flags=re.MULTILINE))
  assert "url(" not in style and "@import" not in style and "</" not in script + style


def test_what_does_not_fit_is_left_out_and_named(folder, tmp_path):
  limit = len("".join(write.page_ends(["run"], served=False)).encode()) + 2**16 + 6000
  written = write_file(folder, tmp_path / "page.html", max_bytes=limit)
  assert written.left_out and written.size <= limit
  texts = Elements((tmp_path / "page.html").read_text()).texts
  assert decode(base64.b64decode(texts["left_out"])).header["names"] == written.left_out
  held = {name for name in texts if re.match("0/(batch|geometry)", name)}
  names = {text.partition(" ")[0] for text in written.left_out}
  assert held and not held & names and len(held) + len(names) == 6
  assert all(text.endswith("MiB, no room)") for text in written.left_out)


def test_a_damaged_batch_is_left_out_and_named(folder, tmp_path):
  shutil.copytree(folder, tmp_path / "run")
  (tmp_path / "run" / "rollouts" / "00000001.safetensors").write_bytes(b"torn")
  written = write_file(tmp_path / "run", tmp_path / "page.html")
  assert written.left_out == ["0/batch/1 (missing or damaged)"]
  (tmp_path / "run" / "geometry" / "000000.npz").write_bytes(b"torn")
  written = write_file(tmp_path / "run", tmp_path / "page.html")
  assert {*written.left_out} == {f"0/{x} (missing or damaged)" for x in ("batch/1", "geometry/0")}


def test_writing_needs_memory_for_one_batch(tmp_path):
  rng = np.random.default_rng(0)
  words = ["".join(map(chr, rng.integers(97, 122, 8000))) for _ in range(2)]

  def peak(name, batches):
    groups = [[made.group(0, words, [1, 0])] for _ in range(batches)]
    run = made.write_run(tmp_path / name, batches=groups, advantage="fade")
    write_file(run, tmp_path / "page.html")  # what is loaded once
    tracemalloc.start()
    write_file(run, tmp_path / "page.html")
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found

  assert peak("many", 4) < 1.3 * peak("one", 1)


def test_two_runs_share_a_file(folder, tmp_path):
  other = made.write_run(tmp_path / "other", num_updates=5)
  view(made.config(), str(folder), beside=str(other), batches="0")()
  texts = Elements((folder / "view.html").read_text()).texts
  assert {"0/batch/0", "1/batch/0", "1/summary"} <= texts.keys() and "0/batch/1" not in texts
  recipes = [decode(base64.b64decode(texts[f"{n}/summary"])).header["recipe"] for n in (0, 1)]
  assert recipes == [[], [["num_updates", "4", "5"]]]  # a difference from the first run
  longer = made.write_run(tmp_path / "longer", batches=[made.batch()] * 31)
  view(made.config(), str(longer), beside=str(folder))()
  texts = Elements((longer / "view.html").read_text()).texts.keys()
  assert {name for name in texts if name.startswith("0/batch/")} == {
    f"0/batch/{number}"
    for number in range(4)  # those of both
  }


def test_the_command_says_what_it_wrote(folder, capsys, monkeypatch):
  view(made.config(), str(folder))()
  assert capsys.readouterr().out == f"{folder}/view.html: 0.1 MiB; open it in a browser\n"
  monkeypatch.setattr(write.write_page, "__kwdefaults__", {"max_bytes": 2**17})
  view(made.config(), str(folder))()
  assert "left out: 0/" in capsys.readouterr().out
  with pytest.raises(ValueError, match="--batches=9: batch 9 is not in the store"):
    view(made.config(), str(folder), batches="9")


def test_a_run_in_a_bucket_has_the_page_of_one_on_a_disk(folder, url, tmp_path, monkeypatch):
  bucket = Bucket(parse_path("", url))
  for path in folder.rglob("*"):
    if path.is_file() and path.name not in ("lock", write.PAGE_FILE):
      bucket.put(path.relative_to(folder).as_posix(), path.read_bytes())
  monkeypatch.chdir(tmp_path)
  parts = []
  for workdir in (str(folder), url):
    path = view(made.config(), workdir)().path
    texts = Elements(path.read_text()).texts
    names = [name for name in texts if name.startswith("0/") and name != "0/summary"]
    parts.append({name: texts[name] for name in names})
    summary = decode(base64.b64decode(texts["0/summary"]))
    assert summary.header["batches"] == [0, 1, 2, 3] and summary.header["geometry"] == [0, 2]
  assert path.absolute() == tmp_path / write.PAGE_FILE
  assert parts[0] == parts[1] and "0/geometry/2" in parts[0]


# --- the server -----------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(*folders):
  with write.Server([read.open_run(folder) for folder in folders], {}) as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
      yield server
    finally:
      server.shutdown()
      thread.join()


def request(server, path, method="GET", host="127.0.0.1"):
  connection = http.client.HTTPConnection(*server.server_address)
  connection.putrequest(method, path, skip_host=True)
  connection.putheader("Host", f"{host}:{server.server_address[1]}")
  connection.endheaders()
  answer = connection.getresponse()
  found = answer.status, answer.read()
  connection.close()
  return found


def test_a_server_reads_any_batch_also_while_the_run_goes_on(folder, tmp_path):
  growing = tmp_path / "run"
  shutil.copytree(folder, growing)
  with serving(growing) as server:
    status, page = request(server, "/")
    assert status == 200 and "connect-src 'self'" in html.unescape(page.decode())
    assert decode(request(server, "/data/0/summary")[1]).header["batches"] == [0, 1, 2, 3]
    assert decode(request(server, "/data/0/batch/3")[1]).header["number"] == 3
    assert decode(request(server, "/data/0/geometry/2")[1]).header["step"] == 2
    assert request(server, "/data/0/batch/4")[0] == 404
    with RolloutStore(growing / "rollouts", writable=True) as store:
      store.write(4, made.batch(), {})
    assert decode(request(server, "/data/0/summary")[1]).header["batches"] == [0, 1, 2, 3, 4]
    assert decode(request(server, "/data/0/batch/4")[1]).header["number"] == 4
    (growing / "rollouts" / "00000004.safetensors").write_bytes(b"torn")
    assert request(server, "/data/0/batch/4")[0] == 500


def test_a_port_that_is_in_use(folder):
  with serving(folder) as server, pytest.raises(ValueError, match=r"--port=.* cannot be used"):
    view(made.config(), str(folder), serve=True, port=server.server_address[1])


def test_a_server_answers_this_machine_alone_and_has_no_files(folder):
  with serving(folder) as server:
    assert server.server_address[0] == "127.0.0.1" and server.address.startswith("http://127.0.")
    for path in (
      "/config.json", "/../config.json", "/data/0/../../config.json", "/data/0/batch/..%2f0",
      "/data/0/batch/0/../1", "/data/1/summary", "/data/0/batch/-1",
      "/data/0/batch/9999999999999", "/data/0/geometry/1", "/data/0/batch/0?x", "/data/0/batch/",
    ):  # fmt: skip
      assert request(server, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "HEAD"):
      assert request(server, "/", method)[0] == 501
    assert request(server, "/", host="evil.example")[0] == 403
    assert request(server, "/data/0/summary", host="localhost")[0] == 200
    others = [a[4][0] for a in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    for address in {*others} - {"127.0.0.1"}:
      with pytest.raises(OSError):
        socket.create_connection((address, server.server_address[1]), timeout=0.5)
