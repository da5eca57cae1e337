"""Published data sets: every format, what is read of it, what is refused, and what is prepared."""

import base64
import concurrent.futures
import gzip
import json
import math
import os
import pathlib
import pickle
import time
import zlib

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from rlvr_jax.data.published import builder, mathematics, programs
from rlvr_jax.data.published.files import PublishedFiles
from rlvr_jax.rewards.code import code
from rlvr_jax.rewards.extraction import find_stated_answer

pytestmark = pytest.mark.usefixtures("few_buckets")


def _bytes(name, rows):
  """A file's bytes, in the format that its name says."""
  if name.endswith(".parquet"):
    buffer = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue().to_pybytes()
  text = json.dumps(rows) if ".jsonl" not in name else "\n".join(map(json.dumps, rows)) + "\n"
  return gzip.compress(text.encode(), mtime=0) if name.endswith(".gz") else text.encode()


def _write(folder, files):
  """Files of rows, by name below the folder."""
  for name, rows in files.items():
    path = folder / "source" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(rows if isinstance(rows, bytes) else _bytes(name, rows))
  return folder / "source"


def _prepare(name, folder, files=None):
  source = _write(folder, files) if files else folder / "source"
  return builder.prepare(name, source, folder / "prepared")


def _records(name, folder, files, split):
  records = _prepare(name, folder, files).records(split)
  return [records[index] for index in range(len(records))]


def _gsm8k_rows(numbers):
  return [{"question": f"Twice {n}?", "answer": f"2*{n}=<<2*{n}={2 * n}>>{2 * n}\n#### {2 * n:,}"}
          for n in numbers]  # fmt: skip


FILES = {"mbpp": "mbpp.jsonl"}  # others of test.jsonl


# --- mathematics ----------------------------------------------------------------------------------

BOXED = {"problem": "Half?", "level": "Level 3", "type": "Algebra",
         "solution": "So $x = \\boxed{\\frac{1}{2}}$."}  # fmt: skip


@pytest.mark.parametrize(
  ("name", "files", "split", "expected"),
  [
    (
      "gsm8k", {"train.jsonl": _gsm8k_rows([600]), "test.jsonl": _gsm8k_rows([1])}, "train",
      {"question": "Twice 600?", "answer": "1,200", "solution": "2*600=1200\n#### 1,200",
       "reference": {"answer": "1,200"}, "id": "train/1"},
    ),
    (
      "math", {"MATH/train/algebra/2.json": BOXED, "MATH/train/algebra/10.json": BOXED}, "train",
      {"question": "Half?", "answer": "\\frac{1}{2}", "solution": BOXED["solution"],
       "reference": {"answer": "\\frac{1}{2}"}, "difficulty": 3.0, "subject": "Algebra",
       "id": "MATH/train/algebra/2/1"},
    ),
    ("math", {"test.jsonl": [BOXED | {"level": "Level ?"}]}, "test", {"difficulty": math.nan}),
    ("math", {"test-00000-of-00001.parquet": [BOXED]}, "test", {"difficulty": 3.0}),
    (
      "math_500",
      {"test.jsonl": [{"problem": "p", "solution": "\\boxed{0.50}", "answer": "0.5", "level": 2,
                       "subject": "Algebra", "unique_id": "test/algebra/1.json"}]},
      "test",
      {"answer": "0.5", "difficulty": 2.0, "subject": "Algebra", "id": "test/algebra/1.json"},
    ),
    (
      "aime_2024",
      {"aime_2024_problems.parquet":
       [{"ID": "2024-II-4", "Problem": "p", "Solution": "33", "Answer": 33}]},
      "test",
      {"question": "p", "answer": "33", "id": "2024-II-4",
       "solution": "33\n\nThe final answer is $\\boxed{33}$."},
    ),
    (
      "aime_2024",
      {"data/train-00000-of-00001.json":
       [{"id": 60, "problem": "p", "answer": "073", "year": "2024"}]},
      "test", {"answer": "73", "id": "60"},
    ),
    (
      "aime_2024", {"aime25.jsonl": [{"question": "other", "answer": "1"}],
                    "aime24.jsonl": [{"problem": "p", "solution": "$\\boxed{073}$"}]}, "test",
      {"answer": "73", "question": "p"},
    ),
    (
      "aime_2025", {"aime2025-II.jsonl": [{"question": "b", "answer": "2"}],
                    "aime2025-I.jsonl": [{"question": "a", "answer": "336^\\circ"}]}, "test",
      {"question": "a", "answer": "336", "solution": ""},
    ),
    (
      "amc", {"data/train-00000-of-00001.parquet":
              [{"id": 3, "problem": "p", "answer": 142.0, "url": "u"}]}, "test",
      {"id": "3", "answer": "142", "difficulty": math.nan},
    ),
    (
      "deepscaler", {"deepscaler.json": [{"problem": "p", "answer": "-\\frac{2}{3}",
                                          "solution": ""}]}, "train",
      {"answer": "-\\frac{2}{3}", "solution": ""},
    ),
    (
      "deepscaler", {"deepscaler.json.gz": [{"problem": "p", "answer": 4, "difficulty": 0.25}]},
      "train", {"answer": "4", "difficulty": 0.25},
    ),
  ],
)  # fmt: skip
def test_mathematics_as_published(tmp_path, name, files, split, expected):
  record = _records(name, tmp_path, files, split)[0]
  for field, value in expected.items():
    assert getattr(record, field) == pytest.approx(value, nan_ok=True), field


