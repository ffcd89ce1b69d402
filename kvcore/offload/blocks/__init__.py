# SPDX-License-Identifier: Apache-2.0
"""Blocks of a paged cache: who holds which, and which are on the host."""
