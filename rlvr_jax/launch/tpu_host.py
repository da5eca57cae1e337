"""Scripts of a TPU VM: they prepare it, start the process as a service, and tell how it goes."""

from __future__ import annotations

import shlex

from rlvr_jax.launch.run import EXTRAS, SHARED, Run

GRACE_S = 300  # seconds that `stop` gives a run to save; a preemption gives about 30
HOST_STATE = "rlvr_jax-state"  # begins the line that a host prints about itself

# Services of a user are started and asked about through the user's own systemd.
_BUS = 'export XDG_RUNTIME_DIR="/run/user/$(id -u)"'


def start_script(run: Run, share: str) -> str:
  """Unpacks, installs what is missing, and starts the process unless it is running.

  Args:
    run: with its package.
    share: IP:/SHARE of a file system to mount; "" for none.
  """
  assert run.package is not None
  version = run.package.version
  lines = [
    "set -eu",
    _BUS,
    'sudo loginctl enable-linger "$(id -un)"',  # services outlive the connection
    'base="$HOME/rlvr_jax"',
    f'code="$base/{version}"',
    'mkdir -p "$code"',
    f'[ ! -e "$HOME/{version}.tar.gz" ] || tar -xzf "$HOME/{version}.tar.gz" -C "$code"',
    f'rm -f "$HOME/{version}.tar.gz" "$base/{run.name}.stopped"',
    *_mount(share),
    # Once per machine and setup.py. The machines' own Python may be too old.
    'venv="$base/venv-$(sha256sum < "$code/setup.py" | cut -c1-12)"',
    'if [ ! -e "$venv/ready" ]; then',
    "  python3 -m pip install --quiet --user uv",
    '  python3 -m uv venv --quiet --allow-existing --python 3.12 "$venv"',
    f'  python3 -m uv pip install --quiet --python "$venv/bin/python" --editable "$code[{EXTRAS}]"',
    '  touch "$venv/ready"',
    "fi",
    f"case $(systemctl --user show {unit(run)} --property=SubState --value) in",
    f"  running|auto-restart) echo '{unit(run)} is running already'; exit 0;;",
    "esac",
    f"systemctl --user stop {unit(run)} 2> /dev/null || true",
    f"systemctl --user reset-failed {unit(run)} 2> /dev/null || true",
    _service(run),
  ]
  return "\n".join(lines) + "\n"


def state_script(run: Run) -> str:
  """Prints one line about the process: missing, running, finished, failed or stopped."""
  show = f"systemctl --user show {unit(run)} --property=SubState,Result --value"
  return "\n".join(
    [
      _BUS,
      f'if [ -e "$HOME/rlvr_jax/{run.name}.stopped" ]; then state=stopped',
      f"else case $({show} | sort | tr '\\n' ' ') in",
      '  "exited success "*) state=finished;;',
      "  *failed*) state=failed;;",
      "  *running*|*start*) state=running;;",
      "  *) state=missing;;",
      "esac; fi",
      f'echo "{HOST_STATE} $(hostname) $state"\n',
    ]
  )


def stop_script(run: Run) -> str:
  """Asks the process to save and end, and waits until it has."""
  return (
    f'{_BUS}\nmkdir -p "$HOME/rlvr_jax"\ntouch "$HOME/rlvr_jax/{run.name}.stopped"\n'
    f"systemctl --user stop {unit(run)} || true\n"
  )


def logs_script(run: Run, lines: str, *, follow: bool) -> str:
  """Prints the last lines of the process ("all": all), and with `follow` those that come."""
  command = f"journalctl --user --unit={unit(run)} --output=cat --lines={lines}"
  return f"exec {command}{' --follow' if follow else ''}\n"


def unit(run: Run) -> str:
  """The name of the systemd service."""
  return f"rlvr_jax-{run.name}.service"


def _mount(share: str) -> list[str]:
  if not share:
    return []
  return [
    f"if ! mountpoint --quiet {SHARED}; then",
    "  command -v mount.nfs > /dev/null || sudo apt-get install --quiet --yes nfs-common",
    f"  sudo mkdir -p {SHARED}",
    f"  sudo mount {shlex.quote(share)} {SHARED}",
    f"  sudo chmod 1777 {SHARED}",
    "fi",
  ]


def _service(run: Run) -> str:
  """Starts the service, in the user's own control group: sandboxes can make theirs beside it."""
  settings = {
    "Restart": "on-failure",
    "RestartSec": 10,
    "StartLimitIntervalSec": "infinity",
    "StartLimitBurst": run.retries + 1,
    "RemainAfterExit": "yes",  # its end can be asked for
    "KillMode": "mixed",  # the graders are needed until the run is saved
    "TimeoutStopSec": GRACE_S,
    "LimitNOFILE": 65536,
  }
  parts = [
    f"systemd-run --user --unit={unit(run)}",
    '--working-directory="$code" --setenv=PYTHONPATH="$code"',
    *(f"--setenv={shlex.quote(f'{name}={value}')}" for name, value in run.environment.items()),
    *(f"--property={name}={value}" for name, value in settings.items()),
    '"$venv/bin/python" ' + shlex.join(run.program("python")[1:]),
  ]
  return " \\\n  ".join(parts)
