"""Counts of programs written by hand, and of compiled ones whose costs are known exactly."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlvr_jax.costs import hlo
from rlvr_jax.train.cluster import sharding

PARTS = {"layers": "layers|blocks", "attention": "attention"}


def module(entry, *others, partitions=1):
  """The text of a program; computations are given as (header, lines)."""
  written = []
  for header, lines in (*others, ("ENTRY %main (x: f32[8]) -> f32[8]", entry)):
    written += [f"{header} {{", *(f"  {line}" for line in lines), "}", ""]
  return "\n".join([f"HloModule m, num_partitions={partitions}", "", *written])


def items(*args, parts=PARTS, **kwargs):
  return {item.name: item for item in hlo.walk(module(*args, **kwargs), parts)}


LOOP = "body=%body, condition=%condition"
CARRY = "(s32[], f32[4,8], f32[8,8])"


def loop_body(step):
  return (
    f"%body (p: {CARRY}) -> {CARRY}",
    [
      f"%p = {CARRY} parameter(0)",
      "%i = s32[] get-tuple-element(%p), index=0",
      f"%step = s32[] constant({step})",
      "%next = s32[] add(%i, %step)",
      "%a = f32[4,8] get-tuple-element(%p), index=1",
      "%w = f32[8,8] get-tuple-element(%p), index=2",
      "%product = f32[4,8] dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
      f"ROOT %t = {CARRY} tuple(%next, %product, %w)",
    ],
  )


def loop_condition(limit, direction):
  return (
    f"%condition (p: {CARRY}) -> pred[]",
    [
      f"%p = {CARRY} parameter(0)",
      "%i = s32[] get-tuple-element(%p), index=0",
      f"%limit = s32[] constant({limit})",
      f"ROOT %c = pred[] compare(%i, %limit), direction={direction}",
    ],
  )


def loop_entry(first):
  return [
    "%x = f32[4,8] parameter(0)",
    "%w = f32[8,8] parameter(1)",
    f"%first = s32[] constant({first})",
    f"%t = {CARRY} tuple(%first, %x, %w)",
    f"%loop = {CARRY} while(%t), {LOOP}",
    "ROOT %out = f32[4,8] get-tuple-element(%loop), index=1",
  ]


@pytest.mark.parametrize(
  ("first", "limit", "runs"),
  [(0, 5, 5), (3, 8, 5), (4, 4, 0)],
)
def test_a_loop_counts_as_often_as_it_runs(first, limit, runs):
  """It counts up by one, as jax's loops do; TPUs' compiler does not state its length."""
  found = items(loop_entry(first), loop_body(1), loop_condition(limit, "LT"))
  assert found["product"].times == runs
  assert found["product"].flops == runs * 2 * 4 * 8 * 8
  assert found["product"].hbm_bytes == runs * 4 * (4 * 8 + 8 * 8 + 4 * 8)


def test_a_length_that_the_compiler_states_counts():
  stated = ', backend_config={"known_trip_count":{"n":"7"}}'
  entry = [line + stated * ("while(" in line) for line in loop_entry(0)]
  text = module(entry, loop_body(2), loop_condition(14, "LT"))
  assert {item.times for item in hlo.walk(text, PARTS) if item.flops} == {7}
  assert hlo.find_loops(text) == [hlo.LoopLength(7, is_fixed=True)]


@pytest.mark.parametrize("limit", ["parameter(1)", "constant(16)"])
def test_a_loop_that_may_end_earlier_counts_to_its_limit(limit):
  """As a burst of generation: its condition is a fusion, and its counter a copy of a constant."""
  fused = "%fused (i: s32[], limit: s32[]) -> pred[]", [
    "%i = s32[] parameter(0)",
    f"%limit.1 = s32[] {limit}",
    "%below = pred[] compare(%i, %limit.1), direction=LT",
    "%goes_on = pred[] custom-call()",
    "ROOT %both = pred[] and(%below, %goes_on)",
  ]  # fmt: skip
  condition = f"%condition (p: {CARRY}) -> pred[]", [
    f"%p = {CARRY} parameter(0)",
    "%i = s32[] get-tuple-element(%p), index=0",
    "%limit = s32[] constant(16)",
    "ROOT %c = pred[] fusion(%i, %limit), kind=kLoop, calls=%fused",
  ]  # fmt: skip
  entry = [
    "%zero = s32[] constant(0)",
    *(line.replace("constant(0)", "copy(%zero)") for line in loop_entry(0)),
  ]
  text = module(entry, fused, loop_body(1), condition)
  assert {item.times for item in hlo.walk(text, PARTS) if item.flops} == {16}
  assert hlo.find_loops(text) == [hlo.LoopLength(16, is_fixed=False)]


def test_a_loop_whose_length_the_data_set_counts_once_and_is_named():
  header, lines = loop_condition(0, "LT")
  lines = [line.replace("constant(0)", "custom-call()") for line in lines]
  found = items(loop_entry(0), loop_body(1), (header, lines))
  assert (found["loop"].opcode, found["loop"].times) == (hlo.OPEN_LOOP, 1)
  assert (found["product"].times, found["product"].flops) == (1, 2 * 4 * 8 * 8)
  entry = [
    line + ', metadata={op_name="f/tiles/while"}' * ("while(" in line) for line in loop_entry(0)
  ]
  text = module(entry, loop_body(1), (header, lines))
  given = {
    item.name: item.times for item in hlo.walk(text, PARTS, {"rows/while$": 3, "tiles/while$": 7})
  }
  assert given == {"product": 7, "next": 7}


def with_elements_as_operands(text):
  """The text as newer compilers write it: %p#0 for an instruction that gets element 0 of %p."""
  get = re.compile(r"  %(\w+) = .* get-tuple-element\((\S+)\), index=(\d+)\n")
  computations = text.split("\n\n")
  for number, computation in enumerate(computations):
    while match := get.search(computation):
      name, of, index = match.groups()
      computation = re.sub(rf"%{name}\b", f"{of}#{index}", get.sub("", computation, count=1))
    computations[number] = computation
  return "\n\n".join(computations)


