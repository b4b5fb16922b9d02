// Stage state, in parts: b and M of every part but the last (hopper_links.cuh), the scan without outputs. M is the state that grows from
// the identity with values of zero. One block of two warp groups per part and half of [b | M].
// Where the last chunks of a part forget all that was before them (hopper_forgetting.cuh), M is zero, and b is that of these chunks alone,
// found only if the next part does not forget it.
#include "hopper_forgetting.cuh"
#include "hopper_links.cuh"
#include "hopper_wgmma.cuh"

namespace kda::hopper {
namespace {

constexpr int kGroups = 2, kFetchers = 128, kThreads = kGroups * 128 + kFetchers, kStages = 4;
// A stage: k_in, k_solved, decay, values.
constexpr int kSolvedAt = kTileBytes, kDecayAt = 2 * kTileBytes, kValuesAt = (kDecayAt + kHead * 4 + 1023) / 1024 * 1024;
constexpr int kValuesPitch = kHead * 2 + 16, kStage = kValuesAt + kChunk * kValuesPitch;
constexpr int kBarriers = kStages * kStage, kScratch = kBarriers + 2 * kStages * 8, kBytes = kScratch + 16 * 4;
static_assert(kStage % 1024 == 0 && kBytes <= 232448 && kGroups * 2 * 16384 <= kStages * kStage, "");

struct Task {
  Span span;
  const uint8_t* record;  // of its first chunk
  int64_t row, head;
  int part, chunks;
  bool matrix;  // M, not b
};

__device__ void fetch(const HopperForward& p, const Task& task, uint32_t smem, int thread) {
  constexpr int kRowUnits = kHead / 8, kStep = kFetchers / kRowUnits;  // units of 16 bytes; rows per round
  const int unit = thread % kRowUnits, row = thread / kRowUnits;
  const int64_t token_bytes = p.v_strides.token * 2;
  const auto* values = static_cast<const uint8_t*>(p.v) + 2 * (task.span.batch * p.v_strides.batch + task.head * p.v_strides.head +
                                                               task.span.first * p.v_strides.token + unit * 8);
  const uint8_t *record = task.record, *from = values + row * token_bytes;
  int left = static_cast<int>(task.span.length) - row;
  for (int i = 0; i < task.chunks; ++i, record += p.HV * kRecordBytes, left -= kChunk) {
    const int stage = i % kStages;
    const uint32_t at = smem + stage * kStage, full = smem + kBarriers + stage * 8;
    if (i >= kStages) barrier_wait(full + kStages * 8, (i / kStages - 1) & 1);
    if (thread == 0) {
      barrier_arrive_expect(full, 2 * kTileBytes + kHead * 4);
      bulk_load(at, record + kKIn, kTileBytes, full);
      bulk_load(at + kSolvedAt, record + kKSolved, kTileBytes, full);
      bulk_load(at + kDecayAt, record + kRecordDecay, kHead * 4, full);
    }
    const uint32_t to = at + kValuesAt + row * kValuesPitch + unit * 16;
    if (!task.matrix)
#pragma unroll
      for (int t = 0; t < kChunk; t += kStep, from += kStep * token_bytes)
        copy_async(to + t * kValuesPitch, t < left ? from : values, t < left ? 16 : 0);
    copy_async_arrive(full);
  }
}

// M of a group's 64 columns, as two numbers, over the stages that nobody reads any more.
__device__ __forceinline__ void matrix_out(const float (&S)[64], uint8_t* to, uint32_t smem, int group, int quarter, int lane) {
  named_barrier(3, kGroups * 128);
  const uint32_t at = smem + group * 32768;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    uint32_t big[4], small[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = S[8 * n + 2 * j], y = S[8 * n + 2 * j + 1];
      big[j] = pack_bf16(x, y), small[j] = pack_bf16(x - low(big[j]), y - high(big[j]));
    }
    const int row = 16 * n + (lane & 7) + ((lane >> 4) << 3), unit = quarter * 2 + ((lane >> 3) & 1);
    store_matrices_transposed(at + row * 128 + ((unit ^ (row & 7)) << 4), big);
    store_matrices_transposed(at + 16384 + row * 128 + ((unit ^ (row & 7)) << 4), small);
  }
  fence_async();
  named_barrier(group + 1, 128);
  if (quarter == 0 && lane == 0) {
    bulk_store(to + group * 16384, at, 16384);
    bulk_store(to + 32768 + group * 16384, at + 16384, 16384);
    bulk_store_wait();
  }
}

__device__ void walk(const HopperForward& p, const Task& task, bool from_zero, const uint8_t* shared, uint32_t smem) {
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
  const int value = warp * 16;
  float S[64], r[32];
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int v = value + lane / 4 + 8 * (i / 2 % 2), k = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    if (task.matrix)
      S[i] = v == k ? 1.0f : 0.0f;
    else
      S[i] = from_zero || !p.initial_state
                 ? 0.0f
                 : p.initial_state[task.row * kHead * kHead + (p.state_v_first ? v * kHead + k : k * kHead + v)];
  }
  int stage = 0;
  uint32_t phase = 0;
  barrier_wait(smem + kBarriers, 0);
  for (int i = 0; i < task.chunks; ++i) {
    const uint32_t at = smem + stage * kStage, base = descriptor_base(at), empty = smem + kBarriers + (kStages + stage) * 8;
    uint32_t left[8][4];
#pragma unroll
    for (int s = 0; s < 8; ++s)
#pragma unroll
      for (int j = 0; j < 4; ++j) left[s][j] = pack_bf16(S[8 * s + 2 * j], S[8 * s + 2 * j + 1]);
    touch(r);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < 8; ++s) wgmma<0>(r, left[s], descriptor(base, s / 4 * 8192 + s % 4 * 32), s > 0);
    wgmma_commit();
    const auto* decay = reinterpret_cast<const float*>(shared + stage * kStage + kDecayAt) + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float2 d = *reinterpret_cast<const float2*>(decay + 8 * n);
      S[4 * n] *= d.x, S[4 * n + 1] *= d.y, S[4 * n + 2] *= d.x, S[4 * n + 3] *= d.y;
    }
    uint32_t v[4][4] = {};
    if (!task.matrix)
