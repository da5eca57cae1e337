"""The compiled programs of an engine: the functions of `rollouts.decoder`, compiled as needed."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from rlvr_jax.ops.caches import CacheShape, Read
from rlvr_jax.ops.layers import ALL, Kind, rows_of, take_rows
from rlvr_jax.ops.precision import with_matmul_precision
from rlvr_jax.rollouts import decoder
from rlvr_jax.rollouts.decoder import DecodedModel, Emitted, Prefilled, Settings
from rlvr_jax.types import Array, Params, Sampling

_PREFILL_TOKENS = 8192  # the most tokens of a batch of prompts, padding included

Result = TypeVar("Result")


class Programs(NamedTuple):
  """The jitted functions of `rollouts.decoder`, with an engine's settings bound."""

  take_layer: jax.stages.Wrapped
  load_layer: dict[Kind, jax.stages.Wrapped]  # a function for each kind of layer
  load_others: jax.stages.Wrapped
  empty_slots: jax.stages.Wrapped
  prefill: jax.stages.Wrapped
  insert: jax.stages.Wrapped
  halt: jax.stages.Wrapped
  resume: jax.stages.Wrapped
  burst: jax.stages.Wrapped


class Ahead(Generic[Result]):
  """Compiles versions of a program in a thread, while the devices run another program."""

  def __init__(self, program: jax.stages.Wrapped):
    self._program = program
    self._compiled: dict[Hashable, concurrent.futures.Future[Callable[..., Result]]] = {}
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "compiles ahead")

  def begin(self, key: Hashable, *arguments: Any, **static: Hashable) -> None:
    """Begins to compile the version for these arguments or shapes; does nothing for a known `key`.

    A later call of `find` with the same `key` returns the compiled version.
    """
    if key in self._compiled:
      return
    shapes = jax.tree.map(_shape_on_devices, arguments)
    compile_it = lambda: self._program.lower(*shapes, **static).compile()
    self._compiled[key] = self._thread.submit(compile_it)

  def find(self, key: Hashable) -> Callable[..., Result] | None:
    """Waits for the compilation begun with `key` and returns its result; None if none was begun."""
    begun = self._compiled.get(key)
    return None if begun is None else begun.result()

  @property
  def is_idle(self) -> bool:
    """Whether all compilations have ended, so that the process can end without waiting."""
    return all(begun.done() for begun in self._compiled.values())


def _shape_on_devices(x: Array | np.ndarray) -> jax.ShapeDtypeStruct:
  # An array that is not committed to a device may be anywhere: it gets no sharding.
  sharding = x.sharding if isinstance(x, jax.Array) and x.committed else None
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


class Bursts:
  """The burst programs of an engine: at most four, which read different blocks of the caches.

  Three programs read a quarter, a half or all blocks of the responses, and those blocks of the
  prompts that the first burst needs. The fourth program reads all blocks, for longer prompts.
  """

  def __init__(self, burst: jax.stages.Wrapped, settings: Settings, *, compiles_ahead: bool):
    """Compiles nothing yet.

    Args:
      burst: `decoder.burst`, jitted.
      settings: the settings of the engine.
      compiles_ahead: whether a thread compiles the program for longer responses while another
        program runs, so that growing responses do not wait. On CPUs this would slow the running
        program.
    """
    self._burst: Callable[..., tuple[decoder.State, Emitted]] = burst
    self._shape, self._compiles_ahead = settings.shape, compiles_ahead
    self._reads_all = settings.cache == "pages"  # the kernel skips pages that are not filled
    self._prompt_blocks: int | None = None  # blocks of prompts that the first burst needed
    self._ahead = Ahead[tuple[decoder.State, Emitted]](burst)

  def run(
    self, params: Params, state: decoder.State, *, prompt: int, response: int, has_halted: bool
  ) -> tuple[decoder.State, Emitted]:
    """Runs `decoder.burst`; donates `state`.

    Args:
      params, state, has_halted: see `decoder.burst`.
      prompt, response: the most tokens in the caches of a running slot.
    """
    read = self._choose(prompt, response)
    following = self._shape.response.read_for(read.response * self._shape.response.size + 1)
    if has_halted:
      return self._burst(params, state, read=read, has_halted=True)
    if self._compiles_ahead and following > read.response:
      needed = read._replace(response=following)
      self._ahead.begin(needed, params, state, read=needed)
    if compiled := self._ahead.find(read):
      return compiled(params, state)
    return self._burst(params, state, read=read)

  def _choose(self, prompt: int, response: int) -> Read:
    shape = self._shape
    if self._reads_all:
      return shape.everything
    needed = Read(shape.prompt.read_for(prompt), shape.response.read_for(response))
    if self._prompt_blocks is None:
      self._prompt_blocks = needed.prompt
    if needed.prompt > self._prompt_blocks:
      return shape.everything
    return needed._replace(prompt=self._prompt_blocks)


