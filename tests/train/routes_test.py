"""Runs of a mixture whose routes are recorded or replayed: what they write, repeat and refuse."""

import shutil

import numpy as np
import pytest
from train import tiny

from rlvr_jax.commands import ahead_of_time
from rlvr_jax.commands.train import train
from rlvr_jax.costs.programs import build_for
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.train.setup.build import build

LAYERS, EXPERTS, CHOSEN = 1, 4, 2
NETWORK = dict(num_layers=LAYERS, width=32, mlp_width=64, unroll_layers=1)
MIXTURE = NETWORK | dict(num_experts=EXPERTS, experts_per_token=CHOSEN, expert_width=16)


def config(routing="replayed", **fields):
  """The tiny run with a mixture: four updates, two of them stale, half of them heated."""
  settings = dict(
    model__overrides=MIXTURE,
    model__routing=routing,
    num_updates=4,
    evaluation__every=4,
    schedule="fixed_lag(lag=1)",
    sources__temperature__fraction=0.5,
    checkpoint__keep=9,
  )
  return tiny.config(**settings | fields)


def get_config():
  """With experts in the second layer alone: this file is a configuration, too."""
  mixed = MIXTURE | dict(num_layers=2, sparse_layers=(False, True))
  return config(model__overrides=mixed)


@pytest.fixture(scope="module", name="replayed")
def _replayed(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("runs") / "replayed"
  train(build(config(proximal_every=1, loss="decoupled_ppo")), workdir)
  return workdir


@pytest.fixture(scope="module", name="compared")
def _compared(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("runs") / "compared"
  train(build(config("recomputed", model__record_routes=True, diagnostics__every=2)), workdir)
  return workdir


def arrays_of(workdir, number=0):
  return tiny.read_stored(RolloutStore(workdir / "rollouts", writable=False), number)


@pytest.mark.slow
def test_the_store_has_the_routes_of_every_place(replayed):
  """Of both sources, once for each prompt."""
  arrays, info, _ = arrays_of(replayed)
  assert info["routes"] == [LAYERS, EXPERTS, CHOSEN]
  routes, prompts = arrays["routes"], arrays["prompt_routes"]
  assert routes.dtype == prompts.dtype == np.uint8
  assert routes.shape == (*arrays["tokens"].shape, LAYERS, CHOSEN)
  real = arrays["mask"] > 0
  chosen = np.sort(routes[real], axis=-1)
  assert (chosen[..., 1] > chosen[..., 0]).all() and chosen.max() < EXPERTS
  assert not routes[~real].any()
  S = prompts.shape[1]
  before_last = np.arange(S) >= S - arrays["prompts.lengths"][:, None]
  before_last[:, -1] = False
  assert (prompts[before_last][..., 0] != prompts[before_last][..., 1]).all()
  assert not prompts[~before_last].any()


@pytest.mark.slow
def test_what_runs_say_of_routes(replayed, compared):
  """The first update is on-policy, where float32 changes no choice; later ones are stale."""
  for workdir in (replayed, compared):
    records = tiny.records(workdir, "train")
    assert records[0]["routing/changed"] < 1e-3
    assert 0 < records[-1]["routing/changed"] <= records[-1]["routing/changed_tokens"] < 0.5
    assert records[0]["agreement/policy_mean"] < 1e-5
    of_token = LAYERS * CHOSEN
    assert of_token < records[0]["routing/bytes_per_token"] < 4 * of_token
  by_layer = {r["step"]: r.get("routing/changed_layer_0") for r in tiny.records(compared, "train")}
  assert by_layer[1] is not None or by_layer[3] is not None


@pytest.mark.slow
@pytest.mark.parametrize("step", [1])
def test_a_resumed_run_repeats_itself(replayed, tmp_path, step):
  """From routes in the store, and from those that are sampled again."""
  cut = tmp_path / "cut"
  shutil.copytree(replayed, cut)
  for later in range(step + 1, 5):
    shutil.rmtree(cut / "checkpoints" / str(later))
  for shard in (cut / "rollouts").glob("0*"):
    if int(shard.name.partition(".")[0]) > step:
      shard.unlink()
  train(build(config(proximal_every=1, loss="decoupled_ppo")), cut)
  assert tiny.records(cut, "train") == tiny.records(replayed, "train")
  assert tiny.rollouts(cut) == tiny.rollouts(replayed)


DIALOGUES = dict(
  task=dict(name="guess", kwargs=dict(low=1, high=7, turns=3, held_out_size=8)),
  environment__name="guess(low=1, high=7)",
  environment__max_turns=3,
  environment__processes=1,
  max_prompt_length=12,
  max_response_length=9,
)


@pytest.mark.slow
@pytest.mark.parametrize(
  "fields",
  [
    DIALOGUES,
    dict(mesh=dict(data=2, fsdp=2, tensor=2), batch__tokens_per_micro_batch=64),
  ],
  ids=["dialogues", "mesh"],
)
def test_replay_goes_with_replies_and_meshes(fields, tmp_path):
  changed = tiny.config()
  of_run = {"sources__temperature__fraction": 0.5, "num_updates": 4} | fields
  of_run |= {"model__routing": "replayed", "model__overrides": MIXTURE}
  with changed.unlocked():
    changed.task = of_run.pop("task", changed.task)
    changed.update_from_flattened_dict({k.replace("__", "."): v for k, v in of_run.items()})
  train(build(changed), tmp_path / "run")
  records = tiny.records(tmp_path / "run", "train")
  assert [record["step"] for record in records] == [1, 2, 3, 4]
  assert all(np.isfinite(record["loss/surrogate"]) for record in records)
  assert records[0]["agreement/policy_mean"] < 1e-4
  assert records[0]["routing/changed"] < 1e-3


@pytest.mark.slow
def test_routes_of_another_run_are_replayed_or_refused(compared, tmp_path):
  store = str(compared / "rollouts")
  offline = dict(
    sources__recorded=dict(fraction=1.0, store=store), sources__temperature__fraction=0.0
  )
  workdir = tmp_path / "offline"
  train(build(config(**offline)), workdir)
  arrays, theirs = arrays_of(workdir)[0], arrays_of(compared)[0]
  np.testing.assert_array_equal(arrays["routes"], theirs["routes"])
  assert "routing/changed" in tiny.records(workdir, "train")[0]
  # Without routes the store is read as well, and its routes are left there.
  plain = build(config("recomputed", **offline)).sources.recorded.take(0, 8)
  assert not {"routes", "prompt_routes"} & plain[0].arrays.keys()

  without = tmp_path / "without"
  groups, info = RolloutStore(compared / "rollouts", writable=False).read(0)
  del info["routes"]
  for group in groups:
    del group.arrays["routes"], group.arrays["prompt_routes"]
  with RolloutStore(without, writable=True) as writer:
    writer.write(0, groups, info)
  lacking = dict(sources__recorded=dict(fraction=0.5, store=str(without)))
  with pytest.raises(
    ValueError, match="has no routes, but this run needs routes of 1 layers with 2 of"
  ):
    build(config(**lacking))
  build(config("recomputed", **lacking))
  with pytest.raises(ValueError, match=r"has routes of 1 layers with 2 of 4 .* with 3 of 4"):
    build(config(model__overrides=MIXTURE | dict(experts_per_token=3), **offline))
  other = dict(sources__checkpoint=dict(fraction=0.5, workdir=str(compared), step=-1))
  with pytest.raises(ValueError, match=r"are \(1, 4, 2\), but this run's are \(1, 4, 3\)"):
    build(config(model__overrides=MIXTURE | dict(experts_per_token=3), **other))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(routing="replay"), "routing = 'replay' is unknown"),
    (
      dict(model__overrides=NETWORK),
      "routing = 'replayed' needs a mixture of experts, but num_experts = 0",
    ),
    (
      dict(routing="recomputed", model__record_routes=True, model__overrides=NETWORK),
      "record_routes = True needs a mixture",
    ),
    (dict(gram="per_rollout"), "config.gram = 'per_rollout' .* one by one"),
    (dict(diagnostics__compared="head"), "diagnostics.compared = 'head' .* set .*compared = ''"),
  ],
)
def test_mistakes_are_named_before_anything_runs(fields, message):
  with pytest.raises(ValueError, match=message):
    build(config(**fields))


@pytest.mark.slow
def test_the_memory_of_routes_is_said():
  tables = {}
  for routing in ("recomputed", "replayed"):
    c = config(routing)
    tables[routing] = ahead_of_time.memory_tables(build_for(c, None), compiled=False)
  for name, table in tables["replayed"].items():
    added = dict(table.items() - tables["recomputed"][name].items())
    assert added.keys() == {f"routes, {LAYERS * CHOSEN} B per token"}, name
    assert min(added.values()) > 0
