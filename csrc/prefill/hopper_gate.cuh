// Stage gate: log-decay in base 2 and write strength; and for the gradient kernel the log-decay's gradient.
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

// Gates of the gradient kernel, two channels: the same log-decays, and their gradients.
constexpr float kGateFloor = -29.0f, kLn2 = 0.6931471805599453f;  // the floor of hopper_prepare_decay.cuh

template <Gate GATE>
struct GateOf {
  float a, lower_bound, bias[2];

  __device__ __forceinline__ GateOf(const HopperForward& p, int head, int channel) : lower_bound(p.lower_bound), bias{} {
    a = GATE != Gate::log_decay && p.A_log ? __expf(p.A_log[head]) : 1.0f;
    if (GATE != Gate::log_decay && p.dt_bias) {
      const float2 x = *reinterpret_cast<const float2*>(p.dt_bias + head * kHead + channel);
      bias[0] = x.x, bias[1] = x.y;
    }
  }

  __device__ __forceinline__ float log2_decay(float g, int c) const {
    if (GATE == Gate::log_decay) return g * kLog2e;
    const float x = (g + bias[c]) * kLog2e;
    if (GATE == Gate::bounded) return lower_bound * kLog2e * reciprocal_fast(1.0f + exp2_fast(-a * x));
    return -a * (fmaxf(x, 0.0f) + log2_fast(1.0f + exp2_fast(-fabsf(x))));
  }

  // From d, the gradient of the log-decay: that of g, and the term of d_A_log.
  __device__ __forceinline__ float2 backward(float g, float d, int c) const {
    if (GATE == Gate::log_decay) return make_float2(d, 0.0f);
    const float x = g + bias[c], y = GATE == Gate::bounded ? a * x : x;
    const float e = exp2_fast(-fabsf(y) * kLog2e), r = reciprocal_fast(1.0f + e);
    if (GATE == Gate::bounded) {
      const float d_x = (e * r) * (r * (d * (a * lower_bound)));
      return make_float2(d_x, x * d_x);
    }
    return make_float2(-a * (x >= 0.0f ? r : e * r) * d, -a * (fmaxf(x, 0.0f) + log2_fast(1.0f + e) * kLn2) * d);
  }
};

}  // namespace kda::hopper
