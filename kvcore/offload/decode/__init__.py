# SPDX-License-Identifier: Apache-2.0
"""Decode with the full cache on the host: one engine, its steps and its streams."""
