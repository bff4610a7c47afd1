"""What every node owes the person who uses it: an id and names under our prefix, tooltips, ranges, a help page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MIN_TOOLTIP = 15


def node_faults(node_id: str, display_name: str, cls: Any, docs: Path) -> list[str]:
    """Faults of one V1 node class whose help page lies in `docs`, as lines of text."""
    faults = [] if node_id.startswith("FastAR") else ["the id does not start with FastAR"]
    if not display_name.startswith("FAST-AR "):
        faults.append(f"the display name '{display_name}' does not start with 'FAST-AR '")
    if cls.CATEGORY != "FAST-AR" and not cls.CATEGORY.startswith("FAST-AR/"):
        faults.append(f"the category is '{cls.CATEGORY}'")
    if len(getattr(cls, "DESCRIPTION", "")) < MIN_TOOLTIP:
        faults.append("there is no DESCRIPTION")
    if not callable(getattr(cls, cls.FUNCTION, None)):
        faults.append(f"FUNCTION names '{cls.FUNCTION}', which is no method")
    inputs = {
        name: spec for group in ("required", "optional") for name, spec in cls.INPUT_TYPES().get(group, {}).items()
    }
    for name, spec in inputs.items():
        faults += _input_faults(name, spec)
    faults += _output_faults(cls)
    faults += _page_faults(docs / f"{node_id}.md", [*inputs, *getattr(cls, "RETURN_NAMES", cls.RETURN_TYPES)])
    return [f"{node_id}: {fault}" for fault in faults]


def _input_faults(name: str, spec: tuple[Any, ...]) -> list[str]:
    options = spec[1] if len(spec) > 1 else {}
    faults = [] if len(options.get("tooltip", "")) >= MIN_TOOLTIP else [f"input {name} has no tooltip"]
    if spec[0] in ("INT", "FLOAT") and not {"default", "min", "max"} <= set(options):
        faults.append(f"input {name} lacks a default, min or max")
    return faults


def _output_faults(cls: Any) -> list[str]:
    outputs = len(cls.RETURN_TYPES)
    faults = []
    for attribute in ("RETURN_NAMES", "OUTPUT_TOOLTIPS"):
        if len(getattr(cls, attribute, ())) != outputs:
            faults.append(f"{attribute} does not name all {outputs} outputs")
    return faults


def _page_faults(page: Path, names: list[str]) -> list[str]:
    if not page.is_file():
        return [f"there is no help page {page.name}"]
    text = page.read_text(encoding="utf-8")
    return [f"the help page {page.name} does not mention `{name}`" for name in names if f"`{name}`" not in text]
