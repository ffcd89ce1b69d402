# SPDX-License-Identifier: Apache-2.0
"""What looks on while a device works: the race check and the trace; none of it moves bytes."""
