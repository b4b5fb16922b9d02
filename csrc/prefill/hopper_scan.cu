// Stages state and output: the serial pass over a sequence's chunks. Per chunk, with S the state before it:
//
//   r = v - k_in S        o = q_decayed S + A_solved r        S <- Diag(decay) S + k_solved^T r
//
// One block per sequence, value head and block of value channels: a warp group per 64 value channels holds S^T [64, 128] in float32
// accumulators, and every product has S^T or r^T as its left factor, taken from registers. One more warp fetches records and values.
// Where a sequence is scanned in parts, a block of a later part first finds the state before it: S <- M S + b over the parts between. Two
// parts need no such states: where the chunks before the second forget all that was before them, its block begins with those chunks; where
// they do not, the first part's block goes on to the end.
#include "hopper_forgetting.cuh"
#include "hopper_kept.cuh"
#include "hopper_links.cuh"
#include "hopper_wgmma.cuh"

namespace kda::hopper {
namespace {

constexpr int kSlice = 64;                       // value channels of a warp group
constexpr int kOutPitch = kSlice * 2 + 16;       // bytes per token of a warp group's output
constexpr int kOutBytes = kChunk * kOutPitch;    // twice per warp group
constexpr int kRecordSpace = (kStageBytes + 1023) / 1024 * 1024;

template <int GROUPS>
struct Layout {
  static constexpr int values_pitch = GROUPS * kSlice * 2 + 16;
  static constexpr int stage = kRecordSpace + (kChunk * values_pitch + 1023) / 1024 * 1024;
  static constexpr int stages = GROUPS == 2 ? 2 : 3;
  static constexpr int fetchers = GROUPS == 2 ? 128 : 32;
  static constexpr int out = stages * stage;
  static constexpr int barriers = out + GROUPS * 2 * kOutBytes;
  static constexpr int scratch = barriers + 2 * stages * 8;
  static constexpr int bytes = scratch + (GROUPS == 1 ? 8 * 4 : 0);
};

template <int GROUPS>
constexpr int kThreads = GROUPS * 128 + Layout<GROUPS>::fetchers;  // whole warp groups where they trade registers

struct Task {
  Span span;
  int64_t record, head, state;  // first record, value head, index of the state matrix
  int chunks, channel;          // first value channel of the block
  int part, links;              // states of earlier parts that it goes through
  int silent;                   // chunks before the part whose outputs are another block's
  bool last;                    // the state after it is the final one
};

// Of two parts: how many chunks before the second decide about the state there; 0: all, and there is one part.
__device__ __forceinline__ int parted(const HopperForward& p, const uint8_t* records, int chunks, float* scratch) {
  const int64_t step = p.HV * kRecordBytes;
  const int length = part_of(chunks, 2, 0).count;
  return length < chunks ? deciding<128>(records + (length - 1) * step, step, length, scratch) : 0;
}

template <int GROUPS>
__device__ __forceinline__ Task task_of(const HopperForward& p, float* scratch) {
  constexpr int kBlocks = kHead / (GROUPS * kSlice);
  const int parts = GROUPS == 1 ? p.parts : 1, part = blockIdx.x / kBlocks % parts;
  const int64_t i = blockIdx.x / kBlocks / parts, n = i / p.HV, head = i - n * p.HV;
  const Span span = sequence_span(p, n);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  const int64_t record = first_slot(p, n) * p.HV + head;
  Part own = part_of(chunks, parts, part);
  int links = 0, silent = 0;
  if (parts == 2) {
    silent = parted(p, static_cast<const uint8_t*>(p.workspace) + record * kRecordBytes, chunks, scratch);
    if (silent == 0) own = {0, part == 0 ? chunks : 0, part == 0};
    if (part == 0) silent = 0;
    own.first -= silent, own.count += silent;
  } else if (part > 0 && own.count > 0) {  // back to the last part that forgets what was before it, or to the first
    while (links < part - 1 && !links_of(p).forgets(i, part - 1 - links)) ++links;
  }
  const int64_t skipped = static_cast<int64_t>(own.first) * kChunk;
  return {{span.batch, span.first + skipped, span.length - skipped},
          record + own.first * p.HV,
          head,
          i,
          own.count,
          static_cast<int>(blockIdx.x % kBlocks) * GROUPS * kSlice,
          part,
          links,
          silent,
          own.last};
}

// The fetching threads: the first asks for records, all for values, with zeros past the sequence's end.
template <int GROUPS>
__device__ void fetch(const HopperForward& p, const Task& task, uint32_t smem, int thread) {
  using L = Layout<GROUPS>;
  constexpr int kRowUnits = GROUPS * kSlice / 8, kStep = L::fetchers / kRowUnits;  // units of 16 bytes; rows per round
  const int unit = thread % kRowUnits, row = thread / kRowUnits;
  const int64_t token_bytes = p.v_strides.token * 2;
  const auto* values = static_cast<const uint8_t*>(p.v) +
                       2 * (task.span.batch * p.v_strides.batch + task.head * p.v_strides.head + task.span.first * p.v_strides.token +
                            task.channel + unit * 8);
  const uint8_t* record = static_cast<const uint8_t*>(p.workspace) + task.record * kRecordBytes;
  const uint8_t* from = values + row * token_bytes;
  int left = static_cast<int>(min(task.span.length, static_cast<int64_t>(1) << 30)) - row;  // rows from this thread's first on
  for (int i = 0; i < task.links; ++i) {
    const int stage = i % L::stages;
    const uint32_t at = smem + stage * L::stage, full = smem + L::barriers + stage * 8;
    if (i >= L::stages) barrier_wait(full + L::stages * 8, (i / L::stages - 1) & 1);
    if (thread == 0) {
      barrier_arrive_expect(full, kLinkBytes);
      const uint8_t* matrix = links_of(p).M(task.state, task.part - task.links + i);
#pragma unroll
      for (int b = 0; b < kLinkBytes; b += 16384) bulk_load(at + b, matrix + b, 16384, full);
    }
    copy_async_arrive(full);
  }
  for (int i = task.links; i < task.links + task.chunks; ++i, record += p.HV * kRecordBytes, left -= kChunk) {
    const int stage = i % L::stages;
    const uint32_t at = smem + stage * L::stage, full = smem + L::barriers + stage * 8, empty = full + L::stages * 8;
    if (i >= L::stages) barrier_wait(empty, (i / L::stages - 1) & 1);
    if (thread == 0) {
      if (i == 0) wait_for_previous_kernel();
      barrier_arrive_expect(full, kRecordBytes);
      bulk_load(at, record, first_square(1), full);
#pragma unroll
      for (int b = 1; b < 4; ++b)  // past the zeros of A_solved^T; the decay follows its last block
        bulk_load(at + kASolved + b * 5 * kSquare, record + first_square(b), (4 - b) * kSquare + (b == 3 ? kHead * 4 : 0), full);
    }
    const uint32_t to = at + kRecordSpace + row * L::values_pitch + unit * 16;
#pragma unroll
    for (int t = 0; t < kChunk; t += kStep, from += kStep * token_bytes)
      copy_async(to + t * L::values_pitch, t < left ? from : values, t < left ? 16 : 0);
    copy_async_arrive(full);
  }
}

// Element (r, n) of S^T in C layout: value channel and key channel.
__device__ __forceinline__ int64_t state_offset(const HopperForward& p, const Task& task, int value, int key) {
  return task.state * kHead * kHead + (p.state_v_first ? value * kHead + key : key * kHead + value);
}

// No record fills A_solved^T left of its diagonal: of row block b the squares of the column blocks before b.
template <int THREADS>
__device__ __forceinline__ void clear_squares(uint32_t stage, int thread) {
  constexpr int kUnits = kSquare / 16;
  for (int i = thread; i < 6 * kUnits; i += THREADS) {
    const int square = i / kUnits, b = square < 1 ? 1 : square < 3 ? 2 : 3, c = square - b * (b - 1) / 2;
    store_shared(stage + kASolved + (4 * b + c) * kSquare + i % kUnits * 16, make_uint4(0, 0, 0, 0));
  }
}

// S^T of the part: the state after an earlier one, then S <- M S + b. Both factors are two bfloat16 numbers each, and their three largest
// products are added: an error of 2^-16.
template <int GROUPS>
__device__ __forceinline__ void follow_links(const HopperForward& p, const Task& task, float (&S)[64], uint32_t smem) {
  using L = Layout<GROUPS>;
  static_assert(GROUPS == 1 && L::stage >= kLinkBytes, "a stage holds M");
  const int thread = threadIdx.x % 128, slice = task.channel / kSlice;
  const auto load = [&](int part) {
    const float* b = links_of(p).b(task.state, part, slice) + thread;
#pragma unroll
    for (int i = 0; i < 64; ++i) S[i] = b[i * 128];
  };
  load(task.part - 1 - task.links);
  for (int i = 0; i < task.links; ++i) {
    const int stage = i % L::stages;
    const uint32_t at = smem + stage * L::stage, full = smem + L::barriers + stage * 8;
    uint32_t big[8][4], small[8][4];
#pragma unroll
    for (int s = 0; s < 8; ++s)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = S[8 * s + 2 * j], y = S[8 * s + 2 * j + 1];
        big[s][j] = pack_bf16(x, y), small[s][j] = pack_bf16(x - low(big[s][j]), y - high(big[s][j]));
      }
    load(task.part - task.links + i);
    barrier_wait(full, (i / L::stages) & 1);
    touch(S);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const uint32_t tile = at + (s / 4) * 16384 + (s % 4) * 32;
      wgmma<0>(S, big[s], descriptor(tile), 1);
      wgmma<0>(S, big[s], descriptor(tile + 32768), 1);
      wgmma<0>(S, small[s], descriptor(tile), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    touch(S);
    named_barrier(1, 128);  // M is read: the stage is one of records again
    clear_squares<128>(at, thread);
    fence_async();
    barrier_arrive(full + L::stages * 8);
  }
}

// A warp group's output of one chunk: transposed into `out`, then rows of 128 bytes to memory. `out` alternates between two buffers, so
// that one barrier separates this chunk's writes from its reads and from the writes two chunks on.
__device__ __forceinline__ void write_output(const HopperForward& p, const Task& task, int chunk, const uint32_t (&o)[16], uint32_t out,
                                             int warp, int lane) {
  const int quarter = warp % 4;  // of the group: 16 value channels, then 16 tokens
#pragma unroll
  for (int n = 0; n < 4; ++n) {  // 16 tokens each: matrices (values 0-7, 8-15) x (tokens 0-7, 8-15)
    const uint32_t r[4] = {o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]};
    store_matrices_transposed(out + (16 * n + (lane & 7) + ((lane >> 4) << 3)) * kOutPitch + quarter * 32 + ((lane >> 3) & 1) * 16, r);
  }
  asm volatile("bar.sync %0, 128;" ::"r"(warp / 4 + 1) : "memory");
  const int first = quarter * 16 + lane / 8, left = static_cast<int>(task.span.length - static_cast<int64_t>(chunk) * kChunk);
  auto* to = static_cast<__nv_bfloat16*>(p.o) + task.span.batch * p.o_strides.batch + task.head * p.o_strides.head +
             (task.span.first + static_cast<int64_t>(chunk) * kChunk + first) * p.o_strides.token + task.channel + warp / 4 * kSlice +
                 lane % 8 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i, to += 4 * p.o_strides.token)
    if (first + 4 * i < left) *reinterpret_cast<uint4*>(to) = load_shared(out + (first + 4 * i) * kOutPitch + lane % 8 * 16);
}

