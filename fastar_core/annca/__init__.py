"""AnnCA: fewer prompt rows in cross-attention (design: 6). Exact for repeated rows, approximate by a keep rule per latent frame."""

from .pruner import PromptPruner
from .settings import AnnCASettings

__all__ = ["AnnCASettings", "PromptPruner"]
