"""Which video models AnnCA and AnnSA know outside streaming: one row per class of the host (item by item, read from its forward)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...fastar_core.annsa.video import VideoRows

Kind = Literal["cross", "joint"]


@dataclass(frozen=True)
class ModelRow:
    """How to read the attention calls of one class.

    kind: "cross" = video self-attention, then text cross-attention (told by the number of text rows; image attention has others);
    "joint" = one attention over video and text. ``blocks``: (attribute of the network, name in patches_replace["dit"]), in the order
    they run; an empty name = the host offers no such place, calls are counted instead. text_first: in a joint call text rows come
    before those of the video. patch: rows and columns of latent pixels in a token; patch_t: latent frames in a token (attribute name).
    """

    kind: Kind
    blocks: tuple[tuple[str, str], ...]
    patch: int
    text_first: bool = False
    patch_t: str = ""

    def layers(self, network: Any) -> list[tuple[str, int]]:
        """(place name, index in its list) of every block."""
        return [(name, i) for attribute, name in self.blocks for i in range(len(getattr(network, attribute)))]

    def video_rows(self, network: Any, latent_shape: tuple[int, ...], rows: int) -> VideoRows:
        """Where ``rows`` rows of a self-attention hold the video of a latent [B, C, T, h, w]; frames 0 where the count does not fit
        (reference frames, guides): then the sequence is cut into pieces."""
        frames, height, width = latent_shape[2:]
        step = (getattr(network, self.patch_t) or 1) if self.patch_t else 1
        frames = -(-frames // step)
        tokens = -(-height // self.patch) * -(-width // self.patch)
        if self.kind == "joint":
            video = frames * tokens
            return VideoRows(rows - video if self.text_first else 0, frames, tokens) if video <= rows else VideoRows(0, 0, rows)
        return VideoRows(0, rows // tokens, tokens) if rows % tokens == 0 else VideoRows(0, 0, rows)


_WAN = ModelRow("cross", (("blocks", "double_block"),), 2)
TABLE = {
    "WanModel": _WAN,
    "CausalWanModel": _WAN,
    "LTXVModel": ModelRow("cross", (("transformer_blocks", "double_block"),), 1),
    "HunyuanVideo": ModelRow("joint", (("double_blocks", "double_block"), ("single_blocks", "single_block")), 2),
    "AsymmDiTJoint": ModelRow("joint", (("blocks", "double_block"),), 2),
    "CogVideoXTransformer3DModel": ModelRow("joint", (("blocks", ""),), 2, text_first=True, patch_t="patch_size_t"),
}
NAMES = "Wan 2.1 and 2.2 (text and image to video), LTX video, HunyuanVideo, Mochi, CogVideoX"


def row_of(network: Any) -> ModelRow | None:
    """The row of the network's own class; a subclass may do anything, so it needs a row of its own."""
    return TABLE.get(type(network).__name__)


def why_not(network: Any, text: bool) -> str | None:
    """Why AnnCA (``text``) or AnnSA cannot act on the network, in words; None when it can."""
    row = row_of(network)
    if row is None:
        return f"the model is a {type(network).__name__}, which is not among those known ({NAMES}); it is left as it is"
    if text and row.kind == "joint":
        return f"not applicable to a {type(network).__name__}: joint attention mixes video and text rows; the model is left as it is"
    return None