template <int GROUPS, bool KEPT>
__device__ void scan(const HopperForward& p, [[maybe_unused]] const Kept& kept, const Task& task, const uint8_t* shared, uint32_t smem) {
  using L = Layout<GROUPS>;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // warp / 4 is the group
  const int value = warp * 16;                                 // within the block
  float S[64], r[32], o[32];
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int v = task.channel + value + lane / 4 + 8 * (i / 2 % 2), k = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    S[i] = p.initial_state && task.part == 0 ? p.initial_state[state_offset(p, task, v, k)] : 0.0f;
  }
  if constexpr (GROUPS == 1)
    if (task.part > 0 && task.silent == 0 && task.chunks > 0) follow_links<GROUPS>(p, task, S, smem);
  uint32_t pending[16];  // the previous chunk's output
  const uint32_t out = smem + L::out + warp / 4 * 2 * kOutBytes;
  for (int i = 0; i < task.chunks; ++i) {
    const int item = task.links + i, stage = item % L::stages;
    const uint32_t at = smem + stage * L::stage, full = smem + L::barriers + stage * 8;
    uint32_t left[8][4];
#pragma unroll
    for (int s = 0; s < 8; ++s)
#pragma unroll
      for (int j = 0; j < 4; ++j) left[s][j] = pack_bf16(S[8 * s + 2 * j], S[8 * s + 2 * j + 1]);
    if constexpr (KEPT) {
      const uint32_t slot = static_cast<uint32_t>((task.record - task.head) / p.HV) + i;
      if (i >= task.silent && slot % kept.every == 0) keep_state(kept, slot, p.HV, task.head, task.channel + value, left, lane);
    }
    barrier_wait(full, (item / L::stages) & 1);
    const auto* decay = reinterpret_cast<const float*>(shared + stage * L::stage + kDecay) + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float2 d = *reinterpret_cast<const float2*>(decay + 8 * n);
      S[4 * n] *= d.x, S[4 * n + 1] *= d.y, S[4 * n + 2] *= d.x, S[4 * n + 3] *= d.y;
    }
    touch(r), touch(o), touch(S);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < 8; ++s) wgmma<0>(r, left[s], descriptor(at + kKIn + (s / 4) * 8192 + (s % 4) * 32), s > 0);
    wgmma_commit();