def test_an_element_of_a_tuple_may_be_written_as_an_operand():
  header, lines = loop_body(1)
  nested = f"({CARRY}, s32[])"
  entry = [
    *loop_entry(3)[:-1],
    f"%both = {nested} tuple(%loop, %first)",
    f"%again = {CARRY} get-tuple-element(%both), index=0",
    "%last = f32[4,8] get-tuple-element(%again), index=1",
    "ROOT %out = f32[4,8] negate(%last)",
  ]
  text = module(entry, (header, lines), loop_condition(8, "LT"))
  newer = with_elements_as_operands(text)
  assert "get-tuple-element" not in newer and "compare(%p#0, %limit)" in newer
  assert "dot(%p#1, %p#2)" in newer and "negate(%both#0#1)" in newer
  found = hlo.walk(newer, PARTS)
  assert found == hlo.walk(text, PARTS)
  assert {item.name: (item.times, item.hbm_bytes, item.flops) for item in found} == {
    "product": (5, 5 * 4 * (4 * 8 + 8 * 8 + 4 * 8), 5 * 2 * 4 * 8 * 8),
    "next": (5, 5 * 3 * 4, 0),
    "out": (1, 2 * 4 * 4 * 8, 0),
  }
  assert hlo.find_loops(newer) == [hlo.LoopLength(5, is_fixed=False)]


@pytest.mark.parametrize("operand", ["%x@1", "%y#0"])
def test_an_operand_in_a_form_that_is_not_known_is_refused(operand):
  told = rf"an unknown form: no earlier instruction defines the operand {operand[:2]}"
  with pytest.raises(ValueError, match=told):
    items(["%x = (f32[8], f32[8]) parameter(0)", f"ROOT %out = f32[8] negate({operand})"])


def test_a_text_without_a_program_is_refused():
  with pytest.raises(ValueError, match="no ENTRY"):
    hlo.walk("HloModule m", PARTS)


