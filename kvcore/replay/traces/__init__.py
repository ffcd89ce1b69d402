# SPDX-License-Identifier: Apache-2.0
"""Requests, their tokens and the rows they choose: read from files or generated."""
