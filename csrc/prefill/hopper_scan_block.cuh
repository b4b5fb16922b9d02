// A block of the scan: its shared memory, which chunks it walks along, and the threads that fetch them.
#pragma once
#include "hopper_forgetting.cuh"
#include "hopper_links.cuh"
#include "hopper_squares.cuh"

namespace kda::hopper {

constexpr int kSlice = 64;                       // value channels of a warp group
constexpr int kOutPitch = kSlice * 2 + 16;       // bytes per token of a warp group's output
constexpr int kOutBytes = kChunk * kOutPitch;    // twice per warp group

// BLOCKS of them share a multiprocessor.
template <int HEAD, int GROUPS, int BLOCKS>
struct Layout {
  static_assert(HEAD == 128 ? BLOCKS == 1 : GROUPS == 1, "");
  static constexpr int values = (Record<HEAD>::stage_bytes + 1023) / 1024 * 1024, values_pitch = GROUPS * kSlice * 2 + 16;
  static constexpr int stage = values + (kChunk * values_pitch + 1023) / 1024 * 1024;
  static constexpr int stages = HEAD == 64 ? 4 / BLOCKS : GROUPS == 2 ? 2 : 3;
  static constexpr int fetchers = GROUPS == 2 ? 128 : 32;
  static constexpr int out = stages * stage;
  static constexpr int barriers = out + GROUPS * 2 * kOutBytes;
  static constexpr int scratch = barriers + 2 * stages * 8;
  static constexpr int bytes = scratch + (GROUPS == 1 ? 8 * 4 : 0);
  static constexpr int threads = GROUPS * 128 + fetchers;  // whole warp groups where they trade registers
};
static_assert(2 * (Layout<64, 1, 2>::bytes + 1024) <= 233472, "");
static_assert(Record<128>::stage_bytes + kChunk * 4 <= Layout<128, 1, 1>::values, "betas fit behind a record");

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

template <int HEAD, int GROUPS>
__device__ __forceinline__ Task task_of(const HopperForward& p, float* scratch) {
  constexpr int kBlocks = HEAD / (GROUPS * kSlice);
  const int parts = HEAD == 128 && GROUPS == 1 ? p.parts : 1, part = blockIdx.x / kBlocks % parts;
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
  } else if (part > 0 && own.count > 0) {
    silent = links_of(p).deciding(i, part - 1), own.first -= silent, own.count += silent;
    if (silent == 0)  // back to the last part that forgets what was before it, or to the first
      while (links < part - 1 && links_of(p).deciding(i, part - 1 - links) == 0) ++links;
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

// The fetching threads: the first asks for records, all for values, with zeros past the sequence's end. BY_COLUMNS: squares of records are,
// see hopper_record.h. betas: [records, 3, 64], of which the first go behind the record, or null.
template <int HEAD, int GROUPS, int BLOCKS, bool BY_COLUMNS, bool BETAS>
__device__ void fetch(const HopperForward& p, [[maybe_unused]] const float* betas, const Task& task, uint32_t smem, int thread) {
  using L = Layout<HEAD, GROUPS, BLOCKS>;
  using R = Record<HEAD>;
  constexpr int kRowUnits = GROUPS * kSlice / 8, kStep = L::fetchers / kRowUnits;  // units of 16 bytes; rows per round
  const int unit = thread % kRowUnits, row = thread / kRowUnits;
  const int64_t token_bytes = p.v_strides.token * 2;
  const auto* values = static_cast<const uint8_t*>(p.v) +
                       2 * (task.span.batch * p.v_strides.batch + task.head * p.v_strides.head + task.span.first * p.v_strides.token +
                            task.channel + unit * 8);
  const uint8_t* record = static_cast<const uint8_t*>(p.workspace) + task.record * R::record_bytes;
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
  for (int i = task.links; i < task.links + task.chunks; ++i, record += p.HV * R::record_bytes, left -= kChunk) {
    const int stage = i % L::stages;
    const uint32_t at = smem + stage * L::stage, full = smem + L::barriers + stage * 8, empty = full + L::stages * 8;
    if (i >= L::stages) barrier_wait(empty, (i / L::stages - 1) & 1);
    if (thread == 0) {
      if (i == 0) wait_for_previous_kernel();
      barrier_arrive_expect(full, R::record_bytes + (BETAS ? kChunk * 4 : 0));
      if (BETAS) bulk_load(at + R::stage_bytes, betas + (task.record + (i - task.links) * p.HV) * 3 * kChunk, kChunk * 4, full);
      bulk_load(at, record, BY_COLUMNS ? R::square_by_columns(0, 1) : R::first_square(1), full);
#pragma unroll
      for (int b = 1; b < 4; ++b) {  // past the zeros of A_solved^T; the decay follows its last block
        const int decay = b == 3 ? HEAD * 4 : 0;
        if (BY_COLUMNS)
          bulk_load(at + R::a_solved + b * 4 * R::square, record + R::square_by_columns(0, b), (b + 1) * R::square + decay, full);
        else
          bulk_load(at + R::a_solved + b * 5 * R::square, record + R::first_square(b), (4 - b) * R::square + decay, full);
      }
    }
    const uint32_t to = at + L::values + row * L::values_pitch + unit * 16;
#pragma unroll
    for (int t = 0; t < kChunk; t += kStep, from += kStep * token_bytes)
      copy_async(to + t * L::values_pitch, t < left ? from : values, t < left ? 16 : 0);
    copy_async_arrive(full);
  }
}

// Element (r, n) of S^T in C layout: value channel and key channel.
template <int HEAD>
__device__ __forceinline__ int64_t state_offset(const HopperForward& p, const Task& task, int value, int key) {
  return task.state * HEAD * HEAD + (p.state_v_first ? value * HEAD + key : key * HEAD + value);
}


}  // namespace kda::hopper
