# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes are not those that it reads, nor one file twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.cli.outputs import refuse_unwritable
from kvcore.errors import ParamInvalidError


def test_a_file_is_not_read_and_written(tmp_path: Path) -> None:
    trace, link = tmp_path / "trace", tmp_path / "link"
    trace.write_text("{}")
    link.symlink_to(trace)
    for path in (trace, link):
        with pytest.raises(ParamInvalidError, match="a file of its own"):
            refuse_unwritable(path, reads=(trace,))
    with pytest.raises(ParamInvalidError, match="a file of its own"):
        refuse_unwritable(tmp_path / "new", tmp_path / "new")
    refuse_unwritable(tmp_path / "new", tmp_path / "other", "-", None, reads=(trace, "-", None))
    refuse_unwritable("/dev/null", "/dev/null", reads=("/dev/null",))
    assert trace.read_text() == "{}"