class Prefills:
  """The prefill programs of an engine, by the shape of the prompts."""

  def __init__(self, prefill: jax.stages.Wrapped, expected: Sequence[tuple[int, int]]):
    """Compiles nothing yet.

    Args:
      prefill: `decoder.prefill`, jitted.
      expected: shapes of prompts for which a thread compiles the program, one after another. The
        thread begins at the first call of `find`, which gets the parameters.
    """
    self._prefill, self._expected, self._ahead = prefill, [*expected], Ahead[Prefilled](prefill)

  def find(
    self, shape: tuple[int, ...], params: Params, has_response: bool
  ) -> Callable[..., Prefilled]:
    """The program for prompts of this shape."""
    if has_response:
      return self._prefill
    compiled = self._ahead.find(shape)
    if compiled is None and shape in self._expected:
      self._expected.remove(shape)  # this call compiles the program for the shape
    if self._expected and self._ahead.is_idle:
      expected = self._expected.pop(0)
      tokens, lengths = np.zeros(expected, np.int32), np.zeros(expected[0], np.int32)
      self._ahead.begin(expected, params, tokens, lengths)
    return compiled or self._prefill


def _padded_lengths(block: int, longest: int) -> list[int]:
  """Lengths to which prompts are padded: `block` times 1, 2, 4, …; the last is `longest`."""
  lengths = [min(block, longest)]
  while lengths[-1] < longest:
    lengths.append(min(2 * lengths[-1], longest))
  return lengths


class Compiled(NamedTuple):
  """The `jit` of an engine, and its programs that have several compiled versions."""

  jit: Callable[..., jax.stages.Wrapped]
  bursts: Bursts
  prefills: Prefills


