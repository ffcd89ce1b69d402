# SPDX-License-Identifier: Apache-2.0
"""What the site has besides the files of docs/: its version, the reference, the changes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import reference  # noqa: E402

import kvcore  # noqa: E402

#: Documents beside docs/, and the pages that they become.
BESIDE = {"CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md"}


def on_config(config: Any) -> Any:
    config.site_name = f"kvcore {kvcore.__version__}"
    config.copyright = f"kvcore {kvcore.__version__}, licensed under Apache-2.0"
    for section in config.nav:
        if "Reference" in section:
            section["Reference"] = [{name: reference.path_of(name)} for name in reference.MODULES]
    return config


def on_files(files: Files, config: Any) -> Files:
    for path, text in reference.pages().items():
        files.append(File.generated(config, path, content=text))
    for name, page in BESIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("(docs/", "(")
        files.append(File.generated(config, page, content=text))
    for name in ("iframe-worker.js", "site.css"):
        source = HERE / name
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links that leave docs/ lead to the pages made of what is there."""
    for name, page in {**BESIDE, "README.md": "index.md"}.items():
        markdown = markdown.replace(f"(../../{name})", f"(../{page})")
    return markdown
