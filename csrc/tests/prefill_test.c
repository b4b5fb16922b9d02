/* kda_prefill_f32 from C99: against the token recurrence in double precision, with guarded memory around every tensor.
 *
 *     prefill_test           checks on a GPU; exit code 77 where there is none
 */
#include <math.h>
#include <stddef.h>

#include "guarded.h"
#include "kdakit.h"

typedef struct {
  size_t count;
  float *host; /* count floats */
  guarded memory;
} array;

static array make(size_t count) {
  guarded memory = guarded_make(count * sizeof(float), 1);
  array x = {count, memory.host, memory};
  return x;
}

static float *inside(array x) { return guarded_inside(x.memory); }

static void upload(array x) { guarded_upload(x.memory); }

/* Copies back and returns the number of guard bytes that changed. */
static int download(array x) { return guarded_broken(x.memory, 1); }

static void drop(array x) { guarded_drop(x.memory); }

/* S <- Diag(e^g) S;  S <- S + beta k (v - k^T S)^T;  o = scale S^T q, one row of [B, H]. */
static void recurrence(int T, int D, double scale, const float *q, const float *k, const float *v, const float *g, const float *beta,
                       double *S, double *o) {
  for (int t = 0; t < T; ++t)
    for (int c = 0; c < D; ++c) {
      double error = v[t * D + c], sum = 0;
      for (int d = 0; d < D; ++d) {
        S[d * D + c] *= exp(g[t * D + d]);
        error -= k[t * D + d] * S[d * D + c];
      }
      for (int d = 0; d < D; ++d) {
        S[d * D + c] += beta[t] * k[t * D + d] * error;
        sum += q[t * D + d] * S[d * D + c];
      }
      o[t * D + c] = scale * sum;
    }
}

static double relative(const float *got, const double *truth, size_t count) {
  double off = 0, size = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!isfinite(got[i])) return INFINITY;
    off += (got[i] - truth[i]) * (got[i] - truth[i]);
    size += truth[i] * truth[i];
  }
  return sqrt(off / size);
}

static int check(int B, int H, int T, int D, int C, double low) {
  const size_t rows = (size_t)B * H, tokens = rows * T, chunks = (T + C - 1) / C;
  array q = make(tokens * D), k = make(tokens * D), v = make(tokens * D), g = make(tokens * D), beta = make(tokens), o = make(tokens * D);
  array first = make(rows * D * D), last = make(rows * D * D), w = make(rows * chunks * C * D), u = make(rows * chunks * C * D);
  uint64_t seed = 7;
  for (size_t i = 0; i < tokens; ++i) {
    double norm = 0;
    for (int d = 0; d < D; ++d) {
      q.host[i * D + d] = (float)(uniform(&seed) - 0.5);
      k.host[i * D + d] = (float)(uniform(&seed) - 0.5);
      v.host[i * D + d] = (float)(uniform(&seed) - 0.5);
      g.host[i * D + d] = (float)(low * uniform(&seed));
      norm += k.host[i * D + d] * k.host[i * D + d];
    }
    for (int d = 0; d < D; ++d) k.host[i * D + d] /= (float)sqrt(norm);
    beta.host[i] = (float)uniform(&seed);
  }
  for (size_t i = 0; i < first.count; ++i) first.host[i] = (float)(uniform(&seed) - 0.5);
  upload(q), upload(k), upload(v), upload(g), upload(beta), upload(first);

  kda_prefill_args args = KDA_PREFILL_ARGS_INIT;
  args.batch = B, args.tokens = T, args.heads = args.value_heads = H, args.key_dim = args.value_dim = D, args.chunk_size = C;
  args.q.data = inside(q), args.k.data = inside(k), args.v.data = inside(v), args.g.data = inside(g), args.beta.data = inside(beta);
  args.o.data = inside(o), args.w = inside(w), args.u = inside(u), args.initial_state = inside(first), args.final_state = inside(last);
  kda_status status = kda_prefill_workspace_f32(&args, &args.workspace_size);
  array space = make(args.workspace_size / sizeof(float));
  args.workspace = inside(space);
  if (status == KDA_OK) status = kda_prefill_f32(&args);
  if (status != KDA_OK) {
    printf("B%d H%d T%d D%d C%d: %s: %s\n", B, H, T, D, C, kda_status_name(status), kda_last_error());
    return 1;
  }
  CUDA(cudaDeviceSynchronize());
  int broken = download(o) + download(last) + download(w) + download(u) + download(space);

  double *S = malloc(first.count * sizeof(double)), *truth = malloc(o.count * sizeof(double));
  for (size_t i = 0; i < first.count; ++i) S[i] = first.host[i];
  for (size_t r = 0; r < rows; ++r) {
    const size_t at = r * T * D;
    recurrence(T, D, 1 / sqrt(D), q.host + at, k.host + at, v.host + at, g.host + at, beta.host + r * T, S + r * D * D, truth + at);
  }
  const double of_o = relative(o.host, truth, o.count), of_state = relative(last.host, S, last.count);
  int unwritten = 0;
  for (size_t i = 0; i < w.count; ++i) unwritten += !isfinite(w.host[i]) || !isfinite(u.host[i]);
  const int bad = !(of_o < 2e-6) || !(of_state < 2e-6) || broken || unwritten;
  printf("B%d H%d T%d D%d C%d g > %g: o %.1e, state %.1e, %d guard bytes changed, %d of w, u unwritten: %s\n", B, H, T, D, C, low, of_o,
         of_state, broken, unwritten, bad ? "FAILED" : "ok");
  free(S), free(truth);
  drop(q), drop(k), drop(v), drop(g), drop(beta), drop(o), drop(first), drop(last), drop(w), drop(u), drop(space);
  return bad;
}

