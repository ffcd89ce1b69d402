# SPDX-License-Identifier: Apache-2.0
"""Measured cases: each operator, a plain copy of the same bytes, and what else one would call.

``cases`` says what is measured, ``runner`` how: the functions of a case run in turn, many rounds,
so that whatever else the machine does hits all of them alike, and medians are compared.
``kvcore bench`` and the files in ``bench/`` use both.
"""

from kvcore.benchmarks import history
from kvcore.benchmarks.cases import CASES, Case
from kvcore.benchmarks.runner import Measurement, explain, measure

__all__ = ["CASES", "Case", "Measurement", "explain", "history", "measure"]
