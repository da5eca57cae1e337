"""Sums and tables of a cost report, from instructions made up for the purpose."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from train import tiny

from rlvr_jax.commands import ahead_of_time, choose
from rlvr_jax.costs import hlo, programs, report, workload
from rlvr_jax.costs.chips import CHIPS, Chip
from rlvr_jax.costs.hlo import Item
from rlvr_jax.models.flops import forward_flops, update_flops
from rlvr_jax.ops.logprobs import wanted_chunks
from rlvr_jax.ops.splash import splash_cost
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.programs import make_row_layout

CHIP = Chip(flops=100.0, hbm_bytes_per_s=10.0, interconnect_bytes_per_s=2.0, hbm_gib=1.0,
            flops_per_cycle=50.0)  # fmt: skip
CONDITIONS = dict(
  topology="v5e:2x2", mesh=dict(data=1, fsdp=4, tensor=1), model="tiny", layers=1, remat="full",
  lengths="longest", prompts=8, group_size=4, micro_batches=1, prompt_tokens=8, response_tokens=4,
  jax="0", compiler="", too_large=["generation"],
)  # fmt: skip


def item(part, opcode, *, times=1, flops=0.0, hbm=0.0, received=0.0, op_name="", target=""):
  shapes = ("bf16[4,8]",)
  return Item(part, opcode, "i", times, flops, hbm, received, "bf16", 0.0, target, op_name, shapes)


ITEMS = [
  item("layers", "fusion", times=3, flops=600.0, hbm=30.0),
  item("layers", "all-gather", times=3, received=12.0, hbm=10.0),
  item("head", "all-gather", received=5e6),
  item("head", "dot", flops=200.0),
  item("attention", "custom-call", times=2, hbm=4.0, target="tpu_custom_call", op_name="a/flash"),
]


def test_sums_seconds_and_what_bounds():
  found = report.cost(ITEMS[:2], CHIP, useful_flops=150.0, memory={"temporary": 7.0})
  assert (found["executed_flops"], found["hbm_bytes"], found["received_bytes"]) == (600, 40, 12)
  assert found["seconds"] == {"compute": 6.0, "HBM": 4.0, "interconnect": 6.0}
  assert found["bound_by"] == "compute"
  assert found["model_flops_utilization"] == 150 / 600
  (row,) = found["collectives"]
  assert row == dict(part="layers", opcode="all-gather", dtype="bf16", received_bytes=12.0, times=3)


def test_grouped_products_of_experts_are_counted():
  """By the shapes of rows and kernels; and of two sets of rows, for the kernels' gradient."""
  metadata = ("s32[]", "s32[9]{0:T(256)S(1)}")
  for shapes, name in (
    (("bf16[64,16]{1,0}", "bf16[8,16,24]{2,1,0}"), "jit(f)/jvp()/jit(gmm)/pallas_call"),
    (("bf16[64,24]{1,0}", "bf16[8,16,24]{2,1,0}"), "jit(f)/transpose(jvp())/jit(gmm)/pallas_call"),
    (("bf16[64,24]{1,0}", "bf16[64,16]{1,0}"), "jit(f)/transpose(jvp())/jit(tgmm)/pallas_call"),
  ):
    call = item("layers", "custom-call", times=3, hbm=6.0, target="tpu_custom_call", op_name=name)
    call = call._replace(shapes=(*metadata, *shapes))
    (found,) = report.apply_kernel_costs([call], report.EXPERT_KERNEL_COSTS)
    assert (found.flops, found.hbm_bytes) == (3 * 2 * 64 * 16 * 24, 6.0)


def test_parts_add_up_and_the_largest_come_first():
  found = report.cost(ITEMS, CHIP, useful_flops=1.0, memory={})
  assert [row["part"] for row in found["parts"]] == ["layers", "head", "attention"]
  for name, total in (("flops", "executed_flops"), ("hbm_bytes", "hbm_bytes")):
    assert sum(row[name] for row in found["parts"]) == found[total]
  assert [row["part"] for row in found["collectives"]] == ["head", "layers"]


def test_a_kernel_counts_by_its_own_formula():
  """From the shapes of its operands, for each of its runs; other calls stay as they are."""
  counted = report.apply_kernel_costs(ITEMS, {"flash": lambda i: (10.0 * len(i.shapes), 3.0)})
  assert (counted[-1].flops, counted[-1].hbm_bytes) == (20.0, 6.0)
  assert counted[:-1] == ITEMS[:-1]
  assert report.apply_kernel_costs(ITEMS, {"other": lambda i: (1.0, 1.0)}) == ITEMS
  found = report.cost(counted, CHIP, useful_flops=1.0, memory={})
  assert found["custom_calls"] == [
    dict(part="attention", target="tpu_custom_call", flops=20.0, hbm_bytes=6.0, times=2)
  ]


