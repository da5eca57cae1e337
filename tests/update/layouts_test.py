"""Updates of every kind in rows, micro-batches and on meshes are those of the padded batch."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from oracles.updates import (
  CONFIG,
  G,
  P,
  T,
  gradient_of,
  in_rows,
  make_batch,
  make_method,
  relative_distance,
  small_model,
)

from rlvr_jax import advantages, distillation, geometry, losses, reweighting
from rlvr_jax.ops.reductions import values
from rlvr_jax.ops.veto import negative_advantage_veto
from rlvr_jax.train.cluster import sharding
from rlvr_jax.update.teaching import Teaching

pytestmark = pytest.mark.usefixtures("x64")
TERMS = dict(reference_kl=0.1, entropy_bonus=0.01)
VETO = negative_advantage_veto(threshold=0.8)


def taught(name, **terms):
  made = getattr(distillation, name)()
  return dict(teaching=Teaching(made, 0.5, 1.0, temperature=1.0, names=("teacher",)), **terms)


METHODS = {
  "terms": TERMS,
  "constant": dict(aggregation="constant", **TERMS),
  "sequence_mean": dict(aggregation="sequence_mean", **TERMS),
  "sequence_sum": dict(aggregation="sequence_sum", **TERMS),
  "salt": dict(reweighting=reweighting.salt(), gram=geometry.streaming()),
  "salt of groups": dict(reweighting=reweighting.salt(scope="group"), gram=geometry.streaming()),
  "salt, sampled": dict(reweighting=reweighting.salt(), gram=geometry.streaming(feature="sampled")),
  "salt, sketch": dict(
    reweighting=reweighting.salt(),
    gram=geometry.sketch(copies=2, hidden_size=8, vocabulary_size=8),
  ),
  "salt, per rollout": dict(reweighting=reweighting.salt(), gram=geometry.per_rollout()),
  # Advantages that need to know the policy.
  "otb": dict(advantage=advantages.otb(truncation=2.0), temperature=0.8),
  "opob": dict(advantage=advantages.opob(), gram=geometry.streaming(), temperature=0.8),
  # m2po's bounds are statistics of the full batch's coefficients, the teacher's part included.
  "opd": taught("opd", loss=losses.m2po(), veto=VETO, reference_kl=0.1),
  "opd_score": taught("opd_score", veto=VETO),
  # The teacher is a network of another shape, whose forward pass is a part of the update.
  "kl": taught("kl"),
  "vopd": taught("vopd"),
}
QUICK = {("terms", "mesh"), ("opd", "micro-batches")}


def layouts():
  """Every method in rows, micro-batches and on a mesh; some also in short rows and on others."""
  for name in METHODS:
    more = ["short rows"] if name.startswith("salt") else []
    more += ["data", "fsdp", "fsdp and tensor"] if name == "terms" else []
    for layout in ["rows", "micro-batches", "mesh", *more]:
      marks = () if (name, layout) in QUICK else pytest.mark.slow
      yield pytest.param(name, layout, marks=marks, id=f"{name}-{layout}")


MESHES = {
  "mesh": dict(data=2, fsdp=2, tensor=2),
  "short rows": dict(data=2, fsdp=2, tensor=2),
  "data": dict(data=8),
  "fsdp": dict(fsdp=8),
  "fsdp and tensor": dict(fsdp=4, tensor=2),
}


def teacher_model(mesh=None):
  fields = dict(compute_dtype="float64", param_dtype="float64", width=24, num_layers=1)
  return small_model(dataclasses.replace(CONFIG, **fields), mesh)


@functools.cache
def method_of(name, mesh=None):
  terms = dict(METHODS[name])
  if terms.get("teaching") is not None and terms["teaching"].distillation.divergence is not None:
    terms["teaching"] = terms["teaching"]._replace(model=teacher_model(mesh))
  model, temperature = make_method("float64").model, terms.get("temperature", 1.0)
  context = geometry.GramContext(model, temperature, mesh)
  return make_method("float64", mesh, gram_context=context, **terms)


@functools.cache
def arguments():
  """(batch with a teacher's log-probabilities, parameters, a teacher) on the host."""
  rng, batch = np.random.default_rng(1), make_batch(np.float64)
  batch = dataclasses.replace(
    batch,
    teacher_logprobs=rng.normal(size=(P, G, T)) * 0.3 - 3.4,
    teacher_entropy=np.full((P, G, T), 0.7),
  )
  params = make_method("float64").model.init(jax.random.key(0))
  # Far enough from uniform that norms and energies differ.
  params = jax.tree.map(lambda x: 2 * x, params)
  return batch, params, (teacher_model().init(jax.random.key(7)), {})


@functools.cache
def padded(name):
  batch, params, teacher = arguments()
  return gradient_of(method_of(name), batch, params, teacher=teacher)


@pytest.mark.parametrize(("name", "layout"), [*layouts()])
def test_an_update_is_that_of_the_padded_batch(name, layout):
  """On one device: its value, gradient and metrics."""
  batch, params, teacher = arguments()
  mesh = sharding.make_mesh(**MESHES[layout]) if layout in MESHES else None
  if layout == "short rows":
    laid = in_rows(batch, rows=1, length=26, mesh=mesh, has_short_rows=True)
    assert laid.packed.num_short > 0
  else:
    rows = {"rows": 10**6, "micro-batches": 2}.get(layout, 1)
    laid = in_rows(batch, rows=rows, mesh=mesh, several=layout != "rows")
  if mesh is not None:
    place = lambda tree: jax.device_put(tree, sharding.state_shardings(tree, mesh))
    params, teacher = place(params), (place(teacher[0]), {})
  (loss, metrics), gradient = padded(name)
  (found, others), other = gradient_of(method_of(name, mesh), laid, params, teacher=teacher)
  np.testing.assert_allclose(found, loss, rtol=1e-9)
  assert relative_distance(sharding.to_host(other), gradient) < 1e-9
  found = values(others)
  for metric, value in values(metrics).items():
    if not metric.startswith("gram/"):  # what the Gram matrix cost, which differs
      np.testing.assert_allclose(found[metric], value, rtol=1e-7, atol=1e-12, err_msg=metric)