#pragma unroll
    for (int s = 0; s < 8; ++s) wgmma<0>(o, left[s], descriptor(at + kQDecayed + (s / 4) * 8192 + (s % 4) * 32), s > 0);
    wgmma_commit();
    const auto write_pending = [&] {
      if (i > task.silent) write_output(p, task, i - 1, pending, out + i % 2 * kOutBytes, warp, lane);
    };
    if (GROUPS == 2) write_pending();
    uint32_t v[4][4];  // [16 tokens each]: (values, tokens) as in `write_output`
#pragma unroll
    for (int n = 0; n < 4; ++n)
      load_matrices_transposed(v[n], at + kRecordSpace + (16 * n + (lane & 7) + ((lane >> 4) << 3)) * L::values_pitch + value * 2 +
                                         ((lane >> 3) & 1) * 16);
    if (GROUPS == 1) write_pending();  // measured: values first pays where a block has no second group to fill the gaps
    wgmma_wait<1>();
    touch(r);
    uint32_t error[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        error[n][j] = pack_bf16(low(v[n][j]) - r[8 * n + 2 * j], high(v[n][j]) - r[8 * n + 2 * j + 1]);
    touch(S);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma<1>(S, error[s], descriptor(at + kKSolved + s * 2048, 8192), 1);
    wgmma_commit();
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma<1>(o, error[s], descriptor_of_squares(at + kASolved + s * 4 * kSquare), 1);
    wgmma_commit();
    wgmma_wait<0>();
    touch(S), touch(o);
    barrier_arrive(full + L::stages * 8);  // every thread for what it read itself
#pragma unroll
    for (int j = 0; j < 16; ++j) pending[j] = pack_bf16(o[2 * j], o[2 * j + 1]);
  }
  if (task.chunks > 0) write_output(p, task, task.chunks - 1, pending, out + task.chunks % 2 * kOutBytes, warp, lane);
  if (p.final_state && task.last) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int v = task.channel + value + lane / 4 + 8 * (i / 2 % 2), k = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      p.final_state[state_offset(p, task, v, k)] = S[i];
    }
  }
}