/* Structs of older and newer headers. */
static int resize(kda_prefill_args args) {
  struct {
    kda_prefill_args known;
    int64_t later[2];
  } newer = {args, {0, 0}};
  int bad = 0;
  size_t bytes = 0, wanted = 0;
  bad += kda_prefill_workspace_f32(&args, &wanted) != KDA_OK;
  newer.known.size = sizeof newer;
  bad += kda_prefill_workspace_f32(&newer.known, &bytes) != KDA_OK || bytes != wanted;
  newer.later[1] = 1; /* asks for something that this library does not have */
  bad += kda_prefill_workspace_f32(&newer.known, &bytes) != KDA_UNSUPPORTED || strstr(kda_last_error(), "sets a field") == NULL;
  args.gate = KDA_GATE_SOFTPLUS, args.size = offsetof(kda_prefill_args, gate); /* what lies beyond the size is not read */
  bytes = 0;
  bad += kda_prefill_workspace_f32(&args, &bytes) != KDA_OK || bytes != wanted;
  const size_t wrong[] = {0, 8, offsetof(kda_prefill_args, scale) - 1, 1 << 20};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    args.size = wrong[i];
    bad += kda_prefill_workspace_f32(&args, &bytes) != KDA_INVALID_ARGUMENT || strstr(kda_last_error(), "args.size") == NULL;
  }
  return bad;
}

/* What must be refused, and with which status. */
static int refuse(void) {
  int bad = 0;
  size_t bytes = 0;
  kda_prefill_args args = KDA_PREFILL_ARGS_INIT;
  args.batch = args.heads = args.value_heads = 1, args.tokens = 100, args.key_dim = args.value_dim = 64, args.chunk_size = 64;
  bad += kda_prefill_workspace_f32(&args, &bytes) != KDA_OK || bytes == 0;
  bad += kda_prefill_f32(&args) != KDA_INVALID_ARGUMENT || strstr(kda_last_error(), "q.data") == NULL;
  args.key_dim = 80;
  bad += kda_prefill_workspace_f32(&args, &bytes) != KDA_UNSUPPORTED;
  args.key_dim = 64, args.value_heads = 3, args.heads = 2;
  bad += kda_prefill_workspace_f32(&args, &bytes) != KDA_INVALID_ARGUMENT || strstr(kda_last_error(), "value_heads") == NULL;
  args.heads = args.value_heads = 1;
  bad += kda_prefill_workspace_f32(&args, NULL) != KDA_INVALID_ARGUMENT || kda_prefill_workspace_f32(NULL, &bytes) != KDA_INVALID_ARGUMENT;
  bad += resize(args);
  printf("refusals: %s\n", bad ? "FAILED" : "ok");
  return bad;
}

int main(void) {
  int devices = 0, bad = refuse();
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    puts("no CUDA device: only the refusals were checked");
    return bad ? 1 : 77;
  }
  for (int D = 64; D <= 128; D += 64)
    for (int C = 32; C <= 64; C += 32) {
      bad += check(2, 3, 150, D, C, -1.0);
      bad += check(3, 8, 70, D, C, -1.0); /* heads enough for wide blocks */
      bad += check(1, 2, 64, D, C, -300.0);
      bad += check(1, 1, 1, D, C, -1.0);
    }
  return bad ? 1 : 0;
}
