# SPDX-License-Identifier: Apache-2.0
"""A model's figures as a TOML file to edit."""

from __future__ import annotations

from kvcore.replay.models.profile import MODEL_FIGURES, PREFILL, ModelProfile

__all__ = ["missing_figures", "model_toml"]

HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# A model of kvcore replay (--model FILE.toml). Each figure has a value, a basis (measured,
# published, fitted or assumed) and a source. Figures that stand behind a # are missing.
"""


def missing_figures(model: ModelProfile) -> tuple[str, ...]:
    """The figures that the model could have and lacks; those of prompts for dense models only."""
    optional = PREFILL if model.topk else ()
    return tuple(key for key in MODEL_FIGURES if key not in model.figures and key not in optional)


def model_toml(model: ModelProfile) -> str:
    """The text of a file that `ModelProfile.load` reads as the same model.

    A missing figure becomes a comment that says what the figure is.
    """
    parts = [HEAD, f"name = {_text(model.name)}"]
    if model.note:
        parts.append(f"note = {_text(model.note)}")
    if model.device:
        parts.append(f"device = {_text(model.device)}")
    for key, (what, _, _) in MODEL_FIGURES.items():
        figure = model.figures.get(key)
        if figure is None:
            parts.append(f'\n# {what}\n# [{key}]\n# value = \n# basis = "measured"\n# source = ""')
            continue
        value = figure.value
        if isinstance(value, str):
            shown = _text(value)
        elif isinstance(value, tuple):
            shown = f"[{', '.join(map(str, value))}]"
        else:
            shown = repr(value)
        parts.append(
            f"\n# {what}\n[{key}]\nvalue = {shown}\nbasis = {_text(figure.basis)}\n"
            f"source = {_text(figure.source)}"
        )
    return "\n".join(parts) + "\n"


def _text(value: str) -> str:
    """A basic string of TOML; what no file of UTF-8 can hold is replaced."""
    found = []
    for character in value.encode(errors="replace").decode():
        if character in '\\"':
            found.append("\\" + character)
        elif ord(character) < 0x20 or ord(character) == 0x7F:
            found.append(f"\\u{ord(character):04x}")
        else:
            found.append(character)
    return f'"{"".join(found)}"'