def test_fused_slices_count_by_slice_and_fast_memory_does_not():
  stack, one = "f32[100,8]{1,0:T(8,128)}", "f32[1,8]{1,0:T(8,128)}"
  sliced = (
    "%sliced (a: f32[100,8], i: s32[]) -> f32[1,8]",
    [
      f"%a = {stack} parameter(0)",
      "%i = s32[]{:S(6)} parameter(1)",
      f"ROOT %s = {one} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={{1,8}}",
    ],
  )
  updated = (
    "%updated (a: f32[100,8], u: f32[1,8], i: s32[]) -> f32[100,8]",
    [
      f"%a = {stack} parameter(0)",
      f"%u = {one} parameter(1)",
      "%i = s32[]{:S(6)} parameter(2)",
      f"ROOT %d = {stack} dynamic-update-slice(%a, %u, %i, %i)",
    ],
  )
  found = items(
    [
      f"%x = {stack} parameter(0)",
      "%i = s32[]{:S(6)} parameter(1)",
      f"%read = {one} fusion(%x, %i), kind=kLoop, calls=%sliced",
      f"%written = {stack} fusion(%x, %read, %i), kind=kLoop, calls=%updated",
      "%near = f32[100,8]{1,0:T(8,128)S(1)} copy(%written)",
      "ROOT %far = f32[100,8]{1,0:T(8,128)S(1)} negate(%near)",
    ],
    sliced,
    updated,
  )
  assert found["read"].hbm_bytes == 2 * 8 * 4
  assert found["written"].hbm_bytes == 2 * 8 * 4
  assert found["near"].hbm_bytes == 100 * 8 * 4  # read from HBM, written to fast memory
  assert found["far"].hbm_bytes == 0


def test_a_slice_of_the_same_memory_with_other_tiles_counts_as_a_slice():
  """As of caches in int8, whose slices a TPU multiplies in the same fusion."""
  stack, tiled = "s8[100,8]{1,0:T(32,128)(4,1)}", "s8[100,8]{1,0:T(8,128)(4,1)}"
  one = "s8[1,8]{1,0:T(8,128)(4,1)}"
  retiled = (
    "%retiled (a: s8[100,8]) -> s8[100,8]",
    [f"%a = {stack} parameter(0)", f"ROOT %c = {tiled} copy(%a)"],
  )
  sliced = (
    "%sliced (a: s8[100,8], i: s32[]) -> s8[1,8]",
    [
      f"%a = {stack} parameter(0)",
      f"%b = {tiled} fusion(%a), kind=kLoop, {hlo._SAME_MEMORY}, calls=%retiled",
      "%i = s32[]{:S(6)} parameter(1)",
      f"ROOT %s = {one} dynamic-slice(%b, %i, %i), dynamic_slice_sizes={{1,8}}",
    ],
  )
  entry = [
    f"%x = {stack} parameter(0)",
    "%i = s32[]{:S(6)} parameter(1)",
    f"ROOT %read = {one} fusion(%x, %i), kind=kLoop, calls=%sliced",
  ]
  assert items(entry, retiled, sliced)["read"].hbm_bytes == 2 * 8


def test_slices_that_are_moved_into_fast_memory():
  found = items([
    "%x = f32[100,8]{1,0:T(8,128)} parameter(0)",
    "%near = f32[1,8]{1,0:T(8,128)S(1)} slice(%x), slice={[0:1], [0:8]}",
    "%i = s32[]{:S(6)} parameter(1)",
    "%far = f32[100,8]{1,0:T(8,128)} dynamic-update-slice(%x, %near, %i, %i)",
    "%whole = (f32[100,8]{1,0:S(1)}, f32[100,8]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%far)",
    "ROOT %done = f32[100,8]{1,0:S(1)} copy-done(%whole)",
  ])  # fmt: skip
  assert (found["near"].hbm_bytes, found["far"].hbm_bytes) == (32, 32)
  assert found["whole"].hbm_bytes == 100 * 8 * 4


