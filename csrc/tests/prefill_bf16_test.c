/* kda_prefill_bf16 from C99: against the token recurrence in double precision, with guarded memory around every tensor.
 *
 *     prefill_bf16_test [unset]        exit code 77 where no device can run it; `unset`: outputs and workspace start unset, not as NaN
 */
#include <math.h>

#include "guarded.h"
#include "kdakit.h"

enum { D = 128, MOST = 8 };

typedef struct {
  const char *name;
  int B, T, H, HV;
  int gate, safe, wide; /* safe 2: log-decays from -0.02; wide: g and beta are float32 */
  int l2norm, beta, v_first, states;
  int lengths[MOST]; /* packed sequences, -1 after the last; lengths[0] = -1: none */
  int parts, block;  /* 0: the library's choice */
} problem;

static uint16_t to_bf16(double x) {
  float y = (float)x;
  uint32_t bits;
  memcpy(&bits, &y, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static double from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}

/* Elements of bfloat16 or float32 arrays. */
static double get(guarded x, int wide, size_t i) { return wide ? ((float *)x.host)[i] : from_bf16(((uint16_t *)x.host)[i]); }
static void put(guarded x, int wide, size_t i, double y) {
  if (wide) ((float *)x.host)[i] = (float)y;
  else ((uint16_t *)x.host)[i] = to_bf16(y);
}

typedef struct {
  guarded q, k, v, g, beta, A_log, bias, first, last, o, cu, space;
} arrays;

static guarded filled(size_t count, int wide, double low, double high, uint64_t *seed) {
  guarded x = guarded_make(count * (wide ? 4 : 2), 1);
  for (size_t i = 0; i < count; ++i) put(x, wide, i, low + (high - low) * uniform(seed));
  guarded_upload(x);
  return x;
}

static double log_decay(const problem *p, const arrays *x, size_t token, int head, int d) {
  double g = get(x->g, p->wide, (token * p->HV + head) * D + d);
  if (p->gate == KDA_GATE_LOG_DECAY) return g;
  const double a = exp(get(x->A_log, 1, head));
  g += get(x->bias, 1, head * D + d);
  return p->gate == KDA_GATE_SOFTPLUS ? -a * log1p(exp(g)) : -5.0 / (1 + exp(-a * g));
}

static void row(guarded x, size_t from, int norm, double *y) {
  double sum = 1e-6;
  for (int d = 0; d < D; ++d) y[d] = get(x, 0, from + d), sum += y[d] * y[d];
  for (int d = 0; d < D && norm; ++d) y[d] /= sqrt(sum);
}

/* S <- Diag(e^g) S;  S <- S + beta k (v - k^T S)^T;  o = scale S^T q, along the tokens first .. first + count of one value head. */
static void recurrence(const problem *p, const arrays *x, size_t first, int count, int head, double *S, double *o) {
  double q[D], k[D], decay[D];
  for (size_t t = first; t < first + count; ++t) {
    const size_t key = (t * p->H + head / (p->HV / p->H)) * D, value = (t * p->HV + head) * D;
    row(x->q, key, p->l2norm, q), row(x->k, key, p->l2norm, k);
    for (int d = 0; d < D; ++d) decay[d] = exp(log_decay(p, x, t, head, d));
    double beta = get(x->beta, p->wide, t * p->HV + head);
    if (p->beta != KDA_BETA_GIVEN) beta = (p->beta == KDA_BETA_DOUBLE_SIGMOID ? 2 : 1) / (1 + exp(-beta));
    for (int c = 0; c < D; ++c) {
      double error = get(x->v, 0, value + c), sum = 0;
      for (int d = 0; d < D; ++d) S[d * D + c] *= decay[d], error -= k[d] * S[d * D + c];
      for (int d = 0; d < D; ++d) S[d * D + c] += beta * k[d] * error, sum += q[d] * S[d * D + c];
      o[value + c] = sum / sqrt(D);
    }
  }
}

static int sequences(const problem *p) {
  int n = 0;
  while (n < MOST && p->lengths[n] >= 0) ++n;
  return n ? n : p->B;
}

/* Relative errors of o and of the final states. */
static void errors(const problem *p, const arrays *x, double *of_o, double *of_state) {
  const size_t values = (size_t)p->B * p->T * p->HV * D;
  double *truth = calloc(values + 1, sizeof(double)), *S = malloc(D * D * sizeof(double)), sums[4] = {0, 1e-30, 0, 1e-30};
  size_t first = 0;
  for (int n = 0; n < sequences(p); ++n) {
    const int count = p->lengths[0] >= 0 ? p->lengths[n] : p->T;
    for (int head = 0; head < p->HV; ++head) {
      const size_t at = ((size_t)n * p->HV + head) * D * D;
      for (int i = 0; i < D * D; ++i) S[i] = p->states ? get(x->first, 1, at + (p->v_first ? i % D * D + i / D : i)) : 0;
      recurrence(p, x, first, count, head, S, truth);
      for (int i = 0; i < D * D; ++i) {
        const double off = get(x->last, 1, at + (p->v_first ? i % D * D + i / D : i)) - S[i];
        sums[2] += off * off, sums[3] += S[i] * S[i];
      }
    }
    first += count;
  }
  for (size_t i = 0; i < values; ++i) {
    const double off = get(x->o, 0, i) - truth[i];
    sums[0] += off * off, sums[1] += truth[i] * truth[i];
  }
  *of_o = sqrt(sums[0] / sums[1]), *of_state = sqrt(sums[2] / sums[3]);
  free(truth), free(S);
}

static arrays make_arrays(const problem *p, int poison) {
  const size_t tokens = (size_t)p->B * p->T, states = (size_t)sequences(p) * p->HV * D * D;
  uint64_t seed = 7;
  const double size = p->l2norm ? 1 : 0.15; /* keys of about unit length where nothing normalises them */
  const double low = p->gate != KDA_GATE_LOG_DECAY ? -2 : p->safe == 2 ? -0.02 : p->safe ? -5 : -300;
  const double high = p->gate != KDA_GATE_LOG_DECAY ? 2 : 0;
  arrays x;
  x.q = filled(tokens * p->H * D, 0, -size, size, &seed), x.k = filled(tokens * p->H * D, 0, -size, size, &seed);
  x.v = filled(tokens * p->HV * D, 0, -1, 1, &seed), x.g = filled(tokens * p->HV * D, p->wide, low, high, &seed);
  x.beta = filled(tokens * p->HV, p->wide, p->beta == KDA_BETA_GIVEN ? 0 : -2, p->beta == KDA_BETA_GIVEN ? 1 : 2, &seed);
  x.A_log = filled(p->HV, 1, -1, 1, &seed), x.bias = filled(p->HV * D, 1, -1, 1, &seed), x.first = filled(states, 1, -1, 1, &seed);
  x.last = guarded_make(states * 4, poison), x.o = guarded_make(tokens * p->HV * D * 2, poison);
  x.cu = guarded_make((sequences(p) + 1) * sizeof(int32_t), 1);
  for (int n = 0; n < sequences(p) && p->lengths[0] >= 0; ++n) ((int32_t *)x.cu.host)[n + 1] = ((int32_t *)x.cu.host)[n] + p->lengths[n];
  guarded_upload(x.cu);
  return x;
}

static kda_tensor tokens_first(guarded x, const problem *p, int heads, int dim, int wide) {
  kda_tensor y = {guarded_inside(x), wide ? KDA_FLOAT32 : KDA_BFLOAT16, 0, (int64_t)p->T * heads * dim, dim, (int64_t)heads * dim};
  return y;
}

static kda_status call(const problem *p, arrays *x, int poison) {
  kda_prefill_args args = KDA_PREFILL_ARGS_INIT;
  args.batch = p->B, args.tokens = p->T, args.heads = p->H, args.value_heads = p->HV, args.key_dim = args.value_dim = D;
  args.q = tokens_first(x->q, p, p->H, D, 0), args.k = tokens_first(x->k, p, p->H, D, 0), args.v = tokens_first(x->v, p, p->HV, D, 0);
  args.g = tokens_first(x->g, p, p->HV, D, p->wide), args.beta = tokens_first(x->beta, p, p->HV, 1, p->wide),
      args.o = tokens_first(x->o, p, p->HV, D, 0);
  args.A_log = guarded_inside(x->A_log), args.dt_bias = guarded_inside(x->bias);
  args.initial_state = p->states ? guarded_inside(x->first) : NULL, args.final_state = guarded_inside(x->last);
  args.gate = p->gate, args.safe_gate = p->safe > 0, args.lower_bound = -5, args.beta_kind = p->beta, args.l2norm = p->l2norm;
  args.state_v_first = p->v_first, args.parts = p->parts, args.block = p->block;
  if (p->lengths[0] >= 0) args.cu_seqlens = guarded_inside(x->cu), args.sequences = sequences(p);
  kda_status status = kda_prefill_workspace_bf16(&args, &args.workspace_size);
  x->space = guarded_make(args.workspace_size, poison);
  args.workspace = guarded_inside(x->space);
  return status == KDA_OK ? kda_prefill_bf16(&args) : status;
}

static int check(const problem *p, int poison) {
  arrays x = make_arrays(p, poison);
  const kda_status status = call(p, &x, poison);
  if (status != KDA_OK) {
    printf("%s: %s: %s\n", p->name, kda_status_name(status), kda_last_error());
    return 1;
  }
  CUDA(cudaDeviceSynchronize());
  const guarded inputs[] = {x.q, x.k, x.v, x.g, x.beta, x.A_log, x.bias, x.first, x.cu, x.space};
  int broken = guarded_broken(x.o, 1) + guarded_broken(x.last, 1);
  for (size_t i = 0; i < sizeof inputs / sizeof *inputs; ++i) broken += guarded_broken(inputs[i], 0);
  double of_o, of_state;
  errors(p, &x, &of_o, &of_state);
  const int bad = !(of_o < 8e-3) || !(of_state < 8e-3) || broken;
  printf("%s: o %.1e, state %.1e, %d guard bytes changed: %s\n", p->name, of_o, of_state, broken, bad ? "FAILED" : "ok");
  for (size_t i = 0; i < sizeof inputs / sizeof *inputs; ++i) guarded_drop(inputs[i]);
  guarded_drop(x.o), guarded_drop(x.last);
  return bad;
}

static const problem PROBLEMS[] = {
    {"bounded", 1, 150, 2, 2, KDA_GATE_BOUNDED, 1, 0, 1, KDA_BETA_SIGMOID, 0, 1, {-1}},
    {"bounded, grouped, two rows, no norms", 2, 70, 1, 2, KDA_GATE_BOUNDED, 1, 0, 0, KDA_BETA_GIVEN, 1, 1, {-1}},
    {"bounded, packed", 1, 331, 2, 2, KDA_GATE_BOUNDED, 1, 0, 1, KDA_BETA_DOUBLE_SIGMOID, 0, 1, {0, 65, 64, 0, 1, 201, 0, -1}},
    {"softplus", 1, 150, 2, 2, KDA_GATE_SOFTPLUS, 0, 0, 1, KDA_BETA_SIGMOID, 0, 0, {-1}},
    {"softplus, packed, float32 gates", 1, 200, 1, 2, KDA_GATE_SOFTPLUS, 0, 1, 0, KDA_BETA_SIGMOID, 1, 1, {70, 0, 130, -1}},
    {"log-decays to -300", 1, 130, 2, 2, KDA_GATE_LOG_DECAY, 0, 1, 1, KDA_BETA_GIVEN, 0, 1, {-1}},
    {"log-decays to -5, promised", 1, 193, 2, 2, KDA_GATE_LOG_DECAY, 1, 1, 1, KDA_BETA_GIVEN, 0, 1, {-1}},
    {"every stage filled three times", 1, 450, 1, 1, KDA_GATE_BOUNDED, 1, 0, 1, KDA_BETA_SIGMOID, 0, 1, {-1}},
    {"heads enough for whole values in a block", 1, 260, 70, 70, KDA_GATE_BOUNDED, 1, 0, 1, KDA_BETA_SIGMOID, 0, 1, {-1}, 0, 64},
    {"the same by 16 tokens", 1, 350, 70, 70, KDA_GATE_BOUNDED, 1, 0, 1, KDA_BETA_SIGMOID, 0, 1, {-1}},
    {"by 16 tokens, every stage filled twice", 1, 450, 1, 1, KDA_GATE_SOFTPLUS, 0, 0, 1, KDA_BETA_SIGMOID, 0, 1, {-1}, 0, 16},
    {"by 16 tokens, packed", 1, 331, 1, 2, KDA_GATE_LOG_DECAY, 0, 1, 0, KDA_BETA_GIVEN, 1, 1, {0, 65, 64, 0, 1, 201, 0, -1}, 0, 16},
    {"in parts, forgotten", 1, 700, 2, 2, KDA_GATE_BOUNDED, 1, 0, 1, KDA_BETA_SIGMOID, 0, 1, {-1}, 4},
    {"in two parts, forgotten", 1, 700, 1, 1, KDA_GATE_BOUNDED, 1, 0, 1, KDA_BETA_SIGMOID, 0, 1, {-1}, 2},
    {"in two parts, kept", 1, 500, 1, 1, KDA_GATE_LOG_DECAY, 2, 1, 1, KDA_BETA_GIVEN, 0, 1, {-1}, 2},
    {"in parts, kept", 1, 1400, 1, 1, KDA_GATE_LOG_DECAY, 2, 1, 1, KDA_BETA_GIVEN, 0, 1, {-1}, 5},
    {"in parts, packed", 1, 900, 1, 1, KDA_GATE_LOG_DECAY, 2, 1, 1, KDA_BETA_GIVEN, 1, 1, {0, 500, 1, 399, -1}, 4},
    {"one token", 1, 1, 1, 1, KDA_GATE_BOUNDED, 1, 0, 1, KDA_BETA_SIGMOID, 0, 1, {-1}},
};

int main(int count, char **words) {
  int devices = 0, bad = 0;
  struct cudaDeviceProp device;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return puts("no CUDA device"), 77;
  CUDA(cudaGetDeviceProperties(&device, 0));
  if (device.major != 9 || device.minor != 0) return puts("the bfloat16 kernels need compute capability 9.0"), 77;
  /* Parts read records by ordinary loads that the copy engine wrote, which initcheck does not see. */
  const int unset = count > 1 && !strcmp(words[1], "unset");
  for (size_t i = 0; i < sizeof PROBLEMS / sizeof *PROBLEMS; ++i)
    if (!unset || PROBLEMS[i].parts == 0) bad += check(&PROBLEMS[i], !unset);
  return bad ? 1 : 0;
}
