/* kdakit: Kimi Delta Attention prefill on CUDA devices. Plain C99, no CUDA or framework headers.
 *
 *     S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t
 *
 * A call:
 *
 *     kda_prefill_args args = KDA_PREFILL_ARGS_INIT;
 *     args.batch = 1; args.tokens = T; args.heads = args.value_heads = H; args.key_dim = args.value_dim = 128;
 *     args.q.data = q; ... args.o.data = o;                       device memory, [B, H, T, dim] unless strides say otherwise
 *     size_t bytes;
 *     if (kda_prefill_workspace_f32(&args, &bytes) != KDA_OK) puts(kda_last_error());
 *     args.workspace = ...; args.workspace_size = bytes; args.stream = stream;
 *     if (kda_prefill_f32(&args) != KDA_OK) puts(kda_last_error());
 *
 * The calls enqueue work on `stream` of the current device and return; they never wait for the device and allocate nothing there. Equal
 * calls give equal bits. Fields may be added at the end of the struct: a library reads the first `size` bytes only and takes the rest as
 * zero, so a program compiled against an older header goes on working; one compiled against a newer header works as long as it leaves the
 * fields that this library does not know at zero, and is told so otherwise (KDA_UNSUPPORTED). Zero is every field's default.
 *
 * Pointers are aligned to their elements at least; no tensor holds more than 2^60 of them, and `o` has strides that overlap nowhere.
 */
#ifndef KDAKIT_H
#define KDAKIT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define KDA_API __declspec(dllexport)
#else
#define KDA_API __attribute__((visibility("default")))
#endif

#define KDA_ABI_VERSION 2

typedef enum kda_status {
  KDA_OK = 0,
  KDA_INVALID_ARGUMENT = 1,    /* a field breaks a rule of this header */
  KDA_UNSUPPORTED = 2,         /* legal, but no kernel for these sizes, dtypes or options */
  KDA_NOT_BUILT = 3,           /* this library was built without that kernel */
  KDA_WORKSPACE_TOO_SMALL = 4, /* workspace_size is below what the query asks for */
  KDA_DEVICE_TOO_SMALL = 5,    /* the device has less shared memory per block than the kernel needs */
  KDA_CUDA_ERROR = 6           /* a CUDA call failed */
} kda_status;

typedef enum kda_dtype { KDA_FLOAT32 = 0, KDA_BFLOAT16 = 1, KDA_FLOAT16 = 2 } kda_dtype;

/* g is the log-decay (<= 0); or raw: -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)). */
typedef enum kda_gate { KDA_GATE_LOG_DECAY = 0, KDA_GATE_SOFTPLUS = 1, KDA_GATE_BOUNDED = 2 } kda_gate;

typedef enum kda_beta { KDA_BETA_GIVEN = 0, KDA_BETA_SIGMOID = 1, KDA_BETA_DOUBLE_SIGMOID = 2 } kda_beta;

/* [batch, head, token, dim] elements of `dtype`, dim adjacent; strides in elements. All three zero: packed in that order. */
typedef struct kda_tensor {
  void *data;
  int32_t dtype; /* kda_dtype */
  int32_t reserved;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t token_stride;
} kda_tensor;