@pytest.mark.parametrize(
  "groups",
  ["{{0,1,2,3},{4,5,6,7}}", "[2,4]<=[8]", "mesh['a'=2,'b'=4] {'b'}", "mesh['a'=8] {'a':(1)4}"],
)
def test_bytes_that_a_device_receives(groups):
  group = f"replica_groups={groups}"
  found = items(
    [
      "%x = bf16[64] parameter(0)",
      f"%gathered = bf16[256] all-gather(%x), dimensions={{0}}, {group}",
      f"%reduced = bf16[64] all-reduce(%x), {group}, to_apply=%add",
      f"%scattered = bf16[16] reduce-scatter(%x), {group}, to_apply=%add",
      f"%exchanged = bf16[64] all-to-all(%x), {group}",
      "%sent = (bf16[64], bf16[64]) collective-permute-start(%x), source_target_pairs={{0,1}}",
      "ROOT %done = bf16[64] collective-permute-done(%sent)",
    ],
    partitions=8,
  )
  received = {name: item.received_bytes for name, item in found.items() if item.received_bytes}
  whole, share = 128, 3 / 4
  assert received == {
    "gathered": 3 * whole,
    "reduced": 2 * share * whole,
    "scattered": share * whole,
    "exchanged": share * whole,
    "sent": whole,
  }
  assert {item.dtype for item in found.values()} == {"bf16"}


def test_replica_groups_that_are_not_understood_are_refused():
  with pytest.raises(ValueError, match="replica groups of r have an unknown form"):
    items(["%x = f32[8] parameter(0)", "ROOT %r = f32[8] all-reduce(%x), replica_groups=new"])


def test_a_collective_in_a_fusion_counts():
  """A TPU's compiler writes a reduce-scatter so."""
  fused = (
    "%all-reduce-scatter.1 (a: f32[64]) -> f32[16]",
    [
      "%a = f32[64] parameter(0)",
      "%r = f32[64] all-reduce(%a), replica_groups=[1,4]<=[4], to_apply=%add",
      "ROOT %s = f32[16] dynamic-slice(%r, %r), dynamic_slice_sizes={16}",
    ],
  )
  entry = [
    "%x = f32[64] parameter(0)",
    "ROOT %f = f32[16] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1",
  ]
  (item,) = items(entry, fused).values()
  assert (item.opcode, item.received_bytes) == ("reduce-scatter", 3 / 4 * 64 * 4)


def test_a_collective_that_runs_within_fusions_counts_at_its_start():
  """As the compiler for v5e writes it: in pieces, next to a product in the loop's body."""
  group = (
    'replica_groups=[1,4]<=[4], backend_config={"async_collective_fusion_config":{"flag":"1"}}'
  )
  gather = f"%g = f32[256,8] all-gather(%a), dimensions={{0}}, {group}"
  begin = "%begin (a: f32[64,8]) -> (f32[64,8], f32[256,8])", [
    "%a = f32[64,8] parameter(0)",
    gather,
    'ROOT %s = (f32[64,8], f32[256,8]) custom-call(%g), custom_call_target="AsyncCollectiveStart"',
  ]  # fmt: skip
  carry_on = (
    "%carry_on (a: f32[64,8], b: f32[256,8]) -> (f32[8,8], f32[64,8], f32[256,8])",
    [
      "%a = f32[64,8] parameter(0)",
      "%b = f32[256,8] parameter(1)",
      gather,
      "%x = f32[8,8] parameter(2)",
      "%p = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
      "ROOT %t = (f32[8,8], f32[64,8], f32[256,8]) tuple(%p, %a, %g)",
    ],
  )
  end = "%end (a: f32[64,8], b: f32[256,8]) -> f32[256,8]", [
    "%a = f32[64,8] parameter(0)",
    "%b = f32[256,8] parameter(1)",
    gather,
    'ROOT %d = f32[256,8] custom-call(%a, %b, %g), custom_call_target="AsyncCollectiveDone"',
  ]  # fmt: skip
  entry = [
    "%a = f32[64,8] parameter(0)",
    "%x = f32[8,8] parameter(1)",
    "%started = (f32[64,8], f32[256,8]) fusion(%a), kind=kCustom, calls=%begin",
    "%own = f32[64,8] get-tuple-element(%started), index=0",
    "%whole = f32[256,8] get-tuple-element(%started), index=1",
    "%along = (f32[8,8], f32[64,8], f32[256,8]) fusion(%own, %whole, %x), calls=%carry_on",
    "ROOT %ended = f32[256,8] fusion(%own, %whole), kind=kCustom, calls=%end",
  ]
  found = items(entry, begin, carry_on, end)
  own, whole, product = 4 * 64 * 8, 4 * 256 * 8, 4 * 8 * 8
  received = {name: item.received_bytes for name, item in found.items() if item.received_bytes}
  assert received == {"started": 3 * own}
  assert found["along"].hbm_bytes == 2 * product and found["along"].flops == 2 * 8**3
  assert found["ended"].hbm_bytes == 0
  assert found["started"].hbm_bytes == own + own + whole  # its result holds its operand too


