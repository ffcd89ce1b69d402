# SPDX-License-Identifier: Apache-2.0
"""Skips tests of what the package does not have yet; goes, with its calls, when it has all."""

from __future__ import annotations

import importlib
import inspect

import pytest

import kvcore


def need(operator: str, scenario: int | None = None) -> None:
    """Skip the test unless that operator, and that scenario of it, is there."""
    if not hasattr(kvcore, operator):
        pytest.skip(f"kvcore.{operator} is not there yet")
    if scenario in (3, 4, 5):
        compress = importlib.import_module("kvcore.ops.compress")
        if "a mode this version has" in inspect.getsource(compress):
            pytest.skip("the compressing scenarios are not there yet")
