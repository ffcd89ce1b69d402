# SPDX-License-Identifier: Apache-2.0
from typing_extensions import disjoint_base

@disjoint_base
class SegmentMap:
    @property
    def num_segments(self) -> int: ...
    def clear(self, start: int, end: int) -> None: ...
