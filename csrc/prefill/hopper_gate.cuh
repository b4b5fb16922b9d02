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

  __device__ __forceinline__ LogDecay(const HopperForward& p, int head, int channels, int channel) {
    const float a = p.A_log ? __expf(p.A_log[head]) : 1.0f;
    float bias[4] = {};
    if (GATE != Gate::log_decay && p.dt_bias) {
      const float4 x = *reinterpret_cast<const float4*>(p.dt_bias + head * channels + channel);
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

__device__ __forceinline__ float beta_at(const HopperForward& p, int64_t at) {
  return p.beta_float32 ? static_cast<const float*>(p.beta)[at] : __bfloat162float(static_cast<const __nv_bfloat16*>(p.beta)[at]);
}
// The same in two steps: asked for, and waited for where it becomes a number.
__device__ __forceinline__ uint32_t ask_for_beta(const HopperForward& p, int64_t at) {
  return load_word_or_half(static_cast<const uint8_t*>(p.beta) + (p.beta_float32 ? 4 : 2) * at, p.beta_float32);
}
__device__ __forceinline__ float beta_of(const HopperForward& p, uint32_t raw) { return __uint_as_float(p.beta_float32 ? raw : raw << 16); }

// Of the caller's beta.
__device__ __forceinline__ float write_strength(const HopperForward& p, float x) {
  if (p.beta_kind != Beta::given) x = reciprocal_fast(1.0f + exp2_fast(-x * kLog2e));
  return p.beta_kind == Beta::double_sigmoid ? 2.0f * x : x;
}

// To a rounding or two, for a backward: the scan's own strengths round to the same numbers.
__device__ __forceinline__ float exact_strength(const HopperForward& p, float x) {
  if (p.beta_kind == Beta::given) return x;
  const float s = 1.0f / (1.0f + expf(-x));
  return p.beta_kind == Beta::double_sigmoid ? 2.0f * s : s;
}

// Gates of the gradient kernel: the same log-decays of four channels, and their gradients.
constexpr float kGateFloor = -29.0f, kLn2 = 0.6931471805599453f;  // the floor of hopper_prepare_decay.cuh

template <Gate GATE>
struct GateOf {
  float a, bound, shift[4];  // shift: the bias, in the units of x

  // `a`: e^A_log of the head. `bias`: a function that reads the channels' bias, called where there is one.
  template <typename Bias>
  __device__ __forceinline__ GateOf(const HopperForward& p, float a, Bias bias) : a(a), bound(p.lower_bound * kLog2e), shift{} {
    if (GATE == Gate::log_decay) return;
    if (p.dt_bias) {
      const float4 x = bias();
      shift[0] = x.x, shift[1] = x.y, shift[2] = x.z, shift[3] = x.w;
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) shift[c] *= kLog2e;
  }

  __device__ __forceinline__ float x(float g, int c) const { return fmaf(g, kLog2e, shift[c]); }
  __device__ __forceinline__ float log2_decay(float g, int c) const {
    if (GATE == Gate::log_decay) return g * kLog2e;
    if (GATE == Gate::bounded) return bound * reciprocal_fast(1.0f + exp2_fast(-a * x(g, c)));
    const float y = x(g, c);
    return -a * (fmaxf(y, 0.0f) + log2_fast(1.0f + exp2_fast(-fabsf(y))));
  }
};

// A log-decay that was raised to the floor has this share of its gradient.
__device__ __forceinline__ void share_of_raised(float (&d)[4], const float (&log2_decay)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) d[c] *= exp2_fast(fminf(log2_decay[c] - kGateFloor, 0.0f));
}

// From d, the gradients of a token's log-decays in units of `back`: those of g; terms of d_A_log are added to A, in units of `A_unit`.
template <Gate GATE>
struct ThroughGate {
  const GateOf<GATE>& gates;
  float unit, A_unit;

  __device__ __forceinline__ ThroughGate(const GateOf<GATE>& gates, float back)
      : gates(gates),
        unit(GATE == Gate::bounded ? gates.a * gates.bound * kLn2 * back : -gates.a * back),
        A_unit(GATE == Gate::bounded ? kLn2 : unit * kLn2) {}

  __device__ __forceinline__ void operator()(float (&d)[4], float (&A)[4], const float (&g)[4], bool raised) const {
    float y[4], slope[4];  // softplus in base 2; its slope
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float z = gates.x(g[c], c), x = GATE == Gate::bounded ? gates.a * z : z;
      const float e = exp2_fast(-fabsf(x)), r = reciprocal_fast(1.0f + e);
      if (GATE == Gate::bounded) {  // by its root on either side of d: alone it may be too small for a float
        d[c] = (e * r) * (r * (d[c] * unit));
        A[c] = fmaf(z, d[c], A[c]);
      } else {
        y[c] = fmaxf(x, 0.0f) + log2_fast(1.0f + e), slope[c] = x >= 0.0f ? r : e * r;
      }
    }
    if (GATE == Gate::bounded) return;
    if (raised) {
      float log2_decay[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) log2_decay[c] = -gates.a * y[c];
      share_of_raised(d, log2_decay);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) A[c] = fmaf(y[c], d[c], A[c]), d[c] *= slope[c] * unit;
  }
};

}  // namespace kda::hopper
