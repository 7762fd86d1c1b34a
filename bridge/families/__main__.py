"""Write docs/models.md from the registry: `python -m megaswift.bridge.families`."""

from pathlib import Path

from . import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

HEAD = """# Models

Made from the registry by `python -m megaswift.bridge.families`; do not edit.

A checkpoint's `architectures` in its config.json decide which family reads it. Weights are read from safetensors and
written back as a Hugging Face folder. A setting that a family does not take is an error that names it.

| `model_type` | `architectures` | Checkpoints | Not taken |
|---|---|---|---|
"""


def page() -> str:
    """The page's text."""
    lines = [
        f"| {family.name} | {', '.join(family.architectures)} | {family.models} | {'; '.join(family.limits)} |\n"
        for family in FAMILIES
    ]
    return HEAD + "".join(lines)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
