"""The benchmark of loading a checkpoint writes its numbers as the other benchmarks do."""

import json

import program_flags

from experiments.benchmarks import packed_rows


def test_the_report_is_that_of_the_numbers(tmp_path):
  kept = packed_rows.RESULTS.with_name("load_checkpoint_cpu")
  results = json.loads(kept.with_suffix(".json").read_text())
  with program_flags.experiment("benchmarks/load_checkpoint") as benchmark:
    path, title = tmp_path / "found", "Loading a checkpoint"
    conditions, rows = results["conditions"], results["rows"]
    benchmark.write_results(path, title, rows, conditions, benchmark.NOTES)
    written = benchmark.write_report(rows, tmp_path / "new", "it")
  for ending in (".md", ".json"):
    assert path.with_suffix(ending).read_text() == kept.with_suffix(ending).read_text()
  assert written == (tmp_path / "new" / "load_checkpoint_cpu.md").read_text()
  assert f"# {title}\n" in written and "command: it" in written