def test_of_a_conditional_the_most_expensive_branch_counts():
  def branch(name, sizes):
    product = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return f"%{name} (x: f32[{sizes}]) -> f32[{sizes}]", [
      f"%x = f32[{sizes}] parameter(0)",
      f"ROOT %of_{name} = f32[{sizes}] {product}",
    ]

  entry = [
    "%i = s32[] parameter(0)",
    "%x = f32[8,8] parameter(1)",
    "ROOT %c = f32[8,8] conditional(%i, %x, %x), branch_computations={%small, %large}",
  ]
  found = items(entry, branch("small", "4,4"), branch("large", "8,8"))
  assert set(found) == {"of_large"}


def test_a_product_with_one_vector_is_a_sum_of_elementwise_products():
  """And the sum of a product's parts, by which a GPU splits it, does not count again."""
  name = 'metadata={op_name="jit(f)/layers/dot_general"}'
  found = items([
    "%x = f32[8,4] parameter(0)",
    "%y = f32[8,4] multiply(%x, %x)",
    f"%vector = f32[4] reduce(%y, %y), dimensions={{0}}, to_apply=%scalar_add.1, {name}",
    f"%parts = f32[4] reduce(%y, %y), to_apply=%dot.1.reduce_sub_computation, {name}",
    "ROOT %sum = f32[4] reduce(%y, %y), dimensions={0}, to_apply=%scalar_add.1",
  ])  # fmt: skip
  flops = {name: item.flops for name, item in found.items()}
  assert flops == {"y": 0, "vector": 2 * 8 * 4, "parts": 0, "sum": 0}


def test_batched_products_as_a_tpu_writes_them():
  """Batch dimensions 2×4, dilated: each output meets one of the taps."""
  found = items([
    "%a = bf16[2,4,128,64] parameter(0)",
    "%b = bf16[2,4,128,64] parameter(1)",
    "ROOT %c = f32[2,4,128,128] convolution(%a, %b),"
    " window={size=2x4 stride=1x3 lhs_dilate=2x4}, dim_labels=01bf_01oi->01bf",
  ])  # fmt: skip
  assert found["c"].flops == 2 * (2 * 4) * 128 * 128 * 64


def test_padding_of_a_convolution_is_no_work():
  """A dimension of the second factor, which the compiler slides over the first one."""
  found = items([
    "%a = bf16[128,64,1] parameter(0)",
    "%b = bf16[7,32,64] parameter(1)",
    "ROOT %c = bf16[128,7,32] convolution(%a, %b), window={size=7 pad=6_6 rhs_reversal=1},"
    " dim_labels=bf0_0oi->b0f",
  ])  # fmt: skip
  assert found["c"].flops == 2 * 128 * (7 * 32) * 64


def test_parts_are_the_innermost_scopes_and_those_of_the_loop():
  header, lines = loop_body(1)
  name = 'metadata={op_name="jit(f)/transpose(jvp(layers))/while/body/attention/dot_general"}'
  named = [f"{line}, {name}" if "dot(" in line else line for line in lines]
  outer = [f'{line}, metadata={{op_name="jit(f)/layers/while"}}' if "while(" in line else line
           for line in loop_entry(0)]  # fmt: skip
  condition = loop_condition(2, "LT")
  assert items(outer, (header, named), condition)["product"].part == "attention"
  assert items(outer, (header, lines), condition)["product"].part == "layers"
  assert items(loop_entry(0), (header, lines), condition)["product"].part == hlo.OTHER