@pytest.mark.parametrize(
  ("text", "boxed"),
  [
    (r"\boxed{1} or \boxed{2}", "1, 2"),
    (r"so $x=\boxed{3} \text{ or } \boxed{4}$.", "3, 4"),
    (r"$\boxed{x<1}$ or $\boxed{x>2}$", "x<1 or x>2"),
    (r"$\boxed{1}$, $\boxed{2}$ and $\boxed 3$", "1, 2, 3"),
    (r"first \boxed{1}, then the rest \boxed{2}", "2"),
    (r"\boxed{1} or \boxed{2", None),
    (r"$\boxed{5}$ $\boxed{5}$", "5"),
    (r"$x_1=\boxed{3}$ and $x_2=\boxed{4}$", "3, 4"),
    (r"$\boxed{3} \lor \boxed{4}$", "3, 4"),
    (r"$\boxed{5}\ \&\ \boxed{6}$", "5, 6"),
    (rf"\boxed{{1}} {', ' * 50} \boxed{{2}}", "2"),
    (r"$\boxed{\frac{1}{2^{3}}}$.", r"\frac{1}{2^{3}}"),
    (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),
    (r"\boxed{\{1\}}", r"\{1\}"),
    (r"\fbox{x}", "x"),
    (r"\boxed {7}", "7"),
    (r"is \boxed 2$ here", "2"),
    (r"\boxed{\text{(A) }\{}", r"\text{(A) }\{"),
    (r"\boxed{1", None),
    (r"\boxedx{1}", None),
    ("none", None),
  ],
)
def test_last_boxed(text, boxed):
  assert mathematics.last_boxed(text) == boxed
  assert (find_stated_answer(text) or None) == boxed  # the grader reads the same


# --- programs -------------------------------------------------------------------------------------

MBPP = {
  "task_id": 601,
  "text": "Write f.",
  "code": "def f():\r\n  return 1",
  "test_list": ["assert f() == 1"],
  "test_setup_code": "",
  "challenge_test_list": [],
}
SANITIZED = {
  "task_id": 11,
  "prompt": "Write g.",
  "code": "def g(): return 1",
  "test_list": ["assert math.isclose(g(), 1)"],
  "test_imports": ["import math"],
}
HUMANEVAL = {"task_id": "HumanEval/0", "entry_point": "f",
             "prompt": 'def f():\n  """One."""\n', "canonical_solution": "  return 1\n",
             "test": "\ndef check(candidate):\n  assert candidate() == 1\n"}  # fmt: skip