def test_the_paged_kernel_counts_every_cached_token():
  """Three slots, each with two pages of 16 tokens of 2 heads; 8 query heads of 128."""
  parts = programs.build_shapes_only(tiny.config(), sharding.make_mesh())
  numbers = ("s32[3]", "s32[6]", "s32[1]", "s32[1]")
  shapes = (*numbers, "f32[3,8,1,128]", "bf16[2,6,16,128]", "bf16[2,6,16,128]")
  call = item(
    "attention", "custom-call", times=5, hbm=35.0, target="tpu", op_name="paged_attention"
  )
  packed = programs.pack_full_length(parts.shape, parts.placement.row_layout)
  kernels = report.attention_kernel_costs(parts.model.config, packed, tensor=1)
  (found,) = report.apply_kernel_costs([call._replace(shapes=shapes)], kernels)
  queries_and_values = 2 * 2 * 8 * 128
  assert (found.flops, found.hbm_bytes) == (5 * 3 * 2 * 16 * queries_and_values, 35.0)


def test_a_call_on_a_row_counts_as_the_mean_of_the_rows_that_run():
  batch = dict(prompts=6, group_size=13, tokens_per_row=1536, tokens_per_micro_batch=1536)
  fields = {f"batch__{name}": size for name, size in batch.items()}
  config = tiny.config(max_response_length=64, **fields)
  parts = programs.build_shapes_only(config, sharding.make_mesh())
  network = dataclasses.replace(parts.model.config, attention="splash")
  layout = make_row_layout(config.batch, parts.shape, "splash", parts.placement.mesh)
  packed = programs.pack_full_length(parts.shape, layout)
  count = int(packed.num_micro_batches)
  sizes = {name: getattr(network, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
  assert 2 < count < len(packed.tokens) and packed.tokens.shape[1:] == (1, 1536)
  assert packed.num_short == 2
  row = lambda i: jax.tree.map(lambda x: x[i, :, : 512 if i >= count - 2 else 1536], packed.rows)
  of_row = [splash_cost(row(i), **sizes) for i in range(count)]
  assert of_row[0].forward_flops > of_row[-1].forward_flops  # the last rows are short
  kernels = report.attention_kernel_costs(network, packed, tensor=1)
  call = item("attention", "custom-call", target="tpu")
  for name, of in (("fwd", "forward"), ("dkv", "backward")):
    flops, hbm_bytes = kernels[f"splash_mha_{name}"](call)
    assert flops == pytest.approx(sum(getattr(c, f"{of}_flops") for c in of_row) / count)
    assert hbm_bytes == pytest.approx(sum(getattr(c, f"{of}_bytes") for c in of_row) / count, 1e-2)


def test_a_program_of_which_more_than_a_hundredth_is_not_counted_has_no_costs(monkeypatch):
  """The compiler makes a few products elementwise; of one that it writes otherwise none count."""
  counted = 2 * 64**3
  kernel = jax.ShapeDtypeStruct((64, 64), np.float32)
  program = jax.jit(lambda x: x @ x).lower(kernel).compile()
  text = programs.CompiledText(program, program.as_text(), "", 1.0)
  monkeypatch.setattr(report, "compile_with_text", lambda name, lower: text)
  cost = lambda useful: report.program_cost(
    "update", None, "v5e:1x1", report.Counts(useful_flops={"update": useful})
  )
  assert cost(1.009 * counted)["executed_flops"] == counted
  with pytest.raises(hlo.CostsError, match="costs of the update are not known"):
    cost(1.011 * counted)


def test_a_loop_of_unknown_length_is_listed():
  loop = item("gram", hlo.OPEN_LOOP, times=2, op_name="eigh/while")
  found = report.cost([*ITEMS, loop], CHIP, useful_flops=1.0, memory={})
  assert found["loops_of_unknown_length"] == [dict(part="gram", op_name="eigh/while", times=2)]
  text = report.format_markdown(CONDITIONS, {"update": found})
  assert "Loops whose length depends on the data" in text and "| gram | eigh/while | 2 |" in text


def test_useful_work_is_that_of_full_lengths_on_every_chip():
  config = tiny.config(mesh__data=2)
  parts = programs.build_shapes_only(config, sharding.make_mesh(data=2))
  network, lengths = parts.model.config, ([8] * 8, [[4] * 4] * 8)
  longest = workload.longest().draw(parts.shape, 0)
  found = report.useful_flops(longest, network, parts.placement, parts.programs.engine)
  assert found["update"] == update_flops(network, *lengths) / 2
  # One burst in every slot, here the whole of the responses, for prompts that are cached.
  responses = [forward_flops(network, [8] * 32, [[length]] * 32) for length in (4, 0)]
  assert found["generation"] == (responses[0] - responses[1]) / 2


@pytest.fixture(scope="module")
def dialogues():
  """Parts of a tiny run on dialogues: 8 prompts of 8 tokens, each with 4 responses of 40."""
  environment = dict(environment__name="guess(low=1, high=7)", environment__max_turns=3)
  config = tiny.config(max_response_length=40, mesh__data=2, **environment)
  return programs.build_shapes_only(config, sharding.make_mesh(data=2))


LENGTHS = "dialogue(turns=3, policy=5, reply=10, sigma=0)"


def test_the_head_of_dialogues_computes_chunks_of_the_policys_tokens(dialogues):
  """Few places are one chunk, computed as a whole; of more only as many chunks as are wanted."""
  packed, counts = ahead_of_time.count(dialogues, LENGTHS)
  layout, policy = dialogues.placement.row_layout, 8 * 4 * 15
  assert np.sum(packed.places >= 0) == policy
  assert counts.loops[rf"wanted_of_{layout.rows_per_device * layout.length}/while$"] == 1
  assert [wanted_chunks(5000, wanted, 2048) for wanted in (1, 1667, 1668, 5000)] == [1, 1, 2, 3]
  assert wanted_chunks(2048, 1, 2048) == wanted_chunks(2048, 2048, 2048) == 1
  with pytest.raises(ValueError, match=r"config\.environment\.max_turns = 3; raise max_turns, or"):
    ahead_of_time.count(dialogues, LENGTHS.replace("turns=3", "turns=4"))


def test_useful_work_of_dialogues_has_the_head_at_the_policys_tokens_and_a_prefill(dialogues):
  network, found = dialogues.model.config, ahead_of_time.count(dialogues, LENGTHS)[1].useful_flops
  lengths = [8] * 8, np.full((8, 4), 35)
  expected = update_flops(network, *lengths, predicted=np.full((8, 4), 15))
  assert found["update"] == expected / 2 < update_flops(network, *lengths) / 2
  rows, length = dialogues.programs.engine.longest_prefill()
  assert length >= 48 and rows == 8
  assert found["prefill"] == forward_flops(network, [48] * 8, [[0]] * 8) / 2


def test_the_report_names_its_lengths_and_leaves_out_what_is_small():
  found = report.cost(ITEMS, CHIP, useful_flops=1.0, memory={"temporary": 2**31})
  text = report.format_markdown(CONDITIONS, {"update": found})
  assert "8 prompts of 8 tokens, each with 4 responses of 4 tokens" in text
  assert "| head | all-gather | bf16 | 0.005 | 1 |" in text
  assert "| layers | all-gather" not in text
  assert "| update |" in text and "| 2.0 |" in text and "interconnect |" in text
  assert "Omitted, too large for a chip's memory: generation." in text


def test_numbers_and_tables_are_written(tmp_path):
  found = report.cost(ITEMS, CHIP, useful_flops=1.0, memory={"temporary": 2**31})
  report.write_report(tmp_path / "new", CONDITIONS, {"update": found})
  written = json.loads((tmp_path / "new" / "costs_v5e_2x2.json").read_text(encoding="utf-8"))
  assert written == {"conditions": CONDITIONS, "costs": {"update": found}}
  text = (tmp_path / "new" / "costs_v5e_2x2.md").read_text(encoding="utf-8")
  assert text == report.format_markdown(CONDITIONS, {"update": found}) + "\n"


@pytest.mark.parametrize(
  ("topology", "message"),
  [
    (None, "--mode=costs needs --topology"),
    ("v2:2x2", r"chip 'v2' .*; allowed are \['a100', .*'tpu7x', 'v4'"),
  ],
)
def test_what_a_report_needs(topology, message):
  with pytest.raises(ValueError, match=message):
    choose.prepare_command("costs", tiny.get_config(), None, None, topology)


@pytest.mark.parametrize(
  ("lengths", "message"),
  [
    ("lognormal(mean=3, prompt=9)", r"prompt = 9 is more than config\.max_prompt_length = 8"),
    ("dialogue(turns=2, policy=2, reply=2)", r"config\.environment\.name is empty"),
  ],
)
def test_impossible_lengths_are_refused_before_anything_is_built(lengths, message):
  with pytest.raises(ValueError, match=message):
    choose.prepare_command("costs", tiny.config(), None, None, "v5e:1x1", lengths=lengths)


def test_other_modes_take_no_topology():
  with pytest.raises(ValueError, match="--topology goes with --mode=fits, costs or tune, not"):
    choose.prepare_command("train", tiny.get_config(), "runs/x", None, "v5e:2x2")


def test_the_peaks_are_in_their_units():
  """Some hundred operations for a byte of HBM, thousands for one that is received."""
  for chip in CHIPS.values():
    assert 100 < chip.flops / chip.hbm_bytes_per_s < 1000
    assert 700 < chip.flops / chip.interconnect_bytes_per_s < 5000
