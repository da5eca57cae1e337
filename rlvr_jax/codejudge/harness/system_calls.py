"""The system calls that programs may use; every other call fails."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import socket
from typing import Any

# The standard library, a shell and the C library need no other calls. Some calls are excluded on
# purpose and must not be added: calls that create memory that belongs to no process (memfd_create,
# shmget, msgget, vmsplice, splice, tee, sendfile), calls by which items could communicate (flock,
# inotify, fanotify, fadvise, readahead, mincore, cachestat, keyrings), ways into the kernel, and
# ways to wait longer for a core than others (setpriority, sched_setscheduler).
_ALLOWED = """
  read write readv writev pread64 pwrite64 preadv pwritev open openat creat close close_range stat
  fstat lstat newfstatat statx lseek access faccessat faccessat2 readlink readlinkat getcwd chdir
  fchdir dup dup2 dup3 pipe pipe2 fsync fdatasync truncate ftruncate fallocate getdents getdents64
  rename renameat renameat2 mkdir mkdirat rmdir link linkat symlink symlinkat unlink unlinkat mknod
  mknodat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat umask utime utimes utimensat
  futimesat statfs fstatfs copy_file_range listxattr llistxattr flistxattr getxattr lgetxattr
  fgetxattr
  munmap mprotect mremap madvise brk msync membarrier
  fork vfork execve execveat exit exit_group wait4 waitid kill tkill tgkill getpid getppid gettid
  getpgid setpgid getpgrp getsid setsid getuid geteuid getgid getegid getresuid getresgid getgroups
  pidfd_open pidfd_send_signal set_tid_address set_robust_list get_robust_list rseq futex
  futex_waitv futex_wake futex_wait futex_requeue arch_prctl capget uname getrandom
  sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_getscheduler
  sched_get_priority_max sched_get_priority_min sched_rr_get_interval getcpu getpriority
  nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times getrusage getrlimit
  setrlimit sysinfo
  rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigsuspend rt_sigreturn sigaltstack pause alarm
  getitimer setitimer timer_create timer_settime timer_gettime timer_getoverrun timer_delete
  timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4 eventfd eventfd2 restart_syscall
  poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait
  epoll_pwait2 bind connect listen accept accept4 getsockname getpeername getsockopt sendto recvfrom
  sendmsg recvmsg sendmmsg recvmmsg shutdown
