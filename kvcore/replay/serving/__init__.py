# SPDX-License-Identifier: Apache-2.0
"""Serving a trace: what is scheduled, and what is really moved."""