def test_what_runs_asynchronously_counts_once():
  wrapped = (
    "%wrapped (x: f32[64]) -> f32[256]",
    [
      "%x = f32[64] parameter(0)",
      "ROOT %g = f32[256] all-gather(%x), dimensions={0}, replica_groups=[1,4]<=[4]",
    ],
  )
  entry = [
    "%x = f32[64] parameter(0)",
    "%s = ((f32[64]), f32[256]) async-start(%x), calls=%wrapped",
    "%u = ((f32[64]), f32[256]) async-update(%s), calls=%wrapped",
    "ROOT %d = f32[256] async-done(%u), calls=%wrapped",
  ]
  assert [item.received_bytes for item in items(entry, wrapped).values()] == [3 * 64 * 4]


def test_a_compiled_scan_on_a_mesh():
  """n layers, each of which gathers its kernel and multiplies by it, forward and back."""
  rows, width, layers, devices = 64, 32, 7, 4
  mesh = sharding.make_mesh(fsdp=devices)
  of = lambda shape, *spec: jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
  )

  def loss(kernels, x):
    def layer(x, kernel):
      whole = jax.lax.with_sharding_constraint(kernel, NamedSharding(mesh, PartitionSpec()))
      return jnp.tanh(x @ whole), None

    with jax.named_scope("layers"):
      return jnp.sum(jax.lax.scan(layer, x, kernels)[0])

  shapes = of((layers, width, width), None, "fsdp"), of((rows, width), "fsdp")
  compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
  found = hlo.walk(compiled.as_text(), PARTS)
  product = 2 * (rows // devices) * width * width
  assert sum(item.flops for item in found if item.part == "layers") == 3 * layers * product
  received = collections.Counter()
  for item in found:
    received[item.opcode] += item.received_bytes
  kernel = 4 * width * width
  assert received["all-gather"] % (layers * kernel * (devices - 1) / devices) == 0
  assert received["all-gather"] > 0


@pytest.mark.parametrize(("said", "cycles"), [("70", 70.0), (str(2**63 - 1), 0.0)])
def test_an_estimate_of_cycles_may_be_missing(said, cycles):
  config = f'backend_config={{"estimated_cycles":"{said}"}}'
  found = items(["%x = f32[8] parameter(0)", f"ROOT %out = f32[8] negate(%x), {config}"])
  assert found["out"].cycles == cycles


def test_an_instruction_over_several_lines_is_one():
  """A Pallas call has line breaks in its attributes; its metadata comes after them."""
  text = module([
    "%x = f32[8] parameter(0)",
    "%kernel = f32[8] custom-call(%x), frontend_attributes={kernel_metadata={",
    "ROOT %out = f32[8] negate(%kernel)",
  ])  # fmt: skip
  broken = '{kernel_metadata={\n"a":"{b}"\n}}, metadata={op_name="attention/splash"}'
  computations, entry = hlo.parse_program(text.replace("{kernel_metadata={", broken))
  assert computations[entry]["kernel"].op_name == "attention/splash"
  assert computations[entry]["out"].is_root


@pytest.mark.parametrize(
  "target, workspace, written",
  [("__cublas$lt$matmul", "s8[1000]{0}", 64), ("mine", "s8[1000]{0}", 1064)],
)
def test_the_workspace_of_a_library_is_not_written(target, workspace, written):
  found = items(
    [
      "%a = f32[4,8] parameter(0)",
      "%b = f32[8,4] parameter(1)",
      f"ROOT %product = (f32[4,4]{{1,0}}, {workspace}) custom-call(%a, %b),"
      f' custom_call_target="{target}", backend_config={{"lhs_contracting_dimensions":["1"]}}',
    ]
  )
  assert found["product"].hbm_bytes == 2 * 4 * 8 * 4 + written
  assert found["product"].flops == (2 * 4 * 4 * 8 if target != "mine" else 0)


@pytest.mark.parametrize(
  "line",
  [
    "ROOT %t = f32[8] fusion(%x), kind=kLoop, calls=%nowhere",
    "ROOT %t = f32[8] add",
  ],
)
def test_a_form_that_is_not_known_has_no_costs(line):
  with pytest.raises(hlo.CostsError, match="text, which has an unknown form: "):
    items(["%x = f32[8] parameter(0)", line])
