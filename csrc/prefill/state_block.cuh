// A block of `state`: where it is in the call, what its shared memory holds, and how records reach its lanes.
#pragma once

#include "chunks.cuh"
#include "tiles.cuh"

namespace kda {

template <int K_, int V_, int C_, int BV_, int DEPTH_>
struct State {
  static constexpr int K = K_, V = V_, C = C_, BV = BV_, DEPTH = DEPTH_;
  static_assert(V % BV == 0 && BV % 8 == 0, "BV divides V");
  using R = Record<K, V, C>;
  static constexpr int ROWS = R::ROWS, STEPS = R::STEPS, N = BV / 8;
  static constexpr int HALF = ROWS * 32, THREADS = 2 * HALF;
  static constexpr int OWN = STEPS / ROWS;  // tiles of the state per warp
  static_assert(STEPS % ROWS == 0, "every warp has as many tiles of the state");
  // What a lane has of a record, in pieces of 16 bytes.
  static constexpr int STATE_PIECES = 2 * STEPS + 2 * OWN * ROWS + N;  // of w, k_decayed and u
  static constexpr int OUTPUT_PIECES = 2 * STEPS + 2 * ROWS;           // of q_decayed and A_qk
  static constexpr int PIECES = ROWS * (STATE_PIECES + OUTPUT_PIECES);
  static constexpr int SMALLS = DEPTH + 2;
  static constexpr int LD = BV == 8 ? 4 : BV / 2 + 4;  // words of two numbers; the eight rows of a block fall into 32 banks

  struct Shared {
    uint4 ring[DEPTH][PIECES][32];
    uint32_t state[2][K * LD];  // hi, lo
    uint32_t v_new[2][C * LD];
    typename R::Small small[SMALLS];
    float state_power[STEPS];  // 1 / m of 16 rows
    float v_new_power[ROWS];

    __device__ __forceinline__ Rows<LD> state_rows() { return {state[0], state[1]}; }
    __device__ __forceinline__ Rows<LD> v_new_rows() { return {v_new[0], v_new[1]}; }
  };
};

// Which sequence, head and value channels.
template <typename S>
struct Place {
  using R = typename S::R;
  int64_t index, sequence, head, batch, first, length, chunks;  // index: [sequences, value heads]
  int v0;
  const R *record;

  __device__ explicit Place(const Params &p) {
    index = blockIdx.x / (S::V / S::BV), v0 = int(blockIdx.x % (S::V / S::BV)) * S::BV;
    sequence = index / p.value_heads, head = index % p.value_heads;
    const bool packed = p.sequences.cu_seqlens != nullptr;
    batch = packed ? 0 : sequence;
    first = packed ? p.sequences.edge(sequence) : 0;
    length = (packed ? p.sequences.edge(sequence + 1) : p.sequences.tokens) - first;
    chunks = (length + S::C - 1) / S::C;
    const int64_t cell0 = (batch * p.value_heads + head) * p.sequences.slots + (packed ? p.sequences.first_slot(sequence, S::C) : 0);
    record = static_cast<const R *>(p.mid.records) + cell0;
  }

  __device__ int64_t state_at(const Params &p, int k, int v) const {
    return index * S::K * S::V + (p.state_v_first ? int64_t(v0 + v) * S::K + k : int64_t(k) * S::V + v0 + v);
  }
  // Where a chunk's record is, in pieces; beyond the last, the last.
  __device__ int64_t piece_of(int64_t chunk) const { return (chunk < chunks ? chunk : chunks - 1) * int64_t(sizeof(R) / 16); }
};

// A lane's places in the ring: no other lane writes or reads them. Pieces lie 32 places apart here and in the record.
template <typename S>
struct Ring {
  uint4 *mine;

  template <int COUNT>
  __device__ __forceinline__ void fetch(int slot, int place, const uint4 *from) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) copy_async(mine + (slot * S::PIECES + place + i) * 32, from + i * 32);
  }
  __device__ __forceinline__ uint4 read(int slot, int place) const { return mine[(slot * S::PIECES + place) * 32]; }
  __device__ __forceinline__ TileA read_tile(int slot, int place) const { return {read(slot, place), read(slot, place + 1)}; }

  __device__ __forceinline__ static int after(int slot) { return slot + 1 < S::DEPTH ? slot + 1 : 0; }
};

// What a lane keeps in registers. The two kinds of warps keep different things in the same places.
template <typename S>
struct Lane {
  static constexpr bool ROOM = S::N <= 2;  // for all tiles of the keys
  int row, lane, g, t;                     // row: of tiles
  Ring<S> ring;
  const uint4 *rows_from, *tiles_from, *more_from;  // in the first record
  TileA rows[S::STEPS];                             // of w, or of q_decayed
  TileA tiles[(ROOM ? S::OWN : 1) * S::ROWS];       // of k_decayed, or of A_qk
  float kept[S::OWN][S::N][4];                      // the state, or what there is of o in kept[0]
  float4 u[S::N];
};

// The ring of small parts, which all warps read.
template <typename S>
__device__ __forceinline__ int small_slot_after(int slot, int steps = 1) {
  return slot + steps < S::SMALLS ? slot + steps : slot + steps - S::SMALLS;
}

}  // namespace kda