template <int GROUPS, bool KEPT>
__device__ __forceinline__ void scan_block(const HopperForward& p, const Kept& kept) {
  using L = Layout<GROUPS>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::stages; ++i)
      barrier_init(smem + L::barriers + i * 8, L::fetchers + 1), barrier_init(smem + L::barriers + (L::stages + i) * 8, GROUPS * 128);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int i = 0; i < L::stages; ++i) clear_squares<kThreads<GROUPS>>(smem + i * L::stage, threadIdx.x);
  fence_async();
  __syncthreads();
  const Task task = task_of<GROUPS>(p, reinterpret_cast<float*>(shared + L::scratch));
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == GROUPS) {
    if (GROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    fetch<GROUPS>(p, task, smem, threadIdx.x - GROUPS * 128);
  } else {
    if (GROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    scan<GROUPS, KEPT>(p, kept, task, shared, smem);
  }
}

}  // namespace

template <int GROUPS>
__global__ void __launch_bounds__(kThreads<GROUPS>, 1) scan_kernel(const __grid_constant__ HopperForward p) {
  scan_block<GROUPS, false>(p, Kept{});
}
template <int GROUPS>
__global__ void __launch_bounds__(kThreads<GROUPS>, 1) scan_kept_kernel(const __grid_constant__ HopperForward p,
                                                                        const __grid_constant__ Kept kept) {
  scan_block<GROUPS, true>(p, kept);
}