typedef struct kda_prefill_args {
  size_t size; /* sizeof(kda_prefill_args) where the caller was compiled */

  int64_t batch;       /* B; 1 with cu_seqlens */
  int64_t tokens;      /* T, any length from 0 */
  int64_t heads;       /* H of q and k */
  int64_t value_heads; /* HV of v, g, beta and o, a multiple of H */
  int64_t key_dim;     /* K */
  int64_t value_dim;   /* V */
  int64_t chunk_size;  /* C; 0: the library's choice */

  kda_tensor q;    /* [B, H, T, K] */
  kda_tensor k;    /* [B, H, T, K] */
  kda_tensor v;    /* [B, HV, T, V] */
  kda_tensor g;    /* [B, HV, T, K] */
  kda_tensor beta; /* [B, HV, T] */
  kda_tensor o;    /* [B, HV, T, V], written */

  const float *initial_state; /* [N, HV, K, V], or NULL for zeros */
  float *final_state;         /* the same, written, or NULL */
  void *w;                    /* [B, HV, ceil(T / C), C, K], written: (I + A_kk)^-1 beta k exp(G); or NULL. float32 path, no cu_seqlens */
  void *u;                    /* [B, HV, ceil(T / C), C, V], written: (I + A_kk)^-1 beta v; or NULL. Rows past T are zero */

  void *workspace; /* device memory, aligned to 256 bytes */
  size_t workspace_size;
  void *stream; /* cudaStream_t; NULL is the default stream */

  float scale;           /* of o; 0: K^-1/2 */
  int32_t gate;          /* kda_gate */
  float lower_bound;     /* of the bounded gate, in [-5, 0), or what safe_gate promises */
  int32_t safe_gate;     /* the log-decay lies in [lower_bound, 0) */
  int32_t beta_kind;     /* kda_beta */
  int32_t l2norm;        /* divide q and k by their norms */
  int32_t state_v_first; /* states are [N, HV, V, K] */
  int32_t cu_seqlens_64; /* cu_seqlens holds int64_t, not int32_t */

  const float *A_log;     /* [HV]; may be NULL for the bounded gate */
  const float *dt_bias;   /* [HV, K] or NULL */
  const void *cu_seqlens; /* [N + 1] offsets of sequences packed along T, on the device; NULL: N = B */
  int64_t sequences;      /* N with cu_seqlens, else ignored */

  int32_t parts;      /* bfloat16: a sequence is scanned in at most so many parts beside each other; 0: the library's choice */
  int32_t checkpoint; /* chunks from one of `checkpoints` to the next */

  /* bfloat16, KDA_GATE_LOG_DECAY or l2norm, all three or none: what a backward begins with, see kda_gradient_args for slots and for the
     order of rows and columns. With `record` there is no `solved`. */
  void *lower;         /* [slots, HV, 64, 64] of lower_dtype, written: (I + A_kk)^-1 = I - Diag(beta) lower, strictly lower */
  void *solved;        /* [slots, HV, 64, 64] bfloat16, written: A_qk (I + A_kk)^-1, with the scale */
  void *checkpoints;   /* [ceil(slots / checkpoint), HV, V, K] bfloat16, written: the state before the chunk of every such slot */
  int32_t lower_dtype; /* KDA_FLOAT16 or KDA_FLOAT32 */
  int32_t group;       /* as kda_gradient_args.group */
  int32_t checkpoint_float32; /* checkpoints are float32; K = V = 64 */

  int32_t block; /* bfloat16: tokens from state to state: 64, or, for K = V = 128 in one part, 16; 0: the library's choice */

  /* bfloat16, K = V = 128, with lower, checkpoints, a checkpoint of 1 and a group of at most 1, all three or none: what a backward need not
     make again. With l2norm and a sigmoid as beta, or with KDA_GATE_LOG_DECAY and KDA_BETA_GIVEN. No initial_state. */
  void *record;   /* [slots, HV, KDA_RECORD_BYTES] at 128 bytes, written: for kda_reverse_args.record; the workspace then holds none */
  void *r;        /* [B, T, HV, V] bfloat16, packed, as o then is, written: v - k_in S, see kda_gradient_args */
  float *factors; /* [slots, HV, 3, 64], written: beta, 0 past a sequence's end, 1 / |q|, 1 / |k| */
} kda_prefill_args;

#define KDA_RECORD_BYTES 54784

#define KDA_PREFILL_ARGS_INIT {sizeof(kda_prefill_args)}

/* float32 throughout: chunk sizes 32 and 64, (K, V) = (64, 64) and (128, 128). Errors are those of float32 arithmetic. */
KDA_API kda_status kda_prefill_workspace_f32(const kda_prefill_args *args, size_t *bytes);
KDA_API kda_status kda_prefill_f32(const kda_prefill_args *args);

/* q, k, v, o bfloat16; g bfloat16 or float32; beta bfloat16 or float32; states float32. */
KDA_API kda_status kda_prefill_workspace_bf16(const kda_prefill_args *args, size_t *bytes);
KDA_API kda_status kda_prefill_bf16(const kda_prefill_args *args);

