# SPDX-License-Identifier: Apache-2.0
"""What the process ends with."""

OK = 0
#: What was asked was done, and the answer is no: bytes differ, shapes are refused.
FAILED = 1
#: A wrong option, or input that cannot be used.
USAGE = 2
#: As a shell reports a process ended by SIGINT (2) and SIGPIPE (13).
INTERRUPTED = 128 + 2
BROKEN_PIPE = 128 + 13
