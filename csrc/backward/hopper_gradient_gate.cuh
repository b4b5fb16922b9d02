// Gates of the gradient kernel, two channels: log-decays in base 2 as in hopper_gate.cuh, and their gradients.
#pragma once
#include "../prefill/hopper_gate.cuh"

namespace kda::hopper {

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
