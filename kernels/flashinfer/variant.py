"""The attention variant in C++ that FlashInfer compiles: a float32 bias per key, added to the logits.

Logits come before the softmax scale, so the tensor holds bias / scale. The last key tile runs past the request before it is
masked, so the index is clamped. fa3 passes 0 as batch index: there the offset of the request is taken in the constructor.
"""

from __future__ import annotations

from typing import Any

import torch

NAME = "KeyBias"
TENSOR = "key_bias"
SCALAR = "sm_scale"

FA2 = """
struct KeyBias : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;
  const float* bias;
  template <typename Params>
  __device__ __host__ KeyBias(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    sm_scale_log2 = params.sm_scale * math::log2e;
    bias = params.key_bias + first_key(params, batch_idx);
  }
  template <typename Params>
  __device__ __host__ __forceinline__ static int64_t first_key(const Params& params, uint32_t b) {
    if constexpr (std::is_same_v<Params, RaggedParams>) { return params.kv_indptr[b]; }
    else { return params.paged_kv.indptr[b]; }
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return logits + bias[min(kv_idx, kv_len - 1)];
  })
};
"""

FA3 = """
struct KeyBias : AttentionVariantBase {
  float sm_scale_log2, scale_pv;
  const float* bias;
  int last;
  template <typename MainloopParams, typename BlockCoord>
  __device__ __host__ KeyBias(const MainloopParams& params, const BlockCoord& block_coord) {
    auto [q_tile_idx, qo_head_idx, kv_head_idx, qo_indptr, kv_indptr, qo_len, kv_len, batch_idx] = block_coord;
    sm_scale_log2 = params.additional_params.sm_scale * math::log2e;
    scale_pv = 1.0f;
    bias = params.additional_params.key_bias + kv_indptr;
    last = kv_len - 1;
  }
  template <int NUM_ROWS_PER_THREAD>
  __device__ auto GetAttentionUpdater() {
    return OnlineSoftmax<NUM_ROWS_PER_THREAD, /*WITH_SCALE=*/true>(sm_scale_log2);
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return logits + bias[min(int(kv_idx), last)];
  })
};
"""


def jit_args(generation: str, dtype: torch.dtype, head_dim: int) -> list[Any]:
    """What FlashInfer's wrapper wants to know about the variant; ``generation`` is fa2 or fa3."""
    source = {"fa2": FA2, "fa3": FA3}[generation]
    uri = f"fastar_key_bias_{generation}_{str(dtype).removeprefix('torch.')}_{head_dim}"
    return [
        uri, dtype, dtype, dtype, torch.int32, head_dim, head_dim, [TENSOR], ["float"], [SCALAR], ["double"], NAME, source,
    ]  # fmt: skip


def jit_kwargs(generation: str) -> dict[str, Any]:
    return {"paged_kv_stride_mode": "independent"} if generation == "fa2" else {}
