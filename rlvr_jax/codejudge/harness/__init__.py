"""The program inside the sandbox: runs generated code and judges it, in separate processes.

Started by `sandbox.py`, under an interpreter with the standard library only: of rlvr_jax there is
but this folder, whose modules import each other and that library. What `launcher` starts:

    launcher     one per sandbox. It enters namespaces with a small read-only root, drops its rights
    │            and waits for items.
    └ supervisor one per item, like all below: fresh user, process, mount and IPC namespaces, an
      │          empty /tmp; kills everything in them when time is over or the caller has gone
      └ judge    first process in there. It holds the tests and the only way to a verdict
        └ program  the generated code, forked before the judge reads a test and started after: it
                 never has tests, expected values or the verdict's socket in its memory or among
                 its descriptors, and may neither trace the judge nor look into it

The judge evaluates tests itself. A name of the program that a test uses is a `Handle`; a call is
sent to the program, and what comes back is plain data, built anew (`decode`). What is not plain
data stays in the program, as a `Handle`, which equals nothing but itself. So all that a program can
do is answer calls. An answer's type, its `__eq__`, a changed builtin, an early exit: none of these
exist on the judge's side. Nor does it learn from the calls whether its answers are right: all are
made, and only then compared; within a test, an assert that fails ends nothing.
"""
