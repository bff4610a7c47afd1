"""From a weight file of any published style to one complete, checked state dict under native names.

The pieces: checkpoint_files reads, checkpoint_keys renames, checkpoint_shapes checks, checkpoint_lora merges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checkpoint_files import read_weight_file
from .checkpoint_keys import Findings, native_names, pick_state_dict, some
from .checkpoint_lora import merge_lora
from .checkpoint_shapes import ModelShape, check_state_dict, expected_names, is_companion, not_wan, transformer_config
from .errors import CheckpointError

_SIZES = ("dim", "ffn_dim", "num_layers", "in_dim", "out_dim")


@dataclass
class Checkpoint:
    """A complete model: `state_dict` under native names (file dtypes), its sizes, and how it was read."""

    name: str
    state_dict: dict[str, torch.Tensor]
    shape: ModelShape
    metadata: dict[str, str]
    findings: Findings

    def lines(self) -> list[str]:
        """Report lines: what was found and what was ignored; warnings are not in it."""
        lines = [f"file: {self.name}", f"model: {self.shape}", *self.findings.found]
        lines += [f"ignored: {count} in {group}" for group, count in sorted(self.findings.ignored.items())]
        return lines

    def host_metadata(self) -> dict[str, str]:
        """Metadata whose 'config' tells the host what it cannot see from shapes; sizes come from the weights alone."""
        config = {key: value for key, value in transformer_config(self.metadata).items() if key not in _SIZES}
        config |= {"num_heads": self.shape.heads, "text_dim": self.shape.text_dim}
        if not self.shape.image_input and self.shape.in_channels == self.shape.out_channels:
            config.setdefault("causal_ar", True)
        return {**self.metadata, "config": json.dumps({"transformer": config})}


def load_checkpoint(
    path: str | Path, use_ema: bool, lora: str | Path | None = None, strength: float = 1.0
) -> Checkpoint:
    """Reads a model file, and merges a LoRA file into it when one is given.

    `use_ema` chooses between the entries 'generator_ema' and 'generator' where a file has them. Raises CheckpointError.
    """
    content, metadata = read_weight_file(path)
    checkpoint = normalise(content, metadata, use_ema, Path(path).name)
    if lora is not None and strength != 0:
        lora_content, lora_metadata = read_weight_file(lora)
        line = merge_lora(checkpoint.state_dict, lora_content, lora_metadata, strength, Path(lora).name)
        checkpoint.findings.found.append(line)
    return checkpoint


def normalise(content: Mapping[str, Any], metadata: Mapping[str, str], use_ema: bool, name: str) -> Checkpoint:
    """The checked model in a file's content. CheckpointError names what is missing or what the file is instead."""
    findings = Findings()
    picked = pick_state_dict(content, use_ema, findings)
    if not picked:
        raise CheckpointError(not_wan([str(key) for key in content], name))
    if any(".lora_A" in key or ".lora_down" in key for key in picked):
        raise CheckpointError(not_wan(picked, name))
    state = native_names(picked, findings)
    shape = check_state_dict(state, metadata, name)
    expected = expected_names(shape.layers, shape.image_input)
    unknown = [key for key in state if key not in expected and not is_companion(key)]
    if unknown:
        findings.ignored["unknown entries"] += len(unknown)
        findings.warnings.append(f"{len(unknown)} unknown entries were left out: {some(unknown)}")
    if "generator_lora" in content:
        findings.warnings.append(
            "the file also holds a LoRA ('generator_lora'), which is not applied by itself; to merge it, choose the "
            "same file as 'lora'"
        )
    _note_companions(state, findings)
    kept = {key: state[key] for key in state if key in expected or is_companion(key)}
    return Checkpoint(name, kept, shape, dict(metadata), findings)


def _note_companions(state: Mapping[str, torch.Tensor], findings: Findings) -> None:
    count = sum(map(is_companion, state))
    if count:
        findings.found.append(f"quantised weights with {count} scales or marks, passed on to the host")
    dtypes = sorted({str(value.dtype).removeprefix("torch.") for key, value in state.items() if not is_companion(key)})
    findings.found.append(f"stored as {', '.join(dtypes)}")
