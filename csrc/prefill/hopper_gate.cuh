// Stage gate: log-decay in base 2 and write strength.
#pragma once
#include "hopper.h"
#include "hopper_ptx.cuh"
#include "hopper_record.h"

namespace kda::hopper {

constexpr float kLog2e = 1.4426950408889634f;

// log_decay: g        softplus: -a softplus(g + bias)        bounded: lower_bound sigmoid(a (g + bias));  all times log2(e)
template <Gate GATE>
struct LogDecay {
  float slope, shift[4], outer;  // of four channels

  __device__ __forceinline__ LogDecay(const HopperForward& p, int head, int channel) {
    const float a = p.A_log ? __expf(p.A_log[head]) : 1.0f;
    float bias[4] = {};
    if (GATE != Gate::log_decay && p.dt_bias) {
      const float4 x = *reinterpret_cast<const float4*>(p.dt_bias + head * 128 + channel);
      bias[0] = x.x, bias[1] = x.y, bias[2] = x.z, bias[3] = x.w;
    }
    slope = GATE == Gate::bounded ? -a * kLog2e : kLog2e;
    outer = GATE == Gate::bounded ? p.lower_bound * kLog2e : -a;
#pragma unroll
    for (int c = 0; c < 4; ++c) shift[c] = bias[c] * slope;
  }

  __device__ __forceinline__ float operator()(float g, int c) const {
    if (GATE == Gate::log_decay) return g * kLog2e;
    const float x = fmaf(g, slope, shift[c]);
    if (GATE == Gate::bounded) return outer * reciprocal_fast(1.0f + exp2_fast(x));
    return outer * (fmaxf(x, 0.0f) + log2_fast(1.0f + exp2_fast(-fabsf(x))));
  }
};

__device__ __forceinline__ float write_strength(const HopperForward& p, int64_t at) {
  float x = p.beta_float32 ? static_cast<const float*>(p.beta)[at] : __bfloat162float(static_cast<const __nv_bfloat16*>(p.beta)[at]);
  if (p.beta_kind != Beta::given) x = reciprocal_fast(1.0f + exp2_fast(-x * kLog2e));
  return p.beta_kind == Beta::double_sigmoid ? 2.0f * x : x;
}

}  // namespace kda::hopper
