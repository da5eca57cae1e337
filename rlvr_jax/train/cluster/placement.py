"""The meshes of a run, and the shardings of the run's arrays on these meshes."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from rlvr_jax.rollouts.packing import RowLayout, pack_batch
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Params, TrainBatch, TrainState


@dataclasses.dataclass(frozen=True)
class Placement:
  """The devices of a run, and the shapes, dtypes and shardings of its arrays.

  Attributes:
    mesh: the mesh for updates and evaluations.
    generation_mesh: the mesh for sampling rollouts: `mesh` itself, or the mesh of
      `config.generation_mesh`.
    compared_mesh: the mesh for comparing sampler and trainer: `mesh` if the devices of `mesh` also
      sample rollouts; otherwise a mesh of the devices of `generation_mesh`.
    row_layout: the row layout of the rollouts of a training batch.
    compared_layout: the row layout for comparing sampler and trainer.
    state: the train state, as shapes, dtypes and shardings.
    base: all parameters of the network, as shapes, dtypes and shardings.
    frozen: the parameters that are not trained, in the same form; {} if all are trained.
    teachers: for each teacher, in the same form, the parameters that only this teacher has.
    scored_groups: largest number of groups in one forward pass on the devices of `generation_mesh`.
  """

  mesh: Mesh
  generation_mesh: Mesh
  compared_mesh: Mesh
  row_layout: RowLayout
  compared_layout: RowLayout
  state: TrainState
  base: Params
  frozen: Params
  scored_groups: int
  teachers: tuple[Params, ...] = ()

  def to_devices(self, tree: Any) -> Any:
    """Places NumPy arrays of a batch on the devices of `mesh`."""
    return sharding.to_devices(tree, sharding.batch_sharding(self.mesh))

  def to_generation(self, tree: Any) -> Any:
    """Places NumPy arrays of a batch on the devices of `generation_mesh`."""
    return sharding.to_devices(tree, sharding.batch_sharding(self.generation_mesh))

  def pack_to_devices(self, batch: TrainBatch) -> TrainBatch:
    """Packs a batch of NumPy arrays into rows, and places it on the devices of `mesh`."""
    layout = self.row_layout
    own_rows = sharding.rows_of_process(self.mesh, layout.devices * layout.rows_per_device)
    return sharding.batch_to_devices(pack_batch(batch, layout, own_rows), self.mesh)

  def pack_to_compare(self, batch: TrainBatch) -> TrainBatch:
    """Packs at most `compared_groups` groups of NumPy arrays; places them on `compared_mesh`."""
    packed = pack_batch(batch, self.compared_layout)
    return sharding.batch_to_devices(packed, self.compared_mesh, groups=PartitionSpec())

  @property
  def compared_groups(self) -> int:
    """Number of groups of each source on which sampler and trainer are compared."""
    return self.compared_layout.devices
