// The instructions of hopper_ptx.cuh that the prepare kernel uses, on a CPU. Shared addresses are offsets into `memory`.
#pragma once

#include <algorithm>

#include "emulate.h"

#define KDA_TOUCH(x)
#define KDA_HIDE(x)
#define KDA_HIDE_WORD(x)
using cudaStream_t = void *;
using cudaError_t = int;
struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
inline float __expf(float x) { return std::exp(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return float(1.0 / std::sqrt(double(x))); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <typename T>
inline T __ldg(const T *p) {
  return *p;
}
using std::min;

namespace kda::hopper {

// What every lane of the warp holds, for all of them.
template <typename T>
struct Gathered {
  T of[32];
};
template <typename T>
inline Gathered<T> gather(const T &mine) {
  using namespace emulate;
  static unsigned char all[1024][64];
  static_assert(sizeof(T) <= 64, "");
  const int first = threadIdx.x / 32 * 32;
  memcpy(all[threadIdx.x], &mine, sizeof(T));
  wait(Fiber::WARP);
  Gathered<T> found;
  for (int lane = 0; lane < 32; ++lane) memcpy(&found.of[lane], all[first + lane], sizeof(T));
  wait(Fiber::WARP);
  return found;
}

inline uint32_t load_word_or_half(const void *from, int word) {
  uint32_t x = 0;
  memcpy(&x, from, word ? 4 : 2);
  return x;
}
inline int thread_index() { return int(threadIdx.x); }
inline uint32_t shared_address(const void *p) { return uint32_t(static_cast<const unsigned char *>(p) - memory); }
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? 0.0f : x; }
inline float max_or_nan(float x, float y) { return x != x || y != y ? NAN : x > y ? x : y; }
inline float exp2_fast(float x) { return flushed(std::exp2(x)); }
inline float log2_fast(float x) { return std::log2(x); }
inline float reciprocal_fast(float x) { return 1.0f / x; }

inline float low(uint32_t x) { return __uint_as_float(x << 16); }
inline float high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
inline uint32_t bf16_bits(float x) {  // to the nearest, ties to even
  const uint32_t bits = __float_as_uint(x);
  return std::isfinite(x) ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | (std::isnan(x) ? 64 : 0);
}
inline uint32_t pack_bf16(float a, float b) { return bf16_bits(a) | bf16_bits(b) << 16; }
inline uint32_t multiply_bf16(uint32_t a, uint32_t b) { return pack_bf16(low(a) * low(b), high(a) * high(b)); }
inline uint32_t pack_half(float a, float b) { return kda::pack_half(a, b); }
inline uint32_t multiply_half(uint32_t a, uint32_t b) {
  const float2 x = unpack_half(a), y = unpack_half(b);
  return pack_half(x.x * y.x, x.y * y.y);
}

template <typename Unpack>
inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Unpack unpack) {
  struct Operands {
    uint32_t x[6];
  };
  const auto all = gather(Operands{{a[0], a[1], a[2], a[3], b0, b1}});
  const int lane = threadIdx.x % 32;
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = 2 * (lane % 4) + e % 2;
    double sum = c[e];
    for (int k = 0; k < 16; k += 2) {
      const float2 x = unpack(all.of[row % 8 * 4 + k % 8 / 2].x[row / 8 + k / 8 * 2]);
      const float2 y = unpack(all.of[column * 4 + k % 8 / 2].x[4 + k / 8]);
      sum += double(x.x) * y.x + double(x.y) * y.y;
    }
    c[e] = emulate::truncated(sum);
  }
}
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma(c, a, b0, b1, [](uint32_t x) { return float2{low(x), high(x)}; });
}
inline void mma_half(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma(c, a, b0, b1, [](uint32_t x) { return unpack_half(x); });
}

inline void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) { mma_bf16(c, {a0, a1, 0, 0}, b, 0); }

inline uint32_t round_tf32(float x) {
  const uint32_t bits = __float_as_uint(x);
  return std::isfinite(x) ? (bits + 0x1000) & ~0x1fffu : bits;
}
inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {  // one number in a register, not two
  mma(c, a, b0, b1, [](uint32_t x) { return float2{__uint_as_float(x), 0}; });
}

inline uint32_t load_shared_word(uint32_t address) {
  uint32_t x;
  memcpy(&x, memory + address, 4);
  return x;
}
inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  emulate::check_aligned(memory + address, "ldmatrix");
  const auto rows = gather(address);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) r[i] = load_shared_word(rows.of[8 * i + lane / 4] + 4 * (lane % 4));
}
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  emulate::check_aligned(memory + address, "ldmatrix");
  const auto rows = gather(address);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) memcpy(pair + j, memory + rows.of[8 * i + 2 * (lane % 4) + j] + 2 * (lane / 4), 2);
    r[i] = pair[0] | uint32_t(pair[1]) << 16;
  }
}
inline void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  emulate::check_aligned(memory + address, "stmatrix");
  const auto rows = gather(address);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) memcpy(memory + rows.of[8 * i + lane / 4] + 4 * (lane % 4), &r[i], 4);
  __syncwarp();
}
inline uint32_t transposed(uint32_t x) {
  const auto all = gather(x);
  const int lane = threadIdx.x % 32, column = lane / 4, row = 2 * (lane % 4);
  const auto element = [&](int r) { return all.of[4 * r + column / 2] >> 16 * (column % 2) & 0xffff; };
  return element(row) | element(row + 1) << 16;
}

inline void store_shared(uint32_t address, uint32_t x) { memcpy(memory + address, &x, 4); }
inline void store_shared(uint32_t address, uint2 x) { memcpy(memory + address, &x, 8); }
inline void store_global(uint64_t to, uint2 x) { memcpy(reinterpret_cast<void *>(to), &x, 8); }
inline void store_shared(uint32_t address, uint4 x) { memcpy(memory + address, &x, 16); }
inline uint4 load_shared(uint32_t address) {
  uint4 x;
  memcpy(&x, memory + address, 16);
  return x;
}
inline uint2 load_shared_pair(uint32_t address) {
  uint2 x;
  memcpy(&x, memory + address, 8);
  return x;
}

inline void fence_async() {}
inline void let_next_kernel_start() {}
inline void named_barrier(int barrier, int threads) { emulate::wait_named(barrier, threads); }
inline void bulk_store(void *to, uint32_t from, uint32_t bytes) {
  emulate::check_aligned(to, "cp.async.bulk");
  memcpy(to, memory + from, bytes);
}
inline void bulk_store_wait() {}
inline void copy_async(uint32_t to, const void *from, uint32_t bytes) {
  alignas(16) static const unsigned char zeros[16] = {};
  kda::copy_async(memory + to, bytes ? from : zeros);
}
inline void copy_async_wait() {
  copies_commit();
  copies_wait<0>();
  emulate::wait(emulate::Fiber::WARP);
}

}  // namespace kda::hopper

inline uint32_t __shfl_xor_sync(unsigned, uint32_t x, int lanes) { return kda::hopper::gather(x).of[threadIdx.x % 32 ^ lanes]; }

template <typename T>
inline T __shfl_sync(unsigned, T x, int lane, int width = 32) {  // a lane of the same `width` lanes
  return kda::hopper::gather(x).of[threadIdx.x % 32 / width * width + lane];
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const auto all = kda::hopper::gather(x);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all.of[lane]) << lane;
  return bits;
}
