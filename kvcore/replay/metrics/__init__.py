# SPDX-License-Identifier: Apache-2.0
"""What the users of a served model feel: latencies, and whether they meet their limits."""
