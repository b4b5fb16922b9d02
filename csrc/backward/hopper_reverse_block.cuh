// A block of the reverse kernel: its shared memory, which chunks it walks along, and the threads that fetch them, the last one first.
#pragma once
#include "../prefill/hopper_kept.cuh"
#include "../prefill/hopper_sequences.cuh"
#include "../prefill/hopper_squares.cuh"
#include "hopper_reverse.h"
#include "hopper_tensor.cuh"

namespace kda::hopper {

struct ReverseMatrices {  // of 16-bit elements, and the rows of a piece
  Matrix tiles;           // [slots HV 3 64, D]: 192
  Matrix solved;          // [slots HV 64, 64]: 64
  Matrix d_states;        // [slots HV D, D]: 16
  Matrix d_states_lost;   // the same, of 64 channels
  Matrix q_lost;          // [slots HV 64, 64]: 64
};

// What a chunk is read from: tiles, k_solved of them in bfloat16 or float16; those and what rounding took from q_decayed; or the forward's
// record, in which k_solved and A_solved have been multiplied by beta, or have not.
enum class From : int { tiles, half_tiles, exact_tiles, record, plain_record };

// A stage: the three tiles in halves of 64 channels, or whole with 64, what rounding took from q_decayed, A_solved, d_o by rows, and small
// arrays; or a record, in its order, d_o and betas.
constexpr int kBackSlice = 64;                // value channels of a warp group
constexpr int kHalfTiles = 3 * kChunk * 128;  // bytes of a half of the three tiles
constexpr int kStatesOut = 2 * 16 * 128;  // of a warp: dS' of 16 value channels, two halves of keys, or what rounding took from 64 keys

// BLOCKS of them share a multiprocessor.
template <int HEAD, int GROUPS, int BLOCKS, From FROM>
struct BackLayout {
  using R = Record<HEAD>;
  static constexpr bool exact = FROM == From::exact_tiles, scaled = FROM == From::record, record = scaled || FROM == From::plain_record;
  static_assert(HEAD == 128 ? BLOCKS == 1 && !exact : GROUPS == 1 && !record, "");
  static constexpr int k_in = 0, q = record ? R::q_decayed : kChunk * 128, k_solved = record ? R::k_solved : 2 * kChunk * 128;
  static constexpr int half = record ? kChunk * 128 : kHalfTiles;  // bytes from a half of a tile to the other
  static constexpr int q_lost = HEAD / 64 * kHalfTiles, solved = q_lost + (exact ? kChunk * 128 : 0);
  static constexpr int d_o = solved + kChunk * 128 + (record ? HEAD * 4 : 0);
  // Bytes that the copy engine brings: without d_o.
  static constexpr int brought = record ? R::record_bytes + (scaled ? 0 : kChunk * 4) : d_o + HEAD * 4 + kChunk * 4;
  static constexpr int pitch = GROUPS * kBackSlice * 2 + 16;  // bytes per token of d_o, in whose place d_v will be
  static constexpr int decay = record ? R::decay : d_o + kChunk * pitch, beta = d_o + kChunk * pitch + (record ? 0 : HEAD * 4);
  static constexpr int stage = (beta + kChunk * 4 + 1023) / 1024 * 1024;
  static constexpr int stages = HEAD == 64 ? 4 / BLOCKS : GROUPS == 2 ? 2 : 3;
  static constexpr int fetchers = GROUPS == 2 ? 128 : 32;
  static constexpr int states = stages * stage;
  static constexpr int barriers = states + GROUPS * 4 * kStatesOut;
  static constexpr int bytes = barriers + 2 * stages * 8;
  static constexpr int threads = GROUPS * 128 + fetchers;  // whole warp groups where they trade registers
};
static_assert(BackLayout<128, 1, 1, From::tiles>::bytes <= 232448 && BackLayout<128, 2, 1, From::tiles>::bytes <= 232448, "");
static_assert(BackLayout<64, 1, 1, From::exact_tiles>::bytes <= 232448, "");
static_assert(2 * (BackLayout<64, 1, 2, From::tiles>::bytes + 1024) <= 233472, "");
static_assert(BackLayout<128, 1, 1, From::record>::solved == Record<128>::a_solved, "a stage is a record with its zeros, then d_o");

struct BackTask {
  Span span;
  int64_t last;   // slot HV + head of the last chunk
  int64_t state;  // n HV + head
  int64_t head;
  int chunks, channel;  // first value channel of the block
};

template <int HEAD, int GROUPS>
__device__ __forceinline__ BackTask back_task(const HopperReverse& p) {
  constexpr int kBlocks = HEAD / (GROUPS * kBackSlice);
  const int64_t i = blockIdx.x / kBlocks, n = i / p.in.HV, head = i - n * p.in.HV;
  const Span span = sequence_span(p.in, n);
  const int chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  return {span, (first_slot(p.in, n) + chunks - 1) * p.in.HV + head, i, head, chunks,
          static_cast<int>(blockIdx.x % kBlocks) * GROUPS * kBackSlice};
}

// The fetching threads: the first asks for what the copy engine brings, all for d_o, with zeros past the sequence's end.
template <int HEAD, int GROUPS, int BLOCKS, From FROM>
__device__ void fetch_back(const HopperReverse& p, const ReverseMatrices& matrices, const BackTask& task, uint32_t smem, int thread) {
  using L = BackLayout<HEAD, GROUPS, BLOCKS, FROM>;
  using R = Record<HEAD>;
  constexpr int kRowUnits = GROUPS * kBackSlice / 8, kStep = L::fetchers / kRowUnits;  // units of 16 bytes; tokens per round
  const int unit = thread % kRowUnits, row = thread / kRowUnits;
  const int64_t token_bytes = p.in.HV * HEAD * 2;
  const auto* rows = static_cast<const uint8_t*>(p.d_o) + (task.span.batch * p.in.T + task.span.first) * token_bytes +
                     2 * (task.head * HEAD + task.channel + unit * 8);
  int64_t item = task.last;
  for (int i = 0; i < task.chunks; ++i, item -= p.in.HV) {
    const int stage = i % L::stages, chunk = task.chunks - 1 - i;
    const uint32_t at = smem + stage * L::stage, full = smem + L::barriers + stage * 8, empty = full + L::stages * 8;
    if (i >= L::stages) barrier_wait(empty, (i / L::stages - 1) & 1);
    if (L::record && thread == 0) {
      const uint8_t* record = p.record + item * R::record_bytes;
      barrier_arrive_expect(full, L::brought);
      bulk_load(at, record, R::square_by_columns(0, 1), full);
#pragma unroll
      for (int c = 1; c < 4; ++c) {  // past the zeros of A_solved^T; the decay follows its last block
        const int bytes = (c + 1) * R::square + (c == 3 ? HEAD * 4 : 0);
        bulk_load(at + L::solved + c * 4 * R::square, record + R::square_by_columns(0, c), bytes, full);
      }
      if (!L::scaled) bulk_load(at + L::beta, p.factors + item * 3 * kChunk, kChunk * 4, full);
    } else if (!L::record && thread == 0) {
      const int y = static_cast<int>(item);
      barrier_arrive_expect(full, L::brought);
      load_piece(at, matrices.tiles, 0, y * 3 * kChunk, full);
      if (HEAD == 128) load_piece(at + kHalfTiles, matrices.tiles, 64, y * 3 * kChunk, full);
      if (L::exact) load_piece(at + L::q_lost, matrices.q_lost, 0, y * kChunk, full);
      load_piece(at + L::solved, matrices.solved, 0, y * kChunk, full);
      bulk_load(at + L::decay, p.decay + item * HEAD, HEAD * 4, full);
      bulk_load(at + L::beta, p.factors + item * 3 * kChunk, kChunk * 4, full);
    }
    const uint8_t* from = rows + (static_cast<int64_t>(chunk) * kChunk + row) * token_bytes;
    const int left = static_cast<int>(min(task.span.length - static_cast<int64_t>(chunk) * kChunk, static_cast<int64_t>(kChunk))) - row;
    const uint32_t to = at + L::d_o + unit * 16;
#pragma unroll
    for (int t = 0; t < kChunk; t += kStep, from += kStep * token_bytes)
      copy_async(to + row_of(row + t, p.group_bits) * L::pitch, t < left ? from : rows, t < left ? 16 : 0);
    copy_async_arrive(full);
  }
}

}  // namespace kda::hopper
