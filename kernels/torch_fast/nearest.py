"""Best key of every row by matrix products, a bounded part of the score matrix at a time."""

from __future__ import annotations

from functools import cache

import torch

from ..constraints import Limits
from ..knobs import score_bytes

LIMITS = Limits("nearest")
why_not = LIMITS.why_not
ZERO_NORM = 1e-12
HIDDEN = -1e30
CHUNK = 64
CACHE_BYTES = 2**20
MIN_ROWS = 32  # fewer rows starve the matrix product


def prepared(codes: torch.Tensor, scale: torch.Tensor | None, metric: str) -> torch.Tensor:
    """float32 rows; of unit length for cosine."""
    rows = codes.float() if scale is None else codes.float() * scale[..., None]
    return torch.nn.functional.normalize(rows, dim=-1, eps=ZERO_NORM) if metric == "cosine" else rows


def _offset(keys: torch.Tensor, valid: torch.Tensor | None, metric: str) -> torch.Tensor | None:
    """What is added to the score of each of the keys [M, D], None for nothing; keys that don't count are hidden by it."""
    if valid is None and metric != "l2":
        return None
    offset = -keys.square().sum(-1) if metric == "l2" else torch.zeros(keys.shape[0], device=keys.device)
    return offset if valid is None else offset.masked_fill(~valid, HIDDEN)


class _Keys:
    """Keys of one head made ready, and room for the scores of ``step`` rows, shared by all heads (fresh memory would cost more
    than the product)."""

    def __init__(self, step: int, num_keys: int, metric: str, device: torch.device, integer: bool) -> None:
        self.metric, self.integer = metric, integer
        self._room = torch.empty(step * num_keys, dtype=torch.float32, device=device)
        self._whole = torch.empty(step * num_keys, dtype=torch.int32) if integer else None

    def take(self, keys: torch.Tensor, scale: torch.Tensor | None, valid: torch.Tensor | None) -> None:
        if valid is not None:
            keys = keys.masked_fill(~valid[:, None], 0)
            scale = None if scale is None else scale.masked_fill(~valid, 0)
        rows = keys if self.integer and self.metric == "dot" else prepared(keys, scale, self.metric)
        self.offset = _offset(rows, valid, self.metric)
        self.keys, self.scale = (keys, scale) if self.integer else (rows, None)

    def best(self, rows: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Score and place [n] of the best key of rows [n, D]; a score of -inf where no key counts."""
        shape = (len(rows), len(self.keys))
        out = self._room[:shape[0] * shape[1]].view(shape)
        mine = prepared(rows, scale, self.metric)
        factor = 2.0 if self.metric == "l2" else 1.0
        if self._whole is not None and scale is not None and self.scale is not None:
            whole = torch._int_mm(rows, self.keys.T, out=self._whole[:shape[0] * shape[1]].view(shape))
            if self.offset is None and self.scale.stride(0) == 0:  # one scale for all keys: the integers rank as they are
                top, where = _best(whole)
                return top * self.scale[0] * scale, where
            torch.mul(whole, factor * self.scale, out=out).mul_(scale[:, None])
            out = out if self.offset is None else out.add_(self.offset)
        elif self.offset is None:
            torch.mm(mine, self.keys.T, out=out)
        else:
            torch.addmm(self.offset, factor * mine, self.keys.T, out=out)
        top, where = _best(out)
        nothing = top <= HIDDEN / 2
        if self.metric == "l2":
            top = (top - mine.square().sum(-1)).clamp_max(0)
        return top.masked_fill(nothing, -torch.inf), where.masked_fill(nothing, -1)


def _in_integers(q: torch.Tensor, keys: torch.Tensor, metric: str) -> bool:
    """8-bit codes are multiplied as such on the CPU, in a tenth of the time; a cosine needs rows of unit length."""
    return metric != "cosine" and q.device.type == "cpu" and q.dtype == keys.dtype == torch.int8 and _integers_multiply()


@cache
def _integers_multiply() -> bool:
    """Whether this torch multiplies 8-bit matrices on the CPU, with any number of rows and columns."""
    a = torch.arange(-120, 121, dtype=torch.int8)[:3 * 67].view(3, 67)
    try:
        made = torch._int_mm(a, a.T, out=torch.empty(9, dtype=torch.int32).view(3, 3))
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(made.long(), a.long() @ a.long().T)


def _rows_at_once(num_rows: int, num_keys: int, device: torch.device) -> int:
    """On the CPU a score matrix that stays in the cache; elsewhere one below the knob."""
    if device.type == "cpu":
        return max(1, min(num_rows, max(MIN_ROWS, CACHE_BYTES // (4 * num_keys))))
    return max(1, min(num_rows, score_bytes() // (4 * num_keys)))


def _best(score: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Highest of each row [n, M] and its first place: torch finds a maximum much faster than where it stands, so the place is
    only looked for in the chunk that holds it."""
    whole = score.shape[1] // CHUNK
    if whole < 2:
        return score.max(-1)
    chunks = score[:, :whole * CHUNK].unflatten(-1, (whole, CHUNK))
    top, chunk = chunks.amax(-1).max(-1)
    inside = chunks[torch.arange(len(score), device=score.device), chunk]
    place = chunk * CHUNK + inside.max(-1).indices
    if whole * CHUNK == score.shape[1]:
        return top, place
    last, behind = score[:, whole * CHUNK:].max(-1)
    return torch.maximum(top, last), torch.where(last > top, whole * CHUNK + behind, place)


def nearest(
    q: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor | None = None,
    metric: str = "dot",
    q_scale: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, _ = q.shape
    index = torch.full((batch, heads, rows), -1, dtype=torch.int64, device=q.device)
    score = torch.full((batch, heads, rows), -torch.inf, device=q.device)
    num_keys = keys.shape[2]
    if valid is not None and valid.device.type == "cpu" and bool(valid.all()):
        valid = None  # looking costs nothing here, and hiding a pass over the scores
    step = _rows_at_once(rows, max(1, num_keys), q.device)
    one = _Keys(step, num_keys, metric, q.device, _in_integers(q, keys, metric))
    for b in range(batch if num_keys else 0):
        for h in range(heads):
            one.take(keys[b, h], None if key_scale is None else key_scale[b, h], None if valid is None else valid[b, h])
            for at in range(0, rows, step):
                part = slice(at, at + step)
                score[b, h, part], index[b, h, part] = one.best(q[b, h, part], None if q_scale is None else q_scale[b, h, part])
    return index, score
