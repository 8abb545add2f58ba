/* y = x weight^T + bias for few rows of x, and its gradients, in float32: each pass reads the weights once, where they lie,
 * or writes their gradient once. x is (row, input), weight (output, input), grad and y are (row, output), without gaps.
 *
 * x comes laid out by `lay_rows`: (line of LANES inputs, row, lane), with zeros behind the last input up to a multiple of
 * OVERRUN, which is as far as a loop reads.
 *
 * An output is a sum in sixteen lanes over BLOCK inputs, and of those sums; the gradient of an input a sum over GROUP
 * outputs in their order, and of those sums; that of a weight a sum over rows in their order. None of them depends on how
 * many rows, inputs or outputs are computed together. With AVX2 and AVX-512 each product is added before it is rounded
 * (FMA), with the same bits in both; without them it is rounded first.
 * Nothing is checked here: compiled_few_rows.py does that.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 16
#define MOST_ROWS 32
#define OVERRUN 64
#define BLOCK 4096   /* inputs whose x stays in the cache while weights pass: of 32 rows half a megabyte */
#define GROUP 64     /* outputs that are summed before what there was is read */
#define COLUMNS 8192 /* inputs whose gradient stays in the cache: of 32 rows a megabyte */
#define AHEAD 128    /* inputs further on, which are fetched meanwhile */
#define LARGE (1 << 20) /* numbers of a weight gradient that are too many to stay in the cache until they are read */
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 8")
#define UP_TO_EIGHT(apply) apply(1) apply(2) apply(3) apply(4) apply(5) apply(6) apply(7) apply(8)

typedef struct {
    const float *x, *weight, *bias, *grad; /* bias: or none */
    float *y, *grad_x, *grad_weight, *grad_bias; /* the last two: or none */
    float *laid;
    int64_t rows, inputs, outputs;
    int64_t first, last; /* outputs that are done here, or inputs of grad_x: other threads do others */
} product;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* In one order, whatever the processor has. */
INLINE float total_of(const float *lanes) {
    float eight[8], four[4];
    for (int l = 0; l < 8; l++) eight[l] = lanes[l] + lanes[l + 8];
    for (int l = 0; l < 4; l++) four[l] = eight[l] + eight[l + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Whether the gradient of the weights is written past the cache: a line need not be fetched before it is written. */
INLINE int goes_past(const product *s) {
#if defined(__x86_64__)
    const int many = s->grad_weight && s->inputs * s->outputs > LARGE;
    return many && s->inputs % LANES == 0 && (uintptr_t)s->grad_weight % 64 == 0;
#else
    (void)s;
    return 0;
#endif
}

INLINE void settled(int past) {
#if defined(__x86_64__)
    if (past) _mm_sfence(); /* another thread reads it next */
#endif
    (void)past;
}

/* The gradient of the bias: a sum over rows in their order. */
INLINE void sum_rows(const product *s) {
    float *restrict to = s->grad_bias;
    for (int64_t o = s->first; o < s->last; o++) to[o] = s->grad[o];
    for (int64_t r = 1; r < s->rows; r++)
        for (int64_t o = s->first; o < s->last; o++) to[o] += s->grad[r * s->outputs + o];
}

/* x, as the others want it. */
static void lay_rows(const product *s) {
    const int64_t whole = s->inputs / LANES * LANES, end = (s->inputs + OVERRUN - 1) / OVERRUN * OVERRUN;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int64_t r = 0; r < s->rows; r++)
            memcpy(s->laid + i * s->rows + r * LANES, s->x + r * s->inputs + i, LANES * sizeof(float));
    memset(s->laid + whole * s->rows, 0, (size_t)((end - whole) * s->rows) * sizeof(float));
    for (int64_t r = 0; r < s->rows && whole < s->inputs; r++)
        memcpy(s->laid + whole * s->rows + r * LANES, s->x + r * s->inputs + whole,
               (size_t)(s->inputs - whole) * sizeof(float));
}

/* --- once for any processor, once for AVX2, once for AVX-512 -------------------------------------------------------- */
#define NAME(name) name##_plain
#define TARGET
#define WIDTH 4
#define ADDED(sum, x, y) ((sum) + (x) * (y))
#if defined(__x86_64__)
#define PAST(to, vector) _mm_stream_ps(to, (__m128)(vector))
#else
#define PAST(to, vector) NAME(put)(to, vector)
#endif
#define DOT_ROWS 3
#define DOT_OUTS 1
#define BACK_ROWS 6
#define BACK_VECTORS 2
#define OUTER_OUTS 2
#define OUTER_VECTORS 4
#include "few_rows.h"

#if defined(__x86_64__)
#define NAME(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 8
#define ADDED(sum, x, y) ((VEC)_mm256_fmadd_ps((__m256)(x), (__m256)(y), (__m256)(sum)))
#define PAST(to, vector) _mm256_stream_ps(to, (__m256)(vector))
#define DOT_ROWS 3
#define DOT_OUTS 2
#define BACK_ROWS 6
#define BACK_VECTORS 2
#define OUTER_OUTS 4
#define OUTER_VECTORS 2
#include "few_rows.h"

#define NAME(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,fma,prefer-vector-width=512")))
#define WIDTH 16
#define ADDED(sum, x, y) ((VEC)_mm512_fmadd_ps((__m512)(x), (__m512)(y), (__m512)(sum)))
#define PAST(to, vector) _mm512_stream_ps(to, (__m512)(vector))
#define DOT_ROWS 8
#define DOT_OUTS 3
#define BACK_ROWS 8
#define BACK_VECTORS 2
#define OUTER_OUTS 4
#define OUTER_VECTORS 4
#include "few_rows.h"
#endif

#define EVERY(apply, more) apply(multiply, more) apply(derive_x, more) apply(derive_weight, more)
#define HELD(name, _) static void (*chosen_##name)(const product *) = name##_plain;
#define CHOSEN(name, variant) chosen_##name = name##_##variant;
EVERY(HELD, )

__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        EVERY(CHOSEN, avx2)
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
            EVERY(CHOSEN, avx512)
        }
    }
#endif
}

/* The number in the names is that of this interface, so that a library with another one is not mistaken for this. The
 * others of each are for tests: without vector instructions of this processor, and with those of AVX2. */
#define SHOWN(name, _)                                                                                                \
    void darknight_##name##_1(const product *s) { chosen_##name(s); }                                                 \
    void darknight_##name##_plain_1(const product *s) { name##_plain(s); }
#define SHOWN_AVX2(name, _)                                                                                           \
    void darknight_##name##_avx2_1(const product *s) { name##_avx2(s); }
EVERY(SHOWN, )
#if defined(__x86_64__)
EVERY(SHOWN_AVX2, )
#endif
void darknight_lay_rows_1(const product *s) { lay_rows(s); }
