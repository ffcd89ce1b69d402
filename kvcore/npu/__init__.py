# SPDX-License-Identifier: Apache-2.0
"""The Ascend NPU through CANN's C interface, by ctypes.

Nothing is imported, searched or loaded here: the registry knows ``backend`` alone, which imports
the rest when a call needs it.

    search      where libraries may be            library   the process's CANN
    prototypes  the C functions' types            status    statuses as typed errors
    arrays      arguments on the device           tensors   aclTensor descriptors
    calls       which function an operator is     launch    the two phases on a stream
"""