namespace {

template <int GROUPS, typename... Arguments>
cudaError_t launch(const HopperForward& p, void (*kernel)(Arguments...), cudaStream_t stream, const Arguments&... arguments) {
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<GROUPS>::bytes);
  if (status != cudaSuccess) return status;
  const auto blocks = static_cast<unsigned>(p.N * p.HV * (GROUPS == 1 ? p.parts : 1) * (kHead / (GROUPS * kSlice)));
  // Blocks may take their places while the last chunks are prepared; they wait before they read a record. Measured: it pays for wide ones.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization, early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(kThreads<GROUPS>), config.dynamicSmemBytes = Layout<GROUPS>::bytes;
  config.stream = stream, config.attrs = &early, config.numAttrs = GROUPS == 2 && p.T > 0 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// A block per head moves fewer bytes; two per head fill the chip where there are few.
cudaError_t find_width(const HopperForward& p, bool& wide) {
  int device = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  wide = p.parts == 1 && p.N * p.HV * 2 > processors;
  return status;
}

}  // namespace

cudaError_t launch_scan(const HopperForward& p, cudaStream_t stream) {
  bool wide = false;
  const cudaError_t status = find_width(p, wide);
  if (status != cudaSuccess) return status;
  return wide ? launch<2>(p, scan_kernel<2>, stream, p) : launch<1>(p, scan_kernel<1>, stream, p);
}

cudaError_t launch_scan_kept(const HopperForward& p, const Kept& kept, cudaStream_t stream) {
  bool wide = false;
  const cudaError_t status = find_width(p, wide);
  if (status != cudaSuccess) return status;
  return wide ? launch<2>(p, scan_kept_kernel<2>, stream, p, kept) : launch<1>(p, scan_kept_kernel<1>, stream, p, kept);
}

}  // namespace kda::hopper
