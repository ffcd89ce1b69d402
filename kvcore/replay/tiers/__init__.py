# SPDX-License-Identifier: Apache-2.0
"""Prefix caches in tiers: device memory, host memory, a disk or a remote store, with time."""
