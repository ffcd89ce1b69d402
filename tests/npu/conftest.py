# SPDX-License-Identifier: Apache-2.0
"""The test double of CANN for every test of this folder."""

from double.fixtures import cann, cann_folder, double, loaded_double

__all__ = ["cann", "cann_folder", "double", "loaded_double"]
