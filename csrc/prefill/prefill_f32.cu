// Host side of the float32 prefill: sizes, workspace, and the launches.
#include "intra.cuh"
#include "params.cuh"
#include "prefill.h"
#include "shared_memory.h"
#include "state.cuh"

namespace kda {

static kda_status check_alignment(const char *name, const kda_tensor &x, int64_t floats) {
  if (reinterpret_cast<uintptr_t>(x.data) % (4 * floats) || x.batch_stride % floats || x.head_stride % floats || x.token_stride % floats)
    return fail(KDA_INVALID_ARGUMENT,
                "%s must be aligned to %lld bytes and have strides that are multiples of %lld, got %p, %lld, %lld, %lld", name,
                (long long)(4 * floats), (long long)floats, x.data, (long long)x.batch_stride, (long long)x.head_stride,
                (long long)x.token_stride);
  return KDA_OK;
}

constexpr int MUCH_SHARED = 227 * 1024;  // what a block of state takes where there is enough

template <int K, int C, int BV, int DEPTH>
static kda_status launch_with(const kda_prefill_args &args, const Plan &plan, const Params &params, int device) {
  int capability = 0;
  KDA_CUDA(cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device));
  using I = Intra<K, K, C>;
  using S = State<K, K, C, BV, DEPTH>;
  static_assert(sizeof(typename S::Shared) <= MUCH_SHARED, "more than the device has");
  const cudaStream_t stream = static_cast<cudaStream_t>(args.stream);
  KDA_CUDA(cudaFuncSetAttribute(intra_kernel<K, K, C>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(typename I::Shared))));
  KDA_CUDA(cudaFuncSetAttribute(state_kernel<K, K, C, BV, DEPTH>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                int(sizeof(typename S::Shared))));
  if (plan.cells > 0) {
    intra_kernel<K, K, C><<<unsigned(plan.cells), I::THREADS, sizeof(typename I::Shared), stream>>>(params);
    KDA_CUDA(cudaGetLastError());
  }
  const int64_t blocks = args.sequences * args.value_heads * (K / BV);
  if (blocks > 0) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks)), config.blockDim = dim3(S::THREADS);
    config.dynamicSmemBytes = sizeof(typename S::Shared), config.stream = stream;
    cudaLaunchAttribute early{};  // its blocks may start as soon as intra's last ones run
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization, early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early, config.numAttrs = plan.cells > 0 && capability >= 9;
    KDA_CUDA(cudaLaunchKernelEx(&config, state_kernel<K, K, C, BV, DEPTH>, params));
  }
  return KDA_OK;
}

// The state kernel is one chain of chunks per block. Narrow blocks fill the chip when there are few heads; wide ones read the records less
// often. Chunks in flight: as many as the shared memory holds; where K = 128 has many chains, as few as let two blocks of chunks of 32
// share it.
template <int K, int C>
static kda_status launch(const kda_prefill_args &args, const Plan &plan, const Params &params) {
  constexpr int DEPTH = C == 64 ? (K == 64 ? 2 : 1) : (K == 64 ? 5 : 3), SHARING = K == 128 ? 1 : DEPTH;
  int device = 0, processors = 0, shared = 0;
  KDA_CUDA(cudaGetDevice(&device));
  KDA_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  KDA_CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  KDA_TRY((check_shared<K, C>(shared)));
  const int64_t narrow = args.sequences * args.value_heads * 8;
  if (shared < MUCH_SHARED || (K == 128 && C == 32 && narrow > processors && narrow <= 2 * processors))
    return launch_with<K, C, K / 8, 1>(args, plan, params, device);
  if (narrow > processors) return launch_with<K, C, K / 4, SHARING>(args, plan, params, device);
  return launch_with<K, C, K / 8, DEPTH>(args, plan, params, device);
}

kda_status workspace_f32(const kda_prefill_args &args, size_t &bytes) {
  Plan plan;
  KDA_TRY(make_plan(args, plan));
  bytes = size_t(plan.cells) * record_bytes(args, plan);
  return KDA_OK;
}

kda_status prefill_f32(const kda_prefill_args &args) {
  Plan plan;
  KDA_TRY(make_plan(args, plan));
  KDA_TRY(check_alignment("v", args.v, 4));
  KDA_TRY(check_alignment("o", args.o, 2));
  for (const kda_tensor *x : {&args.q, &args.k, &args.g})
    if (x->token_stride > INT32_MAX)
      return fail(KDA_UNSUPPORTED, "a token stride must be below 2^31 elements, got %lld", (long long)x->token_stride);
  if (reinterpret_cast<uintptr_t>(args.w) % 16 || reinterpret_cast<uintptr_t>(args.u) % 16)
    return fail(KDA_INVALID_ARGUMENT, "w and u must be aligned to 16 bytes, got %p and %p", args.w, args.u);
  const Params params = make_params(args, plan);
  if (args.key_dim == 64) return plan.C == 32 ? launch<64, 32>(args, plan, params) : launch<64, 64>(args, plan, params);
  return plan.C == 32 ? launch<128, 32>(args, plan, params) : launch<128, 64>(args, plan, params);
}

}  // namespace kda
