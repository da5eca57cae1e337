"""Scripts for a TPU VM: prepare it, start the process as a service, and report its state."""

from __future__ import annotations

import shlex

from rlvr_jax.launch.package import EXTRAS, SHARED
from rlvr_jax.launch.run import Run

GRACE_S = 300  # seconds that `stop` gives a run to save; a preemption gives about 30
HOST_STATE = "rlvr_jax-state"  # start of the line in which a host reports its state

# Services of a user are started and queried through the user's own systemd.
_BUS = 'export XDG_RUNTIME_DIR="/run/user/$(id -u)"'


def start_script(run: Run, version: str, share: str) -> str:
  """The script that unpacks and installs the package, and starts the process if it is not running.

  Args:
    run: the program.
    version: the version of the package.
    share: IP:/SHARE of a file system to mount; "" for none.
  """
  unit = unit_name(run.name)
  lines = [
    "set -eu",
    _BUS,
    'sudo loginctl enable-linger "$(id -un)"',  # services outlive the connection
    'base="$HOME/rlvr_jax"',
    f'code="$base/{version}"',
    'mkdir -p "$code"',
    f'[ ! -e "$HOME/{version}.tar.gz" ] || tar -xzf "$HOME/{version}.tar.gz" -C "$code"',
    f'rm -f "$HOME/{version}.tar.gz" "$base/{run.name}.stopped"',
    *_mount_lines(share),
    # Made once per machine and setup.py. The machine's own Python may be too old.
    'venv="$base/venv-$(sha256sum < "$code/setup.py" | cut -c1-12)"',
    'if [ ! -e "$venv/ready" ]; then',
    "  python3 -m pip install --quiet --user uv",
    '  python3 -m uv venv --quiet --allow-existing --python 3.12 "$venv"',
    f'  python3 -m uv pip install --quiet --python "$venv/bin/python" --editable "$code[{EXTRAS}]"',
    '  touch "$venv/ready"',
    "fi",
    f"case $(systemctl --user show {unit} --property=SubState --value) in",
    f"  running|auto-restart) echo '{unit} is running already'; exit 0;;",
    "esac",
    f"systemctl --user stop {unit} 2> /dev/null || true",
    f"systemctl --user reset-failed {unit} 2> /dev/null || true",
    _service_command(run),
  ]
  return "\n".join(lines) + "\n"


def state_script(name: str) -> str:
  """The script that prints the process's state: missing, running, finished, failed or stopped."""
  unit = unit_name(name)
  show = f"systemctl --user show {unit} --property=SubState,Result --value"
  return "\n".join(
    [
      _BUS,
      f'if [ -e "$HOME/rlvr_jax/{name}.stopped" ]; then state=stopped',
      f"else case $({show} | sort | tr '\\n' ' ') in",
      '  "exited success "*) state=finished;;',
      "  *failed*) state=failed;;",
      "  *running*|*start*) state=running;;",
      "  *) state=missing;;",
      "esac; fi",
      f'echo "{HOST_STATE} $(hostname) $state"\n',
    ]
  )


def stop_script(name: str) -> str:
  """The script that requests a shutdown and waits until the process has saved and ended."""
  return (
    f'{_BUS}\nmkdir -p "$HOME/rlvr_jax"\ntouch "$HOME/rlvr_jax/{name}.stopped"\n'
    f"systemctl --user stop {unit_name(name)} || true\n"
  )


def logs_script(name: str, lines: str, *, follow: bool) -> str:
  """The script that prints a process's last lines, or "all" lines; with `follow`, new lines too."""
  command = f"journalctl --user --unit={unit_name(name)} --output=cat --lines={lines}"
  return f"exec {command}{' --follow' if follow else ''}\n"


def unit_name(name: str) -> str:
  """The name of a program's systemd service."""
  return f"rlvr_jax-{name}.service"


def _mount_lines(share: str) -> list[str]:
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


def _service_command(run: Run) -> str:
  """The command that starts the service under the user's systemd.

  There the sandboxes of code graders may create control groups of their own.
  """
  settings = {
    "Restart": "on-failure",
    "RestartSec": 10,
    "StartLimitIntervalSec": "infinity",
    "StartLimitBurst": run.retries + 1,
    "RemainAfterExit": "yes",  # so that its end can be queried
    "KillMode": "mixed",  # graders are needed until the run has saved
    "TimeoutStopSec": GRACE_S,
    "LimitNOFILE": 65536,
  }
  parts = [
    f"systemd-run --user --unit={unit_name(run.name)}",
    '--working-directory="$code" --setenv=PYTHONPATH="$code"',
    *(f"--setenv={shlex.quote(f'{name}={value}')}" for name, value in run.environment.items()),
    *(f"--property={name}={value}" for name, value in settings.items()),
    '"$venv/bin/python" ' + shlex.join(run.command("python", "--distributed")[1:]),
  ]
  return " \\\n  ".join(parts)
