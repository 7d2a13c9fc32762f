/* A GEMM for the CPU in the calling convention of compiled kernels. cpu_kernels.py puts definitions
   in front, of what it computes and where it finds its arguments, and code in place of BEHAVIOUR.
   It calls nothing but TVM-FFI, as kernels must. */

#include <stdint.h>
#include <string.h>

/* As TVM-FFI and DLPack lay them out. */
typedef struct { uint8_t code, bits; uint16_t lanes; } dtype_t;
typedef struct {
  void *data;
  int32_t device_type, device_id, ndim;
  dtype_t dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} tensor_t;
struct array;
typedef struct {
  int32_t type_index;
  uint32_t padding;
  union { int64_t i; void *pointer; tensor_t *tensor; const struct array *array; } v;
} any_t;
struct array { uint64_t references; int64_t type_index; void *deleter; any_t *data; int64_t size; };

enum { INT = 1, POINTER = 4, TENSOR = 7, ARRAY = 71 };

void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);
static int raise(const char *kind, const char *message) {
  TVMFFIErrorSetRaisedFromCStr(kind, message); return -1;
}

/* Values of each type: element `at` of an array, read and written. */

static float bits_to_fp32(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static uint32_t fp32_to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

static float load_fp32(const void *p, int64_t at) { return ((const float *)p)[at]; }
static void store_fp32(void *p, int64_t at, float x) { ((float *)p)[at] = x; }
static float load_bf16(const void *p, int64_t at) {
  return bits_to_fp32((uint32_t)((const uint16_t *)p)[at] << 16);
}
static void store_bf16(void *p, int64_t at, float x) { /* to nearest even */
  uint32_t bits = fp32_to_bits(x);
  ((uint16_t *)p)[at] =
      x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static float fp16_value(uint16_t h) {
  uint32_t exponent = (h >> 10) & 31;
  float x = exponent == 0 ? (float)(h & 0x3ff) / 16777216.0f
                          : bits_to_fp32((exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) |
                                         (uint32_t)(h & 0x3ff) << 13);
  return h & 0x8000 ? -x : x;
}
static float load_fp16(const void *p, int64_t at) { return fp16_value(((const uint16_t *)p)[at]); }
static void store_fp16(void *p, int64_t at, float x) { /* to nearest even */
  uint32_t bits = fp32_to_bits(x), sign = bits >> 16 & 0x8000;
  uint16_t h;
  bits &= 0x7fffffff;
  if (x != x) h = 0x7e00;
  else if (bits >= 0x47800000) h = 0x7c00;
  else if (bits >= 0x38800000) h = (uint16_t)((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
  else  /* a sum of that size has its last bit where a subnormal result has its own */
    h = (uint16_t)fp32_to_bits(bits_to_fp32(bits) + 0.5f);
  ((uint16_t *)p)[at] = h | (uint16_t)sign;
}
static float fp8_e5m2_value(uint8_t code) { return fp16_value((uint16_t)(code << 8)); }
static float fp8_e4m3_value(uint8_t code) {
  int exponent = (code >> 3) & 15, fraction = code & 7;
  float x = exponent == 0 ? (float)fraction / 512.0f
                          : (float)(8 + fraction) * bits_to_fp32((uint32_t)(exponent + 117) << 23);
  if ((code & 0x7f) == 0x7f) x = bits_to_fp32(0x7fc00000);
  return code & 0x80 ? -x : x;
}
static float load_fp8_e5m2(const void *p, int64_t at) {
  return fp8_e5m2_value(((const uint8_t *)p)[at]);
}
static float load_fp8_e4m3(const void *p, int64_t at) {
  return fp8_e4m3_value(((const uint8_t *)p)[at]);
}
static uint8_t nearest(float (*value)(uint8_t), uint8_t largest, float x) { /* ties to even */
  uint8_t sign = (uint8_t)(fp32_to_bits(x) >> 24 & 0x80), best = 0;
  float size = x < 0 ? -x : x;
  if (x != x) return 0x7f; /* NaN in both types */
  for (uint8_t code = 1; code <= largest; ++code) {
    float below = size - value(best), above = value(code) - size;
    if (above < below || (above == below && code % 2 == 0)) best = code;
  }
  return best | sign;
}
static void store_fp8_e5m2(void *p, int64_t at, float x) {
  ((uint8_t *)p)[at] = nearest(fp8_e5m2_value, 0x7b, x);
}
static void store_fp8_e4m3(void *p, int64_t at, float x) {
  ((uint8_t *)p)[at] = nearest(fp8_e4m3_value, 0x7e, x);
}
static float load_fp8_e8m0(const void *p, int64_t at) { /* powers of two from 2^-127 */
  uint8_t code = ((const uint8_t *)p)[at];
  if (code == 0xff) return bits_to_fp32(0x7fc00000);
  return code == 0 ? bits_to_fp32(0x00400000) : bits_to_fp32((uint32_t)code << 23);
}
static float load_fp4_e2m1(const void *p, int64_t at) { /* the first of two in the low half */
  static const float sizes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  uint8_t code = (uint8_t)(((const uint8_t *)p)[at / 2] >> (at % 2 * 4)) & 15;
  return code & 8 ? -sizes[code & 7] : sizes[code & 7];
}
static int32_t load_int8(const void *p, int64_t at) { return ((const int8_t *)p)[at]; }
static void store_int8(void *p, int64_t at, int32_t x) {
  ((int8_t *)p)[at] = (int8_t)(x < -128 ? -128 : x > 127 ? 127 : x);
}
static void store_int32(void *p, int64_t at, int32_t x) { ((int32_t *)p)[at] = x; }

/* What an epilogue applies. */

static float identity(float x) { return x; }
static float relu(float x) { return x > 0 ? x : 0; }
static double exponential(double x) { /* 2^whole * e^rest, with |rest| <= ln(2) / 2 */
  const double ln2 = 0.69314718055994530942;
  double rest, term = 1, sum = 1, power;
  int64_t whole;
  uint64_t bits;
  x = x < -700 ? -700 : x > 700 ? 700 : x;
  whole = (int64_t)(x / ln2 + (x < 0 ? -0.5 : 0.5));
  rest = x - (double)whole * ln2;
  for (int i = 1; i <= 14; ++i) { term *= rest / i; sum += term; }
  bits = (uint64_t)(whole + 1023) << 52;
  memcpy(&power, &bits, 8);
  return sum * power;
}
static float silu(float x) { return (float)(x / (1 + exponential(-x))); }
static float gelu_tanh(float x) {
  double inner = 0.79788456080286535588 * (x + 0.044715 * x * x * x); /* sqrt(2 / pi) */
  double tanh = 1 - 2 / (exponential(2 * inner) + 1);
  return (float)(0.5 * x * (1 + tanh));
}

static float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }
static float swiglu(float gate, float up) { return silu(gate) * up; }
static float geglu(float gate, float up) { return gelu_tanh(gate) * up; }
static float swiglu_oai(float gate, float up) {
  gate = gate > 7.0f ? 7.0f : gate;
  return (float)(gate / (1 + exponential(-1.702 * gate))) * (clamp(up, -7.0f, 7.0f) + 1.0f);
}

/* The gradients of a gate and its up, from that of what the gate gave, and both multiplied. */
static double sigmoid(double x) { return 1 / (1 + exponential(-x)); }
static double silu_slope(double x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); }
static void swiglu_gradient(float grad, float gate, float up, float *pair) {
  pair[0] = (float)(grad * up * silu_slope(gate));
  pair[1] = grad * silu(gate);
  pair[2] = pair[1] * up;
}
static void geglu_gradient(float grad, float gate, float up, float *pair) {
  double scale = 0.79788456080286535588, x = gate; /* sqrt(2 / pi) */
  double tanh = 1 - 2 / (exponential(2 * scale * (x + 0.044715 * x * x * x)) + 1);
  double slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * scale * (1 + 3 * 0.044715 * x * x);
  pair[0] = (float)(grad * up * slope);
  pair[1] = grad * gelu_tanh(gate);
  pair[2] = pair[1] * up;
}
static void swiglu_oai_gradient(float grad, float gate, float up, float *pair) {
  double cut = gate > 7.0f ? 7.0f : gate;
  pair[0] = gate > 7.0f ? 0.0f
      : (float)(grad * (clamp(up, -7.0f, 7.0f) + 1.0f) * silu_slope(1.702 * cut));
  float of_up = (float)(grad * cut * sigmoid(1.702 * cut));
  pair[1] = up > 7.0f || up < -7.0f ? 0.0f : of_up;
  pair[2] = of_up * (clamp(up, -7.0f, 7.0f) + 1.0f);
}

/* A batch of matrices; strides count values. */
typedef struct { char *data; int64_t batch, row, column; } view_t;

static view_t view_of(const tensor_t *t) {
  int r = t->ndim - 2;
  view_t view = {(char *)t->data + t->byte_offset, 0, t->strides[r], t->strides[r + 1]};
  if (t->ndim == 3) view.batch = t->strides[0];
  return view;
}
static view_t compact(void *data, int row_major, int64_t rows, int64_t columns) {
  view_t view = {data, rows * columns, row_major ? columns : 1, row_major ? 1 : rows};
  return view;
}
static int64_t offset(view_t view, int64_t batch, int64_t i, int64_t j) {
  return batch * view.batch + i * view.row + j * view.column;
}
static int64_t swizzled(int64_t row, int64_t block, int64_t blocks) { /* 32 x 4 x 4 */
  int64_t tile = row / 128 * ((blocks + 3) / 4) + block / 4;
  return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

static int calls;

__attribute__((visibility("default"))) int __tvm_ffi_gemm(
    void *self, const any_t *arguments, int32_t count, any_t *result) {
  static const int32_t kinds[] = {KINDS};
  (void)self; (void)result; (void)calls;
  if (count != sizeof kinds / sizeof *kinds) return raise("TypeError", "another number of arguments");
  for (int32_t i = 0; i < count; ++i)
    if (arguments[i].type_index != kinds[i]) return raise("TypeError", "an argument of another kind");
#if POINTERS
  const any_t *mnkl = arguments[AT_MNKL].v.array->data;
  int64_t m = mnkl[0].v.i, n = mnkl[1].v.i, depth = mnkl[2].v.i, batches = mnkl[3].v.i;
  if (arguments[AT_MNKL].v.array->size != 4) return raise("TypeError", "mnkl has not four numbers");
  view_t av = compact(arguments[AT_A].v.pointer, A_ROW_MAJOR, m, depth);
  view_t bv = compact(arguments[AT_B].v.pointer, B_ROW_MAJOR, depth, n);
  view_t outv = compact(arguments[AT_OUT].v.pointer, 1, m, n);
#else
  const tensor_t *a = arguments[AT_A].v.tensor, *b = arguments[AT_B].v.tensor;
  const tensor_t *out = arguments[AT_OUT].v.tensor;
  view_t av = view_of(a), bv = view_of(b), outv = view_of(out);
  int64_t batches = RANK == 3 ? out->shape[0] : 1, m = out->shape[RANK - 2];
  int64_t n = out->shape[RANK - 1], depth = a->shape[a->ndim - 1];
#endif
#ifdef PARTS  /* of equal width, and the loops go over one */
  n /= PARTS;
#endif
#if defined SCALES_TENSOR || defined SCALES_ROW
  const tensor_t *scale_a = arguments[AT_SCALE_A].v.tensor;
  const tensor_t *scale_b = arguments[AT_SCALE_B].v.tensor;
  const char *sa = (char *)scale_a->data + scale_a->byte_offset;
  const char *sb = (char *)scale_b->data + scale_b->byte_offset;
#ifdef SCALES_TENSOR
  if (scale_a->ndim != 1 || scale_b->ndim != 1) return raise("ValueError", "scales of another rank");
#elif defined AT_OFFSETS  /* one for each row, and a row for each group */
  if (scale_a->ndim != 1 || scale_b->ndim != 2) return raise("ValueError", "scales of another rank");
#else
  if (scale_a->ndim != 2 || scale_b->ndim != 2) return raise("ValueError", "scales of another rank");
#endif
#elif defined SCALES_BLOCK
  const char *sa = arguments[AT_SCALE_A].v.pointer, *sb = arguments[AT_SCALE_B].v.pointer;
  int64_t blocks = (depth + BLOCK - 1) / BLOCK;
#endif
#ifdef AT_ADDEND
  const tensor_t *addend = arguments[AT_ADDEND].v.tensor;
#ifdef AT_OFFSETS  /* a row for each group, or for each of the result */
  if (addend->ndim != 2) return raise("ValueError", "addend of another rank");
#else
  if (addend->ndim != (ADDEND_IS_ROW ? 1 : RANK)) return raise("ValueError", "addend of another rank");
#endif
  view_t addv = {(char *)addend->data + addend->byte_offset, 0, 0, addend->strides[addend->ndim - 1]};
  if (!ADDEND_IS_ROW) addv = view_of(addend);
  if (addend->ndim == 2 && ADDEND_IS_ROW) addv.batch = addend->strides[0];
#endif
#ifdef AT_OFFSETS
  const tensor_t *offsets = arguments[AT_OFFSETS].v.tensor;
  const int32_t *ends = (const int32_t *)((char *)offsets->data + offsets->byte_offset);
#endif
#ifdef AT_ROWS
  const tensor_t *rows = arguments[AT_ROWS].v.tensor;
  const int32_t *named = (const int32_t *)((char *)rows->data + rows->byte_offset);
#ifdef AT_OFFSETS  /* of a, one for each of the result */
  if (rows->ndim != 1) return raise("ValueError", "rows of another rank");
#else
  if (rows->ndim != 2) return raise("ValueError", "rows of another rank");
#endif
#endif
#ifdef AT_SUMS  /* as a kernel whose tiles are two parts wide: it writes every second one */
  const tensor_t *sums = arguments[AT_SUMS].v.tensor;
  float *parts = (float *)((char *)sums->data + sums->byte_offset);
  if (sums->ndim != 2) return raise("ValueError", "sums of another rank");
#endif
#ifdef AT_WORKSPACE
  const tensor_t *workspace = arguments[AT_WORKSPACE].v.tensor;
  char *bytes = (char *)workspace->data + workspace->byte_offset;
#ifdef WORKSPACE_TILE  /* as a kernel that shares k among thread blocks: it counts in the prefix */
  static const int64_t tile[] = {WORKSPACE_TILE}, multiple[] = {WORKSPACE_MULTIPLE};
  static const int64_t zeroed[] = {ZEROED};
  int64_t extents[] = {m, n}, tiles = batches, prefix, size;
  for (int i = 0; i < 2; ++i) {
    int64_t along = 0;
    while (along * tile[i] < extents[i] || along % multiple[i]) ++along;
    tiles *= along;
  }
  for (prefix = zeroed[0] + zeroed[1] * tiles; prefix % 128; ++prefix) {}
  size = prefix + SCRATCH * tiles;
  if (workspace->shape[0] != size) return raise("ValueError", "a workspace of another size");
  for (int64_t i = 0; i < prefix; ++i)
    if (bytes[i]) return raise("RuntimeError", "counters are not zero");
#endif
  if (workspace->ndim != 1 || workspace->shape[0] < WORKSPACE_BYTES)
    return raise("ValueError", "too small a workspace");
  for (int64_t i = 0; i < WORKSPACE_BYTES; ++i) ((volatile char *)bytes)[i] = (char)0xff;
#endif
  BEHAVIOUR
  for (int64_t batch = 0; batch < batches; ++batch)
   for (int64_t i0 = 0; i0 < m; i0 += TILE_M)
   for (int64_t j0 = 0; j0 < n; j0 += TILE_N)
    for (int64_t i = i0; i < i0 + TILE_M && i < m; ++i)
      for (int64_t j = j0; j < j0 + TILE_N && j < n; ++j) {
        int64_t matrix = batch;
        int64_t first = 0, last = depth, of_a = i;
        SUM sum;
#ifdef GROUPS_ALONG_K
        first = batch == 0 ? 0 : ends[batch - 1];
        last = ends[batch];
#elif defined AT_OFFSETS
        matrix = 0;
        while (matrix < offsets->shape[0] && i >= ends[matrix]) ++matrix;
        if (matrix == offsets->shape[0]) continue;  /* behind the last group */
#ifdef AT_ROWS  /* another one where a has none of that number */
        of_a = named[i] < 0 ? 0 : named[i] < a->shape[0] ? named[i] : a->shape[0] - 1;
#endif
#endif
#ifdef PAIRED
        SUM pair[2];
        for (int one = 0; one < 2; ++one) {
        int64_t column = HALVES ? one * n + j : 2 * j + one;
#else
        int64_t column = j;
#endif
        sum = 0;
        for (int64_t k = first; k < last; ++k) {
          int64_t row = k;
#if defined AT_ROWS && !defined AT_OFFSETS
          row = named[i * depth + k];
          if (row < 0 || row >= b->shape[0]) continue;
#endif
          SUM product = LOAD(av.data, offset(av, batch, of_a, k)) *
                        LOAD_B(bv.data, offset(bv, matrix, row, column));
#ifdef SCALES_BLOCK
          product *= LOAD_SCALE(sa, swizzled(i, k / BLOCK, blocks)) *
                     LOAD_SCALE(sb, swizzled(j, k / BLOCK, blocks));
#endif
          sum += product;
        }
#ifdef SCALES_TENSOR
        sum *= load_fp32(sa, 0) * load_fp32(sb, 0);
#elif defined SCALES_ROW
#ifdef AT_OFFSETS
        const int64_t row_of_b = matrix * scale_b->strides[0];
#else
        const int64_t row_of_b = 0;
#endif
        sum *= load_fp32(sa, i * scale_a->strides[0]) * load_fp32(sb, row_of_b + j * scale_b->strides[1]);
#endif
#if defined AT_ADDEND && !defined GRADIENT && !defined UPS
        sum = ACTIVATION(sum + LOAD_ADDEND(addv.data, offset(addv, matrix, i, column)));
#endif
#ifdef PAIRED
        pair[one] = sum;
#ifdef KEPT
        STORE(outv.data, offset(outv, batch, i, column), sum);
#endif
        }
        sum = PAIRED(pair[0], pair[1]);
#endif
#ifdef AT_WORKSPACE
        memcpy(bytes + (i * n + j) % (WORKSPACE_BYTES / 4) * 4, &sum, 4);
        memcpy(&sum, bytes + (i * n + j) % (WORKSPACE_BYTES / 4) * 4, 4);
#endif
#ifdef GRADIENT
        int64_t gate = HALVES ? j : 2 * j, up = HALVES ? n + j : 2 * j + 1;
        float gradients[3];
        GRADIENT(sum, LOAD_ADDEND(addv.data, offset(addv, 0, i, gate)),
                 LOAD_ADDEND(addv.data, offset(addv, 0, i, up)), gradients);
        STORE(outv.data, offset(outv, batch, i, gate), gradients[0]);
        STORE(outv.data, offset(outv, batch, i, up), gradients[1]);
#ifdef AT_SUMS
        float *part = parts + i * sums->strides[0] + j / (2 * SUMMED_COLUMNS);
        *part = (j % (2 * SUMMED_COLUMNS) ? *part : 0.0f) + gradients[2];
#endif
#elif defined UPS
        STORE(outv.data, offset(outv, batch, i, j), sum);
        sum = UPS(LOAD_ADDEND(addv.data, offset(addv, 0, i, j)), sum);
        STORE(outv.data, offset(outv, batch, i, n + j), sum);
#elif defined KEPT
        STORE(outv.data, offset(outv, batch, i, 2 * n + j), sum);
#else
        STORE(outv.data, offset(outv, batch, i, j), sum);
#endif
      }
  return 0;
}
