// The activations of g, beta, q and k.
#pragma once

#include "chunks.cuh"

namespace kda {

__device__ __forceinline__ float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x >= 0.f ? 1.f : e) / (1.f + e);
}

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

// The log-decay of a raw gate: `a` = exp(A_log), `x` = g + dt_bias.
__device__ __forceinline__ float log_decay(int gate, float x, float a, float lower_bound) {
  if (gate == KDA_GATE_SOFTPLUS) return -a * softplus(x);
  if (gate == KDA_GATE_BOUNDED) return lower_bound * sigmoid(a * x);
  return x;
}

__device__ __forceinline__ float write_strength(int kind, float beta) {
  return kind == KDA_BETA_GIVEN ? beta : (kind == KDA_BETA_SIGMOID ? 1.f : 2.f) * sigmoid(beta);
}

}  // namespace kda
