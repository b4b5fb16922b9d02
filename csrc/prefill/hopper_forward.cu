// Host side of the Hopper forward: what it needs, what it refuses, and its launches.
#include "hopper.h"
#include "hopper_launch.h"
#include "hopper_record.h"

namespace kdakit {
namespace {

int64_t slots_of(int64_t B, int64_t T, int64_t N, bool varlen) { return varlen ? T / kChunk + N : B * ((T + kChunk - 1) / kChunk); }

bool multiple(const TokenStrides& s, int64_t of) { return s.batch % of == 0 && s.token % of == 0 && s.head % of == 0; }
bool aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace

size_t hopper_workspace_bytes(int64_t B, int64_t T, int64_t N, int64_t HV, bool varlen) {
  return static_cast<size_t>(slots_of(B, T, N, varlen) * HV) * kRecordBytes;
}

const char* hopper_refusal(const HopperForward& p) {
  if (p.H <= 0 || p.HV % p.H != 0) return "HV must be a multiple of H";
  if (p.cu_seqlens && p.B != 1) return "cu_seqlens needs B = 1";
  if (slots_of(p.B, p.T, p.N, p.cu_seqlens) * p.HV >= (int64_t{1} << 31)) return "too many chunks for one grid";
  if (p.T >= (int64_t{1} << 30)) return "T must be below 2^30";
  const TokenStrides* all[] = {&p.q_strides, &p.k_strides, &p.v_strides, &p.g_strides};
  for (const TokenStrides* s : all) {
    if (!multiple(*s, 8)) return "q, k, v and g must have strides that are multiples of 8 elements";
    if (s->token < 0 || s->token >= (int64_t{1} << 24)) return "q, k, v and g must have token strides below 2^24 elements";
  }
  if (!aligned(p.q, 16) || !aligned(p.k, 16) || !aligned(p.v, 16) || !aligned(p.g, 16) || !aligned(p.o, 16))
    return "q, k, v, g and o must be aligned to 16 bytes";
  if (!aligned(p.workspace, 128)) return "workspace must be aligned to 128 bytes";
  if (p.dt_bias && !aligned(p.dt_bias, 16)) return "dt_bias must be aligned to 16 bytes";
  if (p.gate == Gate::softplus && !p.A_log) return "the softplus gate needs A_log";
  return nullptr;
}

cudaError_t hopper_forward(const HopperForward& p, cudaStream_t stream) {
  if (hopper_refusal(p)) return cudaErrorInvalidValue;
  const int64_t slots = slots_of(p.B, p.T, p.N, p.cu_seqlens);
  cudaError_t status = cudaSuccess;
  if (slots * p.HV > 0 && p.T > 0 && (p.stages & 1)) status = launch_prepare(p, slots, stream);
  if (status == cudaSuccess && p.N * p.HV > 0 && (p.stages & 2)) status = launch_scan(p, stream);
  return status;
}

}  // namespace kdakit