/* A stage of the backward, over chunks of 64 tokens: every product over V, and through the chunk's decayed products to the gradients of q,
 * k, g and beta. K = V = 64 or 128, sm_90a. Slots are chunks: sequence n's begin at slot n ceil(T / 64), or cu_seqlens[n] / 64 + n; there
 * are B ceil(T / 64), or T / 64 + N. Tensors of slots and those [B, T, HV, ..] are packed in the order given here, and begin at 16 bytes;
 * so does initial_state here.
 */
typedef struct kda_gradient_args {
  size_t size; /* sizeof(kda_gradient_args) where the caller was compiled */

  const kda_prefill_args *forward; /* the call that is differentiated: inputs but v, sizes, options, initial_state, stream */

  const void *lower;      /* [slots, HV, 64, 64] of lower_dtype: (I + A_kk)^-1 = I - Diag(beta) lower, strictly lower */
  const float *factors;   /* [slots, HV, 3, 64]: beta, 1 / |q|, 1 / |k| (1 without l2norm); beta is 0 past a sequence's end */
  const void *states;     /* [slots, HV, V, K] bfloat16: the state before each chunk */
  const void *d_states;   /* [slots, HV, V, K] bfloat16: the gradient of the state after each chunk */
  const void *r;          /* [B, T, HV, V] bfloat16: v - k_in S, where k_in is k decayed from the chunk's start */
  const void *d_o;        /* [B, T, HV, V] bfloat16 */
  const void *d_v;        /* [B, T, HV, V] bfloat16 */
  const void *alone;      /* [slots, HV, 64, V] bfloat16: d_v / beta where |beta| < 2^-64, with KDA_BETA_GIVEN; or NULL */
  const float *d_final;   /* [N, HV, K, V], or [N, HV, V, K] with state_v_first: the final state's gradient, or NULL */

  void *d_q;          /* [B, T, HV, K] of d_q_dtype, written: of each value head */
  void *d_k;          /* the same */
  void *d_g;          /* [B, T, HV, K], dtype of g, written */
  void *d_beta;       /* [B, T, HV], dtype of beta, written */
  float *A_shares;    /* [slots, HV, K], written: what each chunk and channel add to A_log's gradient; or NULL */
  float *bias_shares; /* [slots, HV, K], written: what each chunk adds to dt_bias's gradient; or NULL */

  int32_t lower_dtype; /* KDA_FLOAT16 or KDA_FLOAT32 */
  int32_t d_q_dtype;   /* of d_q and d_k: KDA_BFLOAT16 or KDA_FLOAT32 */
  int32_t group;       /* 0 or 1: rows of lower and factors are tokens; else of each 32 token t is row t % group * 32 / group + t / group */
  int32_t reserved;    /* 0 */

  /* As d_final, of sequences of more than one chunk, or NULL: bfloat16 loses some of what gates get from the ends of a sequence. */
  const float *before_last; /* the state before the last chunk, with d_final */
  const float *after_first; /* the gradient of the state after the first chunk, with initial_state */

  /* As states and d_states, both or neither, for K = V = 64: what rounding to bfloat16 took from them, for all that gates get from the sum
     over V of their products. Then neither of the two above is looked at. */
  const void *states_lost;
  const void *d_states_lost;
} kda_gradient_args;

#define KDA_GRADIENT_ARGS_INIT {sizeof(kda_gradient_args)}

KDA_API kda_status kda_gradient_bf16(const kda_gradient_args *args);

/* The stage before all others of a backward: what a forward in chunks of 64 makes of its inputs, once more. K = V = 64 or 128; slots
 * and order of rows as above.
 */
