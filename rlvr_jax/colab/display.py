"""Style and colors of the notebooks' figures, and sliders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rlvr_jax.evaluate.figures import COLORS as COLORS
from rlvr_jax.evaluate.figures import legend_outside as legend_outside

DPI = 72  # of the page; pictures have twice this resolution


def setup() -> None:
  """Sets the style of figures: twice the resolution of the page, legible text, the palette."""
  from cycler import cycler
  from matplotlib import rcParams

  rcParams.update(
    {
      "figure.dpi": DPI,
      "savefig.dpi": 2 * DPI,
      "figure.constrained_layout.use": True,
      "axes.prop_cycle": cycler(color=list(COLORS.values())),
      "axes.grid": True,
      "axes.spines.top": False,
      "axes.spines.right": False,
      "grid.alpha": 0.3,
      "font.size": 11.0,
      "axes.titlesize": 11.0,
      "legend.frameon": False,
      "mathtext.fontset": "cm",  # formulas look as in the text
    }
  )
  if "IPython" in sys.modules:
    from matplotlib_inline import backend_inline

    backend_inline.set_matplotlib_formats("retina")  # double resolution, displayed at normal size


# --- sliders --------------------------------------------------------------------------------------


class Control(NamedTuple):
  """A slider over some values."""

  values: tuple[Any, ...]
  start: Any  # the value at which the slider begins; static figures show it


def choice(values: Sequence[Any], start: Any = None) -> Control:
  """A slider over `values` that begins at `start`, by default the first value.

  Raises:
    ValueError: there are no values, or `start` is not one of them.
  """
  values = tuple(values)
  if not values:
    raise ValueError("choice: values is empty; give at least one value")
  start = values[0] if start is None else start
  if start not in values:
    raise ValueError(f"choice: start = {start!r} is unknown; choose one of {list(values)}")
  return Control(values, start)


def span(low: float, high: float, *, step: float, start: float) -> Control:
  """A slider over low, low + step, … up to high that begins at the value nearest to `start`.

  Raises:
    ValueError: `step` is not positive, or `start` is not within low … high.
  """
  if step <= 0 or not low <= start <= high:
    raise ValueError(
      f"span: needs step > 0 and low <= start <= high; got low = {low}, high = {high},"
      f" step = {step}, start = {start}"
    )
  count = int((high - low) / step + 1e-9) + 1
  # Rounding makes a label read 0.3 instead of 0.30000000000000004.
  values = tuple(round(low + step * i, 10) for i in range(count))
  return Control(values, min(values, key=lambda value: abs(value - start)))


def show_sliders(draw: Callable[..., Any], *args: Any, **controls: Control) -> None:
  """Shows the figure of `draw(*args, **values)`, with a slider for each keyword.

  Without ipywidgets or an interactive front end, as when a program runs the notebook, the figure is
  static: it shows the sliders' start values, which are printed below it.

  Args:
    draw: function that makes one figure with pyplot.
    args: positional arguments of `draw`.
    controls: keyword of `draw` → result of `choice` or `span`.
  """
  if not is_live():
    draw(*args, **{name: control.start for name, control in controls.items()})
    values = ", ".join(f"{name} = {control.start}" for name, control in controls.items())
    print(f"Static picture at {values}. With a live kernel and ipywidgets, these are sliders.")
    return
  import ipywidgets
  from IPython.display import display
  from matplotlib import pyplot

  def show(**values: Any) -> None:
    draw(*args, **values)
    pyplot.show()

  # Drawing takes a moment, so the figure is drawn only when the slider is released.
  widgets = {
    name: ipywidgets.SelectionSlider(
      options=control.values, value=control.start, description=name, continuous_update=False
    )
    for name, control in controls.items()
  }
  output = ipywidgets.interactive_output(show, widgets)
  display(ipywidgets.VBox([*widgets.values(), output]))


def is_live() -> bool:
  """Whether ipywidgets is installed and an interactive front end runs the cell.

  A front end allows input in a cell; nbclient and nbconvert, which run complete notebooks, do not.
  """
  try:
    import ipywidgets  # noqa: F401
    from IPython.core.getipython import get_ipython
  except ImportError:
    return False
  kernel = getattr(get_ipython(), "kernel", None)
  if kernel is None:
    return False
  request = kernel.get_parent("shell") or {}
  return "google.colab" in sys.modules or bool(request.get("content", {}).get("allow_stdin"))
