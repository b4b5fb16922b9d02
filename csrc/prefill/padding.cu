// Tokens past the last of the packed sequences take part in nothing: their outputs are zero. Every other kernel visits the tokens of
// sequences alone.
#include "prefill.h"

#include <cuda_runtime.h>

namespace kda {
namespace {

constexpr int kBlocks = 128, kThreads = 256;

// A warp per token and head, `words` of 4 bytes each. Where there is no such token the blocks end at once.
__global__ void __launch_bounds__(kThreads) padding_kernel(uint32_t *o, int64_t token_words, int64_t head_words, int words, int64_t tokens,
                                                           int64_t heads, const void *cu_seqlens, bool wide, int64_t sequences) {
  const int64_t first =
      wide ? static_cast<const int64_t *>(cu_seqlens)[sequences] : static_cast<const int32_t *>(cu_seqlens)[sequences];
  const int64_t warps = int64_t(gridDim.x) * (kThreads / 32);
  for (int64_t i = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; i < (tokens - first) * heads; i += warps) {
    const int64_t token = first + i / heads, head = i % heads;
    for (int word = threadIdx.x % 32; word < words; word += 32) o[token * token_words + head * head_words + word] = 0;
  }
}

}  // namespace

kda_status clear_padding(const kda_prefill_args &args, int element_bytes) {
  if (!args.cu_seqlens || args.tokens == 0) return KDA_OK;
  const auto words = [&](int64_t elements) { return elements * element_bytes / 4; };
  padding_kernel<<<kBlocks, kThreads, 0, static_cast<cudaStream_t>(args.stream)>>>(
      static_cast<uint32_t *>(args.o.data), words(args.o.token_stride), words(args.o.head_stride), int(words(args.value_dim)), args.tokens,
      args.value_heads, args.cu_seqlens, args.cu_seqlens_64 != 0, args.sequences);
  KDA_CUDA(cudaGetLastError());
  return KDA_OK;
}

}  // namespace kda