typedef struct kda_rebuild_args {
  size_t size; /* sizeof(kda_rebuild_args) where the caller was compiled */

  const kda_prefill_args *forward; /* the call that is differentiated: inputs but v, sizes, options, stream */

  const void *lower; /* as in kda_gradient_args */

  void *tiles;    /* [slots, HV, 3, 64, K], written: k and scale q decayed from the chunk's start, bfloat16; and (I + A_kk)^-T k decayed to
                     its end, float16 where lower is float16, else bfloat16 */
  float *decay;   /* [slots, HV, K], written: of the whole chunk */
  float *factors; /* [slots, HV, 3, 64], written: as in kda_gradient_args */
  void *first;    /* [N, HV, 2, 64, K] bfloat16, written: what rounding took from the first two tiles of each sequence; or NULL */

  int32_t lower_dtype; /* KDA_FLOAT16 or KDA_FLOAT32 */
  int32_t group;       /* as in kda_gradient_args */

  void *q_lost; /* [slots, HV, 64, K] bfloat16, written: what rounding took from the second tile, if K = 64, lower float32; or NULL */
} kda_rebuild_args;

#define KDA_REBUILD_ARGS_INIT {sizeof(kda_rebuild_args)}

KDA_API kda_status kda_rebuild_bf16(const kda_rebuild_args *args);

/* Another stage of the backward, before that one: from the last chunk of a sequence to its first, with dS' the gradient of the state after
 * a chunk,
 *
 *     y = solved^T d_o + k_solved dS'     d_v = beta y     dS = Diag(decay) dS' + q_decayed^T d_o - k_in^T d_v
 *
 * K = V = 64 or 128, sm_90a; slots and the order of rows as above.
 */
typedef struct kda_reverse_args {
  size_t size; /* sizeof(kda_reverse_args) where the caller was compiled */

  const kda_prefill_args *forward; /* the call that is differentiated: sizes, cu_seqlens, beta_kind, state_v_first, stream */

  const void *tiles;    /* [slots, HV, 3, 64, K] bfloat16: k_in, q_decayed with the scale, k_solved = (I + A_kk)^-T k_decayed */
  const void *solved;   /* [slots, HV, 64, 64] bfloat16: A_qk (I + A_kk)^-1, with the scale */
  const float *decay;   /* [slots, HV, K]: over the chunk */
  const float *factors; /* [slots, HV, 3, 64]: beta, and two that are not read; beta is 0 past a sequence's end */
  const void *d_o;      /* [B, T, HV, V] bfloat16 */
  const float *d_final; /* [N, HV, K, V], or [N, HV, V, K] with state_v_first: the final state's gradient, or NULL */

  void *d_states;   /* [slots, HV, V, K] bfloat16, written: dS' of each chunk */
  void *d_v;        /* [B, T, HV, V] bfloat16, written */
  void *alone;      /* [slots, HV, 64, V] bfloat16, written by token where |beta| < 2^-64, with KDA_BETA_GIVEN: y; or NULL */
  void *y_lost;     /* [N, HV, 64, V] bfloat16, written by token: what rounding took from d_v, or y there, in the last chunks; or NULL */
  float *d_initial; /* as d_final, written; or NULL */

  int32_t k_solved_dtype; /* KDA_BFLOAT16, or KDA_FLOAT16 in the place of bfloat16 */
  int32_t group;          /* as kda_gradient_args.group, of the rows of tiles and factors, rows and columns of solved */
  int32_t channels;       /* value channels of a block, 64 or 128; 0: the library's choice. Bits do not depend on it */
  int32_t reserved;       /* 0 */

  float *after_first; /* as d_final, written: dS' of the first of several chunks of a sequence; or NULL */

  void *d_states_lost; /* as d_states, written: what rounding took from it, with K = V = 64; or NULL */
  const void *q_lost;  /* [slots, HV, 64, K] bfloat16: what rounding took from q_decayed, K = V = 64 and k_solved in bfloat16; or NULL */

  const void *record; /* what kda_prefill_args.record has got, in place of tiles, solved and decay, which are NULL; or NULL. With another
                         beta_kind than KDA_BETA_GIVEN factors and alone are NULL as well */
} kda_reverse_args;

#define KDA_REVERSE_ARGS_INIT {sizeof(kda_reverse_args)}

KDA_API kda_status kda_reverse_bf16(const kda_reverse_args *args);

/* What went wrong in this thread's last call that did not return KDA_OK. */
KDA_API const char *kda_last_error(void);
KDA_API const char *kda_status_name(kda_status status);
KDA_API int kda_abi_version(void);

#ifdef __cplusplus
}
#endif

#endif