#pragma unroll
      for (int n = 0; n < 4; ++n)
        load_matrices_transposed(
            v[n], at + kValuesAt + (16 * n + (lane & 7) + ((lane >> 4) << 3)) * kValuesPitch + value * 2 + ((lane >> 3) & 1) * 16);
    wgmma_wait<0>();
    touch(r);
    uint32_t error[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) error[n][j] = pack_bf16(low(v[n][j]) - r[8 * n + 2 * j], high(v[n][j]) - r[8 * n + 2 * j + 1]);
    touch(S);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma<1>(S, error[s], descriptor(base, kSolvedAt + s * 2048, 8192), 1);
    wgmma_commit();
    if (++stage == kStages) stage = 0, phase ^= 1;
    if (i + 1 < task.chunks) barrier_wait(smem + kBarriers + stage * 8, phase);
    wgmma_wait<0>();
    touch(S);
    barrier_arrive(empty);
  }
  const Links links = links_of(p);
  if (task.matrix) {
    matrix_out(S, links.M(task.row, task.part), smem, group, warp % 4, lane);
  } else {
    float* b = links.b(task.row, task.part, group) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 64; ++i) b[i * 128] = S[i];
  }
}

}  // namespace

__global__ void __launch_bounds__(kThreads, 1) parts_kernel(const __grid_constant__ HopperForward p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      barrier_init(smem + kBarriers + i * 8, kFetchers + 1), barrier_init(smem + kBarriers + (kStages + i) * 8, kGroups * 128);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  // Of a sequence and head: b of part 0, then b and M of each part up to the last but one.
  const int per_row = 2 * p.parts - 3, which = blockIdx.x % per_row, part = (which + 1) / 2;
  const int64_t row = blockIdx.x / per_row, n = row / p.HV, head = row - n * p.HV;
  const Span span = sequence_span(p, n);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  const Part own = part_of(chunks, p.parts, part);
  if (own.last || own.count == 0) return;  // nobody comes after it
  const bool matrix = which > 0 && which % 2 == 0;
  const uint8_t* records = static_cast<const uint8_t*>(p.workspace) + (first_slot(p, n) * p.HV + head) * kRecordBytes;
  const int64_t step = p.HV * kRecordBytes;
  const int last = own.first + own.count - 1;
  auto* scratch = reinterpret_cast<float*>(shared + kScratch);
  const int few = deciding<kGroups * 128>(records + last * step, step, own.count, scratch);
  if (!matrix && threadIdx.x == 0) links_of(p).deciding(row, part) = few;
  if (matrix && few > 0) return;
  if (few > 0) {  // the next part's block walks along these chunks itself; does one after it need the state here?
    const Part next = part_of(chunks, p.parts, part + 1);
    if (next.last || deciding<kGroups * 128>(records + (next.first + next.count - 1) * step, step, next.count, scratch) > 0) return;
  }
  const int first = few > 0 ? last + 1 - few : own.first;
  const Task task{{span.batch, span.first + static_cast<int64_t>(first) * kChunk, span.length - static_cast<int64_t>(first) * kChunk},
                  records + first * step, row, head, part, last + 1 - first, matrix};
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    fetch(p, task, smem, threadIdx.x - kGroups * 128);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    walk(p, task, few > 0 || part > 0, shared, smem);
  }
}

cudaError_t launch_parts(const HopperForward& p, cudaStream_t stream) {
  const cudaError_t status = cudaFuncSetAttribute(parts_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  parts_kernel<<<static_cast<unsigned>(p.N * p.HV * (2 * p.parts - 3)), kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace kda::hopper
