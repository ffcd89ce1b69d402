# SPDX-License-Identifier: Apache-2.0
"""Latencies that the users of a served model see, and whether they meet their limits."""