""".split()
# If these calls fail, the C library falls back to older calls, whose arguments a filter can see.
_ABSENT = ("clone3", "openat2")

_ANY = 0xFFFFFFFF  # of an argument of type int, the kernel sees these bits
_NEW_NAMESPACES = 0x7E020000
_KIND_OF_SOCKET = ~(socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) & _ANY
_SHARED_ANONYMOUS = 0x21  # MAP_SHARED and MAP_ANONYMOUS
_SIGCHLD = 17
# Calls that are allowed if one element of their list holds. An element maps the index of an
# argument to (mask, value), and holds if the masked bits of all its arguments have these values.
_CONDITIONS: dict[str, list[dict[int, tuple[int, int]]]] = {
  # Only stream sockets: a datagram socket queues messages of many senders, which may have ended.
  "socket": [{0: (_ANY, socket.AF_UNIX), 1: (_KIND_OF_SOCKET, socket.SOCK_STREAM)}],
  "socketpair": [{0: (_ANY, socket.AF_UNIX), 1: (_KIND_OF_SOCKET, socket.SOCK_STREAM)}],
  # Only SO_REUSEADDR, which multiprocessing sets, and no sizes of buffers.
  "setsockopt": [{1: (_ANY, socket.SOL_SOCKET), 2: (_ANY, socket.SO_REUSEADDR)}],
  # No shared anonymous memory: it stays even if all of it is unmapped or dropped except one page.
  "mmap": [{3: (_SHARED_ANONYMOUS, bits)} for bits in (0, 0x01, 0x20)],
  "clone": [{0: (_NEW_NAMESPACES, 0)}],
  # SIGCHLD cannot be ignored: the processor time of ignored children would not be counted.
  "rt_sigaction": [
    *({0: (_ANY, number)} for number in range(1, 65) if number != _SIGCHLD),
    {0: (_ANY, _SIGCHLD), 1: (2**64 - 1, 0)},  # reads the handler, and changes nothing
  ],
  "prlimit64": [{0: (_ANY, 0)}],  # of the process itself
  "preadv2": [{5: (_ANY, 0)}],  # no RWF_NOWAIT, which reveals what others have read
  "pwritev2": [{5: (_ANY, 0)}],
  # Only copies and flags of descriptors; no leases, notifications or pipe sizes.
  "fcntl": [{1: (_ANY, command)} for command in (0, 1, 2, 3, 4, 1030)],
  # FIONREAD, FIONBIO, FIONCLEX and FIOCLEX; TCGETS and TIOCGWINSZ, which test for a terminal.
  "ioctl": [{1: (_ANY, c)} for c in (0x541B, 0x5421, 0x5450, 0x5451, 0x5401, 0x5413)],
  # The signal at the parent's death, a thread's name, and "no new privileges".
  "prctl": [{0: (_ANY, option)} for option in (1, 15, 16, 38, 39)],
}
# File locks succeed without effect: SQLite needs them, and real locks on files that all items can
# read would reveal other items.
_WITHOUT_EFFECT = [{1: (_ANY, 6)}, {1: (_ANY, 7)}]  # F_SETLK, F_SETLKW

_ALLOW, _FAIL = 0x7FFF0000, 0x00050000  # the latter with a number of errno, or 0 for success
_BAD_ARCHITECTURE, _OPTIMIZE, _BINARY_TREE = 2, 8, 2
_MASKED_EQUAL = 7
_SET_SECCOMP, _BY_FILTER = 22, 2
_INSTRUCTION = 8  # bytes


_LIBC = ctypes.CDLL(None, use_errno=True)


class _Comparison(ctypes.Structure):
  _fields_ = (
    ("argument", ctypes.c_uint), ("operation", ctypes.c_int),
    ("mask", ctypes.c_uint64), ("value", ctypes.c_uint64),
  )  # fmt: skip


def _check_result(result: int, action: str) -> None:
  if result < 0:
    raise OSError(-result, f"libseccomp: {action}")


@functools.cache
def _load_library() -> Any:
  try:
    library = ctypes.CDLL("libseccomp.so.2")
  except OSError as error:
    raise OSError(f"{error}; install libseccomp (Debian, Ubuntu: libseccomp2)") from error
  library.seccomp_init.restype = ctypes.c_void_p
  return library


def prctl(option: int, *values: int) -> None:
  """Calls prctl(2); raises OSError if it fails."""
  arguments = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
  if _LIBC.prctl(option, *arguments) < 0:
    raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def call_number(name: str) -> int:
  """The number of a system call on this architecture; negative if it does not exist."""
  return _load_library().seccomp_syscall_resolve_name(name.encode())


@functools.cache
def compile_filter() -> bytes:
  """Compiles the allow list into a program for the kernel, once, since compiling takes long.

  Raises:
    OSError: libseccomp is missing or cannot make the filter.
  """
  library = _load_library()
  refuse = _FAIL | errno.EPERM
  context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(refuse)))
  # By default, calls with the numbers of other architectures would kill the process.
  attributes = ((_BAD_ARCHITECTURE, refuse), (_OPTIMIZE, _BINARY_TREE))
  for attribute, value in attributes:
    result = library.seccomp_attr_set(context, attribute, ctypes.c_uint32(value))
    _check_result(result, "attributes")

  def add(action: int, name: str, condition: dict[int, tuple[int, int]]) -> None:
    if (call := call_number(name)) == -1:
      return  # the call is newer than this libseccomp
    comparisons = (_Comparison * len(condition))(
      *(_Comparison(i, _MASKED_EQUAL, mask, value) for i, (mask, value) in condition.items())
    )
    arguments = (ctypes.c_uint32(action), call, len(condition), comparisons)
    _check_result(library.seccomp_rule_add_array(context, *arguments), name)

  for name in _ALLOWED:
    add(_ALLOW, name, {})
  for name in _ABSENT:
    add(_FAIL | errno.ENOSYS, name, {})
  for name, conditions in _CONDITIONS.items():
    for condition in conditions:
      add(_ALLOW, name, condition)
  for condition in _WITHOUT_EFFECT:
    add(_FAIL, "fcntl", condition)
  read_end, write_end = os.pipe()  # its buffer has room for the filter of 400 instructions
  with open(read_end, "rb") as file:
    with open(write_end, "wb"):
      _check_result(library.seccomp_export_bpf(context, write_end), "cannot export the filter")
    return file.read()


class _Filter(ctypes.Structure):
  _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.c_char_p))


def filter_system_calls() -> None:
  """Restricts this process and its descendants to the allowed system calls."""
  program = compile_filter()
  kernel_filter = _Filter(len(program) // _INSTRUCTION, program)
  prctl(_SET_SECCOMP, _BY_FILTER, ctypes.addressof(kernel_filter))