class EnginePrograms:
  """The compiled functions of `rollouts.decoder`, for one policy, distribution and slot count.

  Several engines may run the same programs, one after another.

  Attributes:
    settings: the settings that are compiled into the programs.
    programs: jitted functions, run by `load` and an `Engine`.
    compiled: `jit`, and the programs that have several compiled versions.
    max_prompt_length: S, tokens.
    pad_token: the token that fills responses after their end.
    to_host: a tree of device arrays → NumPy arrays.
  """

  def __init__(
    self,
    model: DecodedModel,
    sampling: Sampling,
    *,
    slots: int,
    prefill_rows: int,
    max_prompt_length: int,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...],
    pad_token: int,
    cache: str = "blocks",
    cache_format: str = "",
    has_replies: bool = False,
    records_routes: bool = False,
    to_host: Callable[[Any], Any] = jax.device_get,
    compiler_options: dict[str, bool | int | float | str] | None = None,
    compiles_ahead: bool = False,
  ):
    """Binds the functions; compiles nothing yet.

    Args:
      model: the model of the policy, on the mesh that generates.
      sampling: the distribution to sample from.
      slots: responses decoded at a time; rounded up to a multiple of the number of devices over
        which the slots are split. With cache = "pages", slots are rounded up to a multiple of the
        number of these devices' cores, since the kernel splits slots over cores.
      prefill_rows: the most prompts that are prefilled at a time; rounded up to a multiple of the
        number of these devices.
      max_prompt_length, max_new_tokens: S and T, tokens.
      stop_tokens: the tokens that end a response.
      pad_token: the token that fills responses after their end.
      cache: "blocks" or "pages", as `caches.choose_cache` returned it.
      cache_format: one of `caches.FORMATS`.
      has_replies: whether responses may be dialogues.
      records_routes: whether rollouts have the routes of a mixture.
      to_host: a tree of device arrays → NumPy; called once per burst.
      compiler_options: the compiler options of all programs, as `jax.jit` takes them.
      compiles_ahead: whether a thread compiles later programs while others run: the prefills of
        shorter and longer prompts, and bursts of longer responses, see `Bursts`.
    """
    self._batch_devices = (
      1 if model.mesh is None else model.mesh.shape["data"] * model.mesh.shape["fsdp"]
    )
    self._max_prefill_rows = prefill_rows
    cores = decoder.cores_per_device(model.mesh) if cache == "pages" else 1
    self.settings = Settings(
      model=model,
      sampling=sampling,
      slots=self._round_up(-(-slots // cores)) * cores,
      shape=CacheShape.of(
        max_prompt_length, max_new_tokens, has_replies=has_replies, pages=cache == "pages"
      ),
      max_new_tokens=max_new_tokens,
      stop_tokens=stop_tokens,
      cache=cache,
      cache_format=cache_format,
      cores=cores,
      has_replies=has_replies,
      records_routes=records_routes,
    )
    self.max_prompt_length = max_prompt_length
    self.pad_token = pad_token
    self.to_host = to_host
    at_precision = functools.partial(with_matmul_precision, precision=model.config.precision)
    with_model = lambda function: at_precision(functools.partial(function, model=model))
    bind = lambda function: at_precision(functools.partial(function, settings=self.settings))
    state, host = decoder.shardings(self.settings)
    loaded = decoder.loaded_shardings(model)
    others = {**loaded, "blocks": ()} if loaded else None
    jit = functools.partial(jax.jit, compiler_options=compiler_options)
    self.programs = Programs(
      take_layer=jit(with_model(decoder.take_layer)),
      load_layer={
        kind: jit(with_model(decoder.load_layer), out_shardings=_of_layer(loaded, kind))
        for kind in set(model.config.kinds)
      },
      load_others=jit(with_model(decoder.load_others), out_shardings=others),
      empty_slots=jit(bind(decoder.empty_slots), out_shardings=state),
      prefill=jit(bind(decoder.prefill)),
      insert=jit(bind(decoder.insert), donate_argnums=0, out_shardings=state),
      halt=jit(decoder.halt, donate_argnums=0, out_shardings=state),
      resume=jit(decoder.resume, donate_argnums=0, out_shardings=state),
      burst=jit(
        bind(decoder.burst),
        donate_argnums=1,
        out_shardings=(state, host),
        static_argnames=("read", "has_halted"),
      ),
    )
    lengths = _padded_lengths(self.settings.shape.prompt.size, self.settings.shape.prompt.tokens)
    self.compiled = Compiled(
      jit,
      Bursts(self.programs.burst, self.settings, compiles_ahead=compiles_ahead),
      Prefills(
        self.programs.prefill,
        [(self.prefill_rows(length), length) for length in lengths] if compiles_ahead else [],
      ),
    )

  def load(self, trained: Params, frozen: Params) -> Params:
    """Converts parameters on the generation mesh to the form that `Engine.swap` takes."""
    kinds, programs = self.settings.model.config.kinds, self.programs
    blocks = (programs.take_layer(trained, frozen, rows_of(i, kinds)) for i in range(len(kinds)))
    loaded = tuple(
      programs.load_layer[kind](layer) for kind, layer in zip(kinds, blocks, strict=True)
    )
    return {**programs.load_others(trained, frozen), "blocks": loaded}

  def lower_burst(self, trained: Params, frozen: Params) -> jax.stages.Lowered:
    """Lowers a burst that reads complete caches, for parameters or their shapes.

    The trainer's parameters, which stay in memory, are also arguments of the program: so the
    memory that the compiler reports for the program includes these parameters.
    """
    settings = self.settings
    state, host = decoder.shardings(settings)

    def longest_burst(
      trained: Params, frozen: Params, params: Params, state: decoder.State
    ) -> tuple[decoder.State, Emitted]:
      return decoder.burst(params, state, settings=settings, read=settings.shape.everything)

    jitted = self.compiled.jit(
      with_matmul_precision(longest_burst, settings.model.config.precision),
      donate_argnums=3,
      out_shardings=(state, host),
      keep_unused=True,
    )
    return jitted.lower(trained, frozen, self._loaded_shapes(trained, frozen), self._slot_shapes())

  def lower_prefill(self, trained: Params, frozen: Params) -> jax.stages.Lowered:
    """Lowers the prefill of the longest dialogues after a reply, for parameters or their shapes.

    The trainer's parameters and the slots, which stay in memory, are also arguments of the program:
    so the memory that the compiler reports for the program includes parameters and slots.
    """
    settings, (rows, length) = self.settings, self.longest_prefill()
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)

    def prefill(
      trained: Params,
      frozen: Params,
      params: Params,
      state: decoder.State,
      tokens: Array,
      lengths: Array,
      prompts: Array,
    ) -> Prefilled:
      return decoder.prefill(params, tokens, lengths, prompts, settings=settings)

    jitted = self.compiled.jit(
      with_matmul_precision(prefill, settings.model.config.precision), keep_unused=True
    )
    return jitted.lower(
      trained,
      frozen,
      self._loaded_shapes(trained, frozen),
      self._slot_shapes(),
      integers(rows, length),
      integers(rows),
      integers(rows),
    )

  def longest_prefill(self) -> tuple[int, int]:
    """(number of rows, tokens per row) of the largest batch that is prefilled after replies."""
    shape = self.settings.shape
    blocks = shape.prompt
    length = -(-(blocks.tokens + shape.response.tokens) // blocks.size) * blocks.size
    return self.prefill_rows(length), length

  def _slot_shapes(self) -> decoder.State:
    """The shapes of the slots' state, with its shardings."""
    shapes: decoder.State = jax.eval_shape(self.programs.empty_slots)
    state, _ = decoder.shardings(self.settings)
    return shapes if state is None else jax.tree.map(_add_sharding, shapes, state)

  def _loaded_shapes(self, trained: Params, frozen: Params) -> Params:
    """The shapes of the parameters that `load` returns, with their shardings."""
    programs, kinds = self.programs, self.settings.model.config.kinds
    shardings = decoder.loaded_shardings(self.settings.model)
    place = lambda shapes, of: jax.tree.map(_add_sharding, shapes, of) if shardings else shapes
    layers = {}
    for kind, program in programs.load_layer.items():
      rows = rows_of(kinds.index(kind), kinds)
      taken = programs.take_layer.lower(trained, frozen, rows).out_info
      layers[kind] = place(program.lower(taken).out_info, _of_layer(shardings, kind))
    others = programs.load_others.lower(trained, frozen).out_info
    others = place(others, {**(shardings or {}), "blocks": ()})
    return {**others, "blocks": tuple(layers[kind] for kind in kinds)}

  def _round_up(self, rows: int) -> int:
    """`rows`, rounded up to a multiple of the number of devices that rows are split over."""
    return -(-rows // self._batch_devices) * self._batch_devices

  def prefill_rows(self, length: int) -> int:
    """The number of prompts, each padded to this length, that one prefill takes."""
    return self._round_up(min(self._max_prefill_rows, max(_PREFILL_TOKENS // length, 1)))

  def padded_length(self, tokens: int, *, has_response: bool) -> int:
    """The length to which a context (prompt and response so far) is padded for its prefill.

    It is 1, 2, 4, … blocks: the smallest of these lengths that holds the tokens, or a maximum if
    the maximum is smaller.
    """
    blocks = self.settings.shape.prompt
    longest = self.longest_prefill()[1] if has_response else blocks.tokens
    return next(n for n in _padded_lengths(blocks.size, longest) if n >= tokens)

  def prefill(
    self,
    params: Params,
    contexts: Sequence[np.ndarray],
    prompts: Sequence[int],
    *,
    length: int,
    has_response: bool,
  ) -> Prefilled:
    """Prefills contexts of similar length; the number of rows depends only on the padded length.

    Args:
      params: the result of `load`.
      contexts: i32[n] each, tokens of prompt and response.
      prompts: the number of prompt tokens in each context.
      length: the padded length of all contexts, from `padded_length`.
      has_response: whether the contexts contain tokens of responses.
    """
    size = self.prefill_rows(length)
    tokens = np.full((size, length), self.pad_token, np.int32)
    lengths, of_prompt = np.zeros((2, size), np.int32)
    for row, context in enumerate(contexts):
      tokens[row, : len(context)] = context
      lengths[row] = len(context)
    of_prompt[: len(prompts)] = prompts
    of_responses = (of_prompt,) if has_response else ()
    program = self.compiled.prefills.find(tokens.shape, params, has_response)
    return program(params, tokens, lengths, *of_responses)


def _of_layer(loaded: Params | None, kind: Kind) -> Params | None:
  """The shardings of a layer of this kind, from the result of `decoder.loaded_shardings`."""
  if loaded is None:
    return None
  rows = dict.fromkeys((ALL, *kind), 0)
  return take_rows(loaded["blocks"], rows, lambda sharding, _: sharding)


def _add_sharding(
  shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
