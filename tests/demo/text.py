"""The demo text encoder on the training side: one UMT5 layer over whole words, in the layout the host's class loads.

Only real rows are computed. The host pads the rows to 512 and zeroes the padding; attention over those equal rows is
the same as attention over one of them with the bias log(number), which is what `pad_bias` is for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

PAD, END, UNKNOWN = 0, 1, 2
SPECIAL = ("<pad>", "</s>", "<unk>")
TEXT_LENGTH = 512
CONFIG = {
    "d_model": 4096,
    "d_kv": 8,
    "num_heads": 4,
    "d_ff": 32,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "dense_act_fn": "gelu_pytorch_tanh",
    "is_gated_act": True,
    "model_type": "umt5",
}
ATTENTION = "encoder.block.0.layer.0"
FEED = "encoder.block.0.layer.1"
BUCKETS = 32


def tokenize(prompt: str, index: Mapping[str, int]) -> list[int]:
    """Lower-case words without punctuation -> ids, unknown words as <unk>, the end token last."""
    words = re.findall(r"[a-z0-9]+", prompt.lower())[: TEXT_LENGTH - 1]
    return [index.get(word, UNKNOWN) for word in words] + [END]


def word_index(words: Sequence[str]) -> dict[str, int]:
    """Word -> id; the first ids are the special tokens."""
    return {word: number for number, word in enumerate((*SPECIAL, *words))}


def init_text(vocab: int, seed: int) -> dict[str, Tensor]:
    """Fresh fp32 weights; head 0 starts by looking one word back, head 1 two back, head 2 one ahead."""
    g = torch.Generator().manual_seed(seed)
    width, inner, feed = CONFIG["d_model"], CONFIG["d_kv"] * CONFIG["num_heads"], CONFIG["d_ff"]

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=g) * std

    bias = torch.zeros(BUCKETS, CONFIG["num_heads"])
    bias[1, 0] = bias[2, 1] = bias[BUCKETS // 2 + 1, 2] = 5.0
    weights = {"shared.weight": normal(vocab, width, std=1.0), "encoder.final_layer_norm.weight": torch.ones(width)}
    for name in "qk":
        weights[f"{ATTENTION}.SelfAttention.{name}.weight"] = normal(inner, width, std=0.5 / width**0.5)
    weights[f"{ATTENTION}.SelfAttention.v.weight"] = normal(inner, width, std=1 / width**0.5)
    weights[f"{ATTENTION}.SelfAttention.o.weight"] = normal(width, inner, std=1 / CONFIG["d_kv"] ** 0.5)
    weights[f"{ATTENTION}.SelfAttention.relative_attention_bias.weight"] = bias
    for name in ("wi_0", "wi_1"):
        weights[f"{FEED}.DenseReluDense.{name}.weight"] = normal(feed, width, std=1 / width**0.5)
    weights[f"{FEED}.DenseReluDense.wo.weight"] = normal(width, feed, std=0.3 / feed**0.5)
    for name in (ATTENTION, FEED):
        weights[f"{name}.layer_norm.weight"] = torch.ones(width)
    return weights


def position_buckets(length: int) -> Tensor:
    """UMT5's bidirectional relative position buckets [length, length] (32 buckets, 128 words)."""
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    half, exact, far = BUCKETS // 2, BUCKETS // 4, 128
    size = distance.abs()
    large = exact + (torch.log(size.float().clamp_min(1) / exact) / math.log(far / exact) * (half - exact)).long()
    return torch.where(size < exact, size, large.clamp_max(half - 1)) + (distance > 0) * half


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def encode(weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """ids [B, L] (0 = padding at the end) -> rows [B, L, 4096] with zeros at the padding."""
    heads = CONFIG["num_heads"]
    name = ATTENTION + ".SelfAttention"
    words = weights["shared.weight"]
    normed = _norm(words, weights[ATTENTION + ".layer_norm.weight"])
    q, k, v = (F.linear(normed, weights[f"{name}.{n}.weight"])[ids].unflatten(-1, (heads, -1)).transpose(1, 2) for n in "qkv")
    bias = weights[name + ".relative_attention_bias.weight"][position_buckets(ids.shape[1])].permute(2, 0, 1)
    score = (q @ k.transpose(-1, -2) + bias).masked_fill((ids == PAD)[:, None, None], float("-inf"))
    mixed = (score.softmax(-1) @ v).transpose(1, 2).flatten(2)
    keep = ids != PAD
    rows = words[ids[keep]] + F.linear(mixed[keep], weights[name + ".o.weight"])
    y = _norm(rows, weights[FEED + ".layer_norm.weight"])
    gate = F.gelu(F.linear(y, weights[FEED + ".DenseReluDense.wi_0.weight"]), approximate="tanh")
    inner = gate * F.linear(y, weights[FEED + ".DenseReluDense.wi_1.weight"])
    rows = rows + F.linear(inner, weights[FEED + ".DenseReluDense.wo.weight"])
    rows = _norm(rows, weights["encoder.final_layer_norm.weight"])
    return rows.new_zeros(*ids.shape, rows.shape[-1]).masked_scatter(keep[..., None], rows)


def batch_ids(prompts: Sequence[str], index: Mapping[str, int], spare: int = 1) -> Tensor:
    """Token ids [N, L + spare]; the spare columns at the end are padding for every prompt."""
    rows = [tokenize(prompt, index) for prompt in prompts]
    out = torch.zeros(len(rows), max(map(len, rows)) + spare, dtype=torch.long)
    for number, row in enumerate(rows):
        out[number, : len(row)] = torch.tensor(row)
    return out


def pad_bias(ids: Tensor) -> Tensor:
    """Attention bias [N, L]: 0 at words, log(512 - words) at the last column, -inf at the other padding."""
    count = (ids != PAD).sum(1)
    bias = torch.zeros(ids.shape).masked_fill(ids == PAD, float("-inf"))
    bias[:, -1] = torch.log((TEXT_LENGTH - count).float())
    return bias