def test_mbpp(tmp_path):
  files = {"mbpp.jsonl": [MBPP | {"task_id": n} for n in (1, 10, 11, 510, 511, 600, 601, 974)],
           "sanitized-mbpp.json": [SANITIZED]}  # fmt: skip
  prepared = _prepare("mbpp", tmp_path, files)
  splits = {split: prepared.records(split) for split in ("prompt", "test", "validation", "train")}
  ids = {split: [records[i].id for i in range(len(records))] for split, records in splits.items()}
  assert ids == {"prompt": ["1", "10"], "test": ["11", "510"], "validation": ["511", "600"],
                 "train": ["601", "974"]}  # fmt: skip
  record = splits["train"][0]
  assert (record.question, record.answer) == ("Write f.", "")
  assert record.solution == "```python\ndef f():\n  return 1\n```"
  assert record.reference == {"style": "asserts", "tests": ["assert f() == 1"], "setup": ""}
  shown = programs.describe_interface(record.reference)
  assert shown == "Your code should pass these tests:\n\nassert f() == 1"


def test_sanitized_mbpp_by_the_name_of_its_file(tmp_path):
  files = {"mbpp.jsonl": [MBPP], "sanitized-mbpp.json": [SANITIZED]}
  source = _write(tmp_path, files) / "sanitized-mbpp.json"
  records = builder.prepare("mbpp", source, tmp_path / "prepared").records("test")
  assert (len(records), records[0].question) == (1, "Write g.")
  assert records[0].reference["setup"] == "import math"
  assert "import math\nassert math.isclose" in programs.describe_interface(records[0].reference)


def test_humaneval(tmp_path):
  (record,) = _records("humaneval", tmp_path, {"HumanEval.jsonl.gz": [HUMANEVAL]}, "test")
  assert record.question == HUMANEVAL["prompt"]
  assert record.solution == '```python\ndef f():\n  """One."""\n  return 1\n```'
  assert record.reference == {
    "style": "check", "entry_point": "f", "test": HUMANEVAL["test"], "prompt": HUMANEVAL["prompt"]
  }  # fmt: skip
  assert programs.describe_interface(record.reference) == ""


def _encoded(cases, dumps=lambda cases: pickle.dumps(json.dumps(cases))):
  return base64.b64encode(zlib.compress(dumps(cases))).decode()


STDIN_CASE = {"input": "1 2\n", "output": "3\n", "testtype": "stdin"}
FUNCTION = "class Solution:\n    def total(self, l: List[int], n: int) -> int:\n        "


