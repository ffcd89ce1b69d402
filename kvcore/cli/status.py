# SPDX-License-Identifier: Apache-2.0
"""What the process ends with; docs/command_line.md has the same as a table."""

OK = 0
#: What was asked was done, and the answer is no: bytes or reports differ, shapes are refused.
FAILED = 1
#: It could not be done: a wrong option, input that cannot be used, a full disk.
USAGE = 2
#: COMMAND of ``kvcore emulate`` ended well, and the emulated machine reported something.
REPORTED = 3
#: A fault of kvcore's own (BSD's EX_SOFTWARE): Python would end with 1.
FAULT = 70
#: As a shell reports a process ended by SIGINT (2) and SIGPIPE (13).
INTERRUPTED = 128 + 2
BROKEN_PIPE = 128 + 13
