# SPDX-License-Identifier: Apache-2.0
"""An emulated machine: the vendor's own torch_npu, unmodified, on a CPU.

    import kvcore.emulator
    kvcore.emulator.start(soc="A3")      # before torch
    import torch
    torch.ones(3).npu()

torch_npu is published for x86-64 and aarch64 Linux, and what it needs of CANN, the vendor's
runtime, is some ninety C functions by link and some hundreds by name.  This package has them: C
libraries with CANN's file names that lie inside the package, on no search path, and are loaded
before torch when the machine starts.  Everything above them is the vendor's own code.

Who does what:

``cann/``          C sources of the machine: memory, streams, events, graphs, KV-cache operators.
                   The tests of kvcore's own aclnn backend build the same sources as their strict
                   test double; README.md there says how they are arranged.
``installation/``  the layout of an installed CANN, with the libraries that setup.py builds.
``installed``      what is there: platform, libraries, wheels, and why the machine cannot start.
``environment``    variables: the machine's own, those of a real CANN that are set aside, those from
                   which child processes start the machine again.
``memory``         how much device memory this process can promise.
``machine``        the libraries, loaded, and their controls as Python functions.
``starting``       ``start`` and ``running``: the pieces above in order, and every refusal.
``hooks``          what is done when torch_npu has been imported: the fallback is registered.
``modules``        what clients import beside torch_npu and is not installed.
``fallback``       torch's CPU kernels as tasks in stream order, for every operator (``operators``
                   says which, ``arguments`` and ``outputs`` what a call is, ``views`` gives them
                   the memory, ``randomness`` a generator); ``_calls`` remembers calls by their
                   signature, and is what each costs.
``vendor``         operators that clients of torch_npu reach outside of it: ATB's, the selection.
``atb``            what stands for ATB's library itself.
``custom``         operators of vllm-ascend's library that torch_npu has as well.
``triton``         Triton kernels that serving engines launch, by name.
``tasks``          Python's tasks of a stream, from the start to the exit; ``_tasks`` runs them.
``checking``       the checks, and the texts of what they find; ``_races`` reads the journal,
                   ``_lines`` has the lines of the program, ``modes`` sees torch's operators
                   (``_dispatch`` is what each call of one costs).
``timing``         the model clock, from the same journal, and its trace.
``touched``        which bytes of a tensor an operator with indices uses (``_ranges``).
``faults``         the message for a host that follows a device pointer.
``leaks``          which tensors are still there at the end.
``reports``        what was found, and where that is said.

``_kvcore_torch``, beside the package, is the entry point by which ``import torch`` starts the
machine in child processes.

A process is one machine.  Its device memory is a range of addresses that nobody may touch, and its
bytes lie at a constant distance from it: the host dies of following a device pointer, and tasks
reach the bytes.  A stream is a thread that works through its tasks in order.
"""

from __future__ import annotations

from kvcore.emulator.reports import Report, expected, reports
from kvcore.emulator.starting import Running, running, start

__all__ = ["Report", "Running", "expected", "reports", "running", "start"]