def _livecodebench(private, **fields):
  case = {"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}
  return {
    "question_id": "a1", "question_content": "Sum.", "platform": "leetcode", "difficulty": "medium",
    "contest_date": "2024-01-06T00:00:00", "metadata": json.dumps({"func_name": "total"}),
    "starter_code": FUNCTION,
    "public_test_cases": json.dumps([case]), "private_test_cases": private,
  } | fields  # fmt: skip


HIDDEN = [{"input": "[]\n0\n", "output": "null", "testtype": "functional"}]


@pytest.mark.parametrize(
  "private",
  [
    json.dumps(HIDDEN),
    _encoded(HIDDEN),
    _encoded(HIDDEN, lambda cases: json.dumps(cases).encode()),
    HIDDEN,
  ],
)
def test_livecodebench_functions(tmp_path, private):
  files = {"test.jsonl": [_livecodebench(private)]}
  (record,) = _records("livecodebench", tmp_path, files, "test")
  assert (record.id, record.difficulty, record.subject) == ("a1", 2.0, "leetcode")
  setup = record.reference.pop("setup")
  assert "from typing import *\n" in setup and "Solution" not in setup
  assert record.reference == {
    "style": "function",
    "entry_point": "Solution.total",
    "cases": [{"input": [[1, 2], 3], "output": 6}, {"input": [[], 0], "output": None}],
    "starter": FUNCTION,
    "contest_date": "2024-01-06T00:00:00",
  }
  assert "```python\nclass Solution" in programs.describe_interface(record.reference)


def test_livecodebench_programs_from_several_files(tmp_path):
  row = _livecodebench("", public_test_cases=[STDIN_CASE], metadata="{}", starter_code="")
  files = {"test2.jsonl": [row | {"question_id": "b"}], "test.jsonl": [row],
           "test10.jsonl": [row | {"question_id": "c", "difficulty": None}]}  # fmt: skip
  records = _records("livecodebench", tmp_path, files, "test")
  assert [record.id for record in records] == ["a1", "b", "c"]
  assert records[0].reference["style"] == "stdin"
  assert records[0].reference["cases"] == [{"input": "1 2\n", "output": "3\n"}]
  assert math.isnan(records[2].difficulty)
  assert "standard input" in programs.describe_interface(records[0].reference)


@pytest.mark.parametrize(
  ("name", "split", "row", "good", "bad"),
  [
    ("mbpp", "train", MBPP, "def f(): return 1", "def f(): return 2"),
    ("mbpp", "test", SANITIZED, "def g(): return 1", "def g(): return 2"),
    ("humaneval", "test", HUMANEVAL, "def f():\n  return 1", "def f():\n  return 2"),
    ("livecodebench", "test", _livecodebench(""), FUNCTION + "return reduce(add, l) + n",
     FUNCTION + "return sum(l)"),
    ("livecodebench", "test",
     _livecodebench("", metadata='{"func_name": "gcd"}', starter_code="",
                    public_test_cases=[{"input": "4\n6", "output": "2", "testtype": "functional"}]),
     "def gcd(a, b): return math.gcd(a, b)", "def gcd(a, b): return a"),
    ("livecodebench", "test", _livecodebench("", public_test_cases=[STDIN_CASE], metadata="{}"),
     "print(sum(map(int, sys.stdin.read().split())))", "print(sys.stdin.read())"),
  ],
)  # fmt: skip
def test_from_row_to_grade(tmp_path, name, split, row, good, bad):
  file = "sanitized-mbpp.json" if row is SANITIZED else FILES.get(name, "test.jsonl")
  (record,) = _records(name, tmp_path, {file: [row]}, split)
  reference = record.reference | {"time_limit_s": 30.0}
  grades = [code(f"So:\n```python\n{program}\n```\n", reference) for program in (good, bad)]
  assert [grade.score for grade in grades] == [1.0, 0.0], grades
  assert not grades[1].detail.startswith("program:"), grades[1]


class _Harmful:
  def __init__(self, mark):
    self.mark = mark

  def __reduce__(self):
    return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_of_anything_but_a_text_is_never_loaded(tmp_path, protocol):
  mark = tmp_path / "harm"
  for value in (_Harmful(mark), [json.dumps(HIDDEN)], ("a", "b"), {"a": 1}, b"[]"):
    with pytest.raises(ValueError, match=r"which is never loaded; .* convert it to JSON"):
      programs.read_pickled_text(pickle.dumps(value, protocol))
  harmful = _encoded(_Harmful(mark), lambda value: pickle.dumps(value, protocol))
  with pytest.raises(ValueError, match=r"test.jsonl, line 1 has private_test_cases.*never loaded"):
    _prepare("livecodebench", tmp_path, {"test.jsonl": [_livecodebench(harmful)]})
  assert not mark.exists()
  pickle.loads(pickle.dumps(_Harmful(mark)))  # it would have done harm
  assert mark.exists()


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("name", "row", "message"),
  [
    ("gsm8k", b'{"question": "How ma', r"line 2 is truncated or not JSON .*Fetch the file again"),
    ("gsm8k", [1], r"line 2 is not a JSON object: '\[1\]'"),
    ("gsm8k", {"question": "q"}, r"line 2 has no field 'answer', only \['question'\]"),
    ("gsm8k", {"question": " ", "answer": "#### 1"}, "line 2 has question = ' ', expected a text"),
    ("gsm8k", {"question": "q", "answer": "no mark"}, "line 2 has an answer ending in 'no mark'"),
    ("math", {"problem": "p", "solution": "x"}, r"line 2 has neither an answer nor .*\\boxed"),
    ("gsm8k", {"question": "q", "answer": None}, "line 2 has answer = null, expected a value"),
    ("gsm8k", {"question": "\ud83d", "answer": "#### 1"}, "line 2 has a lone surrogate, .*UTF-8"),
    ("math", BOXED | {"level": "hard"}, "line 2 has level = 'hard', expected a number"),
    (
      "aime_2024",
      {"problem": "p", "answer": "1/2"},
      "line 2 has answer = '1/2', expected an integer",
    ),
    ("aime_2024", {"problem": "p", "answer": 1, "year": 2023}, "line 2 is from 2023, not 2024"),
    ("mbpp", MBPP | {"task_id": 975}, "line 2 has task_id = 975, expected .* 1 to 974"),
    ("mbpp", MBPP | {"test_list": []}, "line 2 has an empty test_list"),
    ("mbpp", MBPP | {"test_list": ["assert ("]}, "line 2 has a test that is not Python"),
    ("humaneval", HUMANEVAL | {"test": "assert f()"}, r"line 2 has a test without .* check"),
    ("humaneval", HUMANEVAL | {"entry_point": "g"}, "line 2 has a prompt that does not .*'g'"),
    ("livecodebench", _livecodebench("", public_test_cases=[]), "line 2 has no test cases"),
    ("livecodebench", _livecodebench("%"), "line 2 has private_test_.* neither JSON nor base"),
    ("livecodebench", _livecodebench(_encoded(HIDDEN)[:40]), "line 2 has private_.* cut off"),
    (
      "livecodebench",
      _livecodebench("", metadata="{}"),
      "line 2 has tests of type 'functional', but its metadata lacks func_name",
    ),
    (
      "livecodebench",
      _livecodebench([{"input": "", "output": "", "testtype": "stdin"}]),
      "line 2 has tests of types",
    ),
  ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, name, row, message):
  good = {
    "gsm8k": _gsm8k_rows([1])[0],
    "math": BOXED,
    "mbpp": MBPP,
    "humaneval": HUMANEVAL,
    "aime_2024": {"problem": "p", "answer": "1"},
    "livecodebench": _livecodebench(""),
  }
  row = row if isinstance(row, bytes) else json.dumps(row).encode()
  content = json.dumps(good[name]).encode() + b"\n" + row
  file = FILES.get(name, "test.jsonl")
  with pytest.raises(ValueError, match=message) as error:
    _prepare(name, tmp_path, {file: content})
  assert str(tmp_path / "source" / file) in str(error.value)


@pytest.mark.parametrize(
  ("file", "content", "message"),
  [
    ("test.jsonl", b"", "test.jsonl is empty"),
    ("test.json", b"[]", "test.json is empty"),
    ("test.json", _bytes("test.json", [BOXED])[:-9], "test.json is truncated or not JSON"),
    ("test.json", b'[{"problem": "p"}]', r"test.json, record 1 has neither an answer"),
    ("test.jsonl.gz", _bytes("x.jsonl.gz", [BOXED])[:-9], "test.jsonl.gz is truncated"),
    ("test.jsonl.gz", b"no gzip", "test.jsonl.gz is truncated"),
    ("test.parquet", _bytes("x.parquet", [BOXED])[:-9], "test.parquet is truncated or not Parquet"),
  ],
)
def test_truncated_files(tmp_path, file, content, message):
  with pytest.raises(ValueError, match=message):
    _prepare("math", tmp_path, {file: content})


def test_lines_of_json_under_another_name(tmp_path):
  files = {"test.json": _bytes("x.jsonl", [BOXED, BOXED | {"problem": "Third?"}])}
  assert _records("math", tmp_path, files, "test")[1].question == "Third?"


def test_missing_files_and_splits(tmp_path):
  with pytest.raises(ValueError, match=r"unknown data set 'gsm'; choose one of \['aime_2024'"):
    _prepare("gsm", tmp_path)
  with pytest.raises(ValueError, match="data_dir is empty: give the folder"):
    builder.prepare("gsm8k", "", tmp_path)
  with pytest.raises(FileNotFoundError, match=r"there is no such file in .*source"):
    _prepare("gsm8k", tmp_path)
  (tmp_path / "source").mkdir()
  with pytest.raises(
    FileNotFoundError, match=r"it contains no file of problems \(.jsonl, .*source"
  ):
    _prepare("gsm8k", tmp_path)
  expected = "expected train or main/train-00000-of-00001 or train-00000-of-00001; or test or main/"
  with pytest.raises(FileNotFoundError, match=f"no file of gsm8k .*{expected}.*found .'other'"):
    _prepare("gsm8k", tmp_path, {"other.jsonl": [{}], "test.txt": b"no problems"})
  prepared = _prepare("gsm8k", tmp_path, {"train.jsonl": _gsm8k_rows([1])})
  refused = r"no split 'test' in .*only \['train'\]: give the files of this split the names test or"
  with pytest.raises(ValueError, match=refused):
    prepared.records("test")


def test_the_plain_gsm8k_of_two(tmp_path):
  """Its repository has another version of the same problems beside it."""
  hub = "test-00000-of-00001.parquet"
  files = {f"main/{hub}": _gsm8k_rows([1]), f"brief/{hub}": [{"x": 1}]}
  assert [record.answer for record in _records("gsm8k", tmp_path, files, "test")] == ["2"]


def test_another_years_file_is_not_taken(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"no file of aime_2024 .*found \['aime25'\]"):
    _prepare("aime_2024", tmp_path, {"aime25.jsonl": [{"question": "q", "answer": "1"}]})


@pytest.mark.parametrize("name", ["math_500", "amc", "deepscaler", "mbpp", "humaneval"])
def test_a_file_of_another_name_is_never_guessed_at(tmp_path, name):
  """Such as the half that somebody set apart, or the answers of another benchmark."""
  other = f"my_{name}_humaneval_mbpp_500_old.jsonl"
  refused = "rename the files found, or give the file itself as data_dir"
  with pytest.raises(FileNotFoundError, match=refused):
    _prepare(name, tmp_path, {other: [BOXED], "old/train.jsonl": [BOXED]})


def test_a_layout_of_several_files_is_read_as_a_whole(tmp_path):
  halves = {f"aime2025-{half}.jsonl": [{"question": half, "answer": "1"}] for half in ("I", "II")}
  (tmp_path / "whole").mkdir()
  assert len(_records("aime_2025", tmp_path / "whole", halves, "test")) == 2
  del halves["aime2025-II.jsonl"]
  with pytest.raises(FileNotFoundError, match=r"-I with aime2025-II or .*found .'aime2025-I'"):
    _prepare("aime_2025", tmp_path, halves)


def test_one_file_of_any_name(tmp_path):
  source = _write(tmp_path, {"mine.jsonl": [{"question": "q", "answer": "1"}]}) / "mine.jsonl"
  records = builder.prepare("aime_2024", source, tmp_path / "prepared").records("test")
  assert records[0].answer == "1"


def test_a_folder_of_links(tmp_path):
  """As hubs' caches are."""
  for folder in ("blobs", "snapshot/main"):
    (tmp_path / folder).mkdir(parents=True)
  blob = _write(tmp_path / "blobs", {"train.jsonl": _gsm8k_rows([1, 2])}) / "train.jsonl"
  (tmp_path / "snapshot/main/train.jsonl").symlink_to(blob.rename(tmp_path / "blobs" / "4f1c"))
  source = PublishedFiles(tmp_path / "snapshot")
  assert len(list(source.rows(source.layout_paths((("main/train",),))))) == 2


def test_one_of_several_formats_and_no_hidden_files(tmp_path):
  files = {"train.jsonl": _gsm8k_rows([1, 2]), "train.parquet": _gsm8k_rows([3]),
           ".cache/train.jsonl": _gsm8k_rows([4])}  # fmt: skip
  source = PublishedFiles(_write(tmp_path, files))
  assert [pathlib.Path(p).name for p in source.layout_paths((("train",),))] == ["train.jsonl"]
  assert source.names() == ["train"]


# --- what is prepared -----------------------------------------------------------------------------


def test_prepared_once_for_each_content(tmp_path):
  first = _records("gsm8k", tmp_path, {"train.jsonl": _gsm8k_rows(range(20))}, "train")
  assert [record.answer for record in first] == [str(2 * n) for n in range(20)]
  (records_file,) = (tmp_path / "prepared").rglob("*train.array_record*")
  written = records_file.stat().st_mtime_ns
  os.utime(tmp_path / "source" / "train.jsonl", (0, 0))  # the bytes decide, not their date
  assert len(_prepare("gsm8k", tmp_path).records("train")) == 20
  assert records_file.stat().st_mtime_ns == written
  changed = _records("gsm8k", tmp_path, {"train.jsonl": _gsm8k_rows(range(1, 21))}, "train")
  assert changed[0].answer == "2"
  assert len(list((tmp_path / "prepared").iterdir())) == 2


@pytest.mark.parametrize("damage", ["truncated", "removed", "overwritten", "index"])
def test_damaged_prepared_records(tmp_path, damage):
  _prepare("gsm8k", tmp_path, {"train.jsonl": _gsm8k_rows(range(20))})
  (records,) = (tmp_path / "prepared").rglob("*train.array_record*")
  if damage == "truncated":
    os.truncate(records, 40_000)
  elif damage == "removed":
    records.unlink()
  elif damage == "overwritten":
    content = bytearray(records.read_bytes())
    start = content.index(b"Twice") if b"Twice" in content else 200
    content[start : start + 40] = bytes(40)
    records.write_bytes(content)
  else:
    (records.parent / "metadata.json").unlink()
  message = r"prepared gsm8k records in .* are damaged.*delete that folder"
  with pytest.raises(ValueError, match=message):
    _prepare("gsm8k", tmp_path).records("train")


def test_two_at_once_prepare_one(tmp_path):
  """Threads take the place of processes: the lock is of the opened file, not of the process."""
  _write(tmp_path, {"train.jsonl": _gsm8k_rows(range(300))})

  def prepare_after(seconds):  # one of them is likely to look just before another has finished
    time.sleep(seconds)
    return _prepare("gsm8k", tmp_path)

  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    prepared = list(threads.map(prepare_after, (k / 50 for k in range(8))))
  assert [len(each.records("train")) for each in prepared] == [300] * 8
  assert not list((tmp_path / "prepared").rglob("incomplete*"))


def test_a_failed_preparation_leaves_nothing(tmp_path):
  with pytest.raises(ValueError, match="line 1"):
    _prepare("gsm8k", tmp_path, {"train.jsonl": [{}]})
  assert not [path for path in (tmp_path / "prepared").rglob("*array_record*") if path.is_file()]
  assert not list((tmp_path / "prepared").rglob("incomplete*"))


def test_remote_files(tmp_path):
  """fsspec's file system in memory stands for a bucket."""
  with fsspec.open("memory://bucket/math/MATH/test/algebra/2.json", "wb") as file:
    file.write(_bytes("2.json", BOXED))
  with fsspec.open("memory://bucket/math/MATH/test/algebra/10.json", "wb") as file:
    file.write(_bytes("10.json", BOXED | {"problem": "Tenth?"}))
  prepare = lambda: builder.prepare("math", "memory://bucket/math", tmp_path).records("test")
  assert [prepare()[i].question for i in range(2)] == ["Half?", "Tenth?"]
  with fsspec.open("memory://bucket/math/MATH/test/algebra/10.json", "wb") as file:
    file.write(_bytes("10.json", {"problem": "torn"}))
  with pytest.raises(ValueError, match=r"memory://bucket/math .*algebra/10.json has neither"):
    prepare()
  with fsspec.open("memory://bucket/human/HumanEval.jsonl.gz", "wb") as file:
    file.write(_bytes("x.jsonl.gz", [HUMANEVAL]))
  assert len(builder.prepare("humaneval", "memory://bucket/human", tmp_path).records("test")) == 1
  with pytest.raises(FileNotFoundError, match="memory://bucket/nothing"):
    builder.prepare("math", "memory://bucket/nothing", tmp_path)
