/* Batch normalisation and max pooling in float32, forward and backward, where torch's own are several times slower; and
 * what is done to the results of a product before anybody sees them, and to the gradients that come back.
 *
 * Every tensor is (example, channel, position), without gaps. A channel of a batch is read several times while it lies in
 * the processor's cache. Sums are in double, in sixteen lanes whatever the processor has, and no product that is rounded is
 * fused with a sum, so every variant gives the same bits. With AVX-512 normalisation and pooling are written in its own
 * words. Nothing is checked here: compiled_layers.py does that.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 16
#define TILE 1024
#define MOST_TAPS 255 /* of a window: a byte tells which */
#define SOME 64 /* channels at a time, at most: what is read side by side is fetched ahead */
#define NEAR 32768 /* numbers, side by side, that are enough */
#define FEW 2048   /* and that there are, whatever the batch */
#define SHORT 512  /* numbers side by side that are too few for a processor to see where it goes on */
#define LARGE (1 << 22) /* numbers that are too many to stay in any cache until somebody else reads them */
#define CACHED (1 << 20) /* numbers of a batch that are still in a cache when they are read again */
#define INLINE static inline __attribute__((always_inline))

/* As torch's activations do it: what is not a number stays so. */
INLINE float cut(float value, float low, float high) {
    const float above = value < low ? low : value;
    return above > high ? high : above;
}

/* Its bits: those of what is not a number are above all others. */
INLINE int32_t magnitude(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x7fffffff;
}

/* --- batch normalisation ------------------------------------------------------------------------------------------- */
INLINE double total_of(const double *lanes) {
    double total = 0.0;
    for (int l = 0; l < LANES; l++) total += lanes[l];
    return total;
}

/* How many channels are done at a time. It changes no bit: each has sums of its own. */
INLINE int64_t at_a_time(int64_t examples, int64_t inner) {
    const int64_t most = CACHED / (examples > 0 ? examples : 1), near = most < NEAR ? most : NEAR;
    const int64_t some = (near > FEW ? near : FEW) / (inner > 0 ? inner : 1);
    return some < 1 ? 1 : some < SOME ? some : SOME;
}

/* Sums of a and of a * b, in lanes that stay in registers. */
INLINE void sums_of_two(const float *restrict a, const float *restrict b, int64_t n, double *restrict first,
                        double *restrict second) {
    double p[LANES], q[LANES];
    int64_t i = 0;
    memcpy(p, first, sizeof p);
    memcpy(q, second, sizeof q);
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            const double value = (double)a[i + l];
            p[l] += value;
            q[l] += value * (double)b[i + l];
        }
    }
    for (int l = 0; i < n; i++, l++) {
        p[l] += (double)a[i];
        q[l] += (double)a[i] * (double)b[i];
    }
    memcpy(first, p, sizeof p);
    memcpy(second, q, sizeof q);
}

typedef struct {
    const float *x;
    float *y;
    int64_t examples, channels, inner;
    const float *weight, *bias;         /* by channel; or none */
    float *running_mean, *running_var;  /* updated; or none */
    double momentum, epsilon;
    float *scale, *shift;  /* by channel: y = x * scale + shift */
    double *mean, *inverse; /* by channel, for backward */
    float low, high;
    int64_t limited;     /* whether y is cut to [low, high] */
    int64_t first, last; /* channels that are done here: other threads do others */
    const float *added;  /* to what was normalised, before it is cut; or none */
} normalisation;

/* One channel of one example, from `at` on. */
INLINE void scaled(const normalisation *s, int64_t at, int64_t c) {
    const float *restrict x = s->x + at;
    float *restrict y = s->y + at;
    const float scale = s->scale[c], shift = s->shift[c];
    const float low = s->limited ? s->low : -INFINITY, high = s->limited ? s->high : INFINITY;
    if (s->added) {
        const float *restrict added = s->added + at;
        for (int64_t i = 0; i < s->inner; i++) y[i] = cut(x[i] * scale + shift + added[i], low, high);
    } else if (s->limited)
        for (int64_t i = 0; i < s->inner; i++) y[i] = cut(x[i] * scale + shift, low, high);
    else
        for (int64_t i = 0; i < s->inner; i++) y[i] = x[i] * scale + shift;
}

INLINE void settle(const normalisation *s, int64_t c, double sum, double squares) {
    const double count = (double)(s->examples * s->inner), mean = sum / count;
    const double spread = squares / count - mean * mean, variance = spread > 0.0 ? spread : 0.0;
    const double inverse = 1.0 / sqrt(variance + s->epsilon), weight = s->weight ? s->weight[c] : 1.0;
    s->mean[c] = mean;
    s->inverse[c] = inverse;
    s->scale[c] = (float)(weight * inverse);
    s->shift[c] = (float)((s->bias ? s->bias[c] : 0.0) - mean * weight * inverse);
    if (s->running_mean) {
        const double whole = variance * (count / (count - 1.0));
        s->running_mean[c] = (float)((1.0 - s->momentum) * s->running_mean[c] + s->momentum * mean);
        s->running_var[c] = (float)((1.0 - s->momentum) * s->running_var[c] + s->momentum * whole);
    }
}

INLINE void normalise(const normalisation *s) {
    const int64_t plane = s->channels * s->inner;
    for (int64_t from = s->first, end; from < s->last; from = end) {
        end = from + at_a_time(s->examples, s->inner) < s->last ? from + at_a_time(s->examples, s->inner) : s->last;
        double first[SOME][LANES] = {{0.0}}, second[SOME][LANES] = {{0.0}};
        for (int64_t e = 0; e < s->examples; e++)
            for (int64_t c = from; c < end; c++) {
                const float *x = s->x + e * plane + c * s->inner;
                sums_of_two(x, x, s->inner, first[c - from], second[c - from]);
            }
        for (int64_t c = from; c < end; c++) settle(s, c, total_of(first[c - from]), total_of(second[c - from]));
        for (int64_t e = 0; e < s->examples; e++)
            for (int64_t c = from; c < end; c++) scaled(s, e * plane + c * s->inner, c);
    }
}

/* In evaluation: the same scale and shift for every batch. */
INLINE void by_running(const normalisation *s) {
    for (int64_t c = 0; c < s->channels; c++) {
        const double inverse = 1.0 / sqrt((double)s->running_var[c] + s->epsilon);
        const double scale = inverse * (s->weight ? (double)s->weight[c] : 1.0);
        s->scale[c] = (float)scale;
        s->shift[c] = (float)(-(double)s->running_mean[c] * scale + (s->bias ? (double)s->bias[c] : 0.0));
    }
}

INLINE void affine(const normalisation *s) {
    const int64_t plane = s->channels * s->inner;
    for (int64_t e = 0; e < s->examples; e++)
        for (int64_t c = s->first; c < s->last; c++) scaled(s, e * plane + c * s->inner, c);
}

typedef struct {
    const float *x, *grad;
    float *out;
    int64_t examples, channels, inner;
    const float *scale, *shift; /* of forward */
    const double *mean, *inverse;
    float low, high; /* where y is not between them, an activation behind it stops the gradient */
    int64_t limited; /* whether there is such an activation */
    float *weight, *bias; /* their gradients, by channel */
    int32_t *largest; /* bits of the largest magnitude in out */
    const float *y; /* what an activation made of the sum with something else: it stops the gradient instead; or none */
    float *passed;  /* then: the gradient of that sum */
    int64_t first, last; /* channels that are done here */
} derivation;

/* Where an activation gave y. */
INLINE float let_pass(float grad, float y, float low, float high) { return y <= low || y >= high ? 0.0f : grad; }

/* The gradient that passes the activation behind a sum, of `n` positions from `at` on, and its sums as in sums_of_two. */
INLINE void passed_sum(const derivation *s, int64_t at, int64_t n, double *restrict first, double *restrict second) {
    const float *restrict grad = s->grad + at, *restrict y = s->y + at, *restrict x = s->x + at;
    float *restrict out = s->passed + at;
    const float low = s->low, high = s->high;
    double p[LANES], q[LANES];
    int64_t i = 0;
    memcpy(p, first, sizeof p);
    memcpy(q, second, sizeof q);
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            const float value = let_pass(grad[i + l], y[i + l], low, high);
            out[i + l] = value;
            p[l] += (double)value;
            q[l] += (double)value * (double)x[i + l];
        }
    }
    for (int l = 0; i < n; i++, l++) {
        const float value = let_pass(grad[i], y[i], low, high);
        out[i] = value;
        p[l] += (double)value;
        q[l] += (double)value * (double)x[i];
    }
    memcpy(first, p, sizeof p);
    memcpy(second, q, sizeof q);
}

/* The gradient that passes one behind the normalisation itself, of one channel: what it gave is computed again. */
INLINE void passed(const derivation *s, const float *restrict x, const float *restrict grad, int64_t n, int64_t c,
                   float *restrict out) {
    const float scale = s->scale[c], shift = s->shift[c], low = s->low, high = s->high;
    for (int64_t i = 0; i < n; i++) {
        const float y = x[i] * scale + shift;
        out[i] = y > low && y < high ? grad[i] : 0.0f;
    }
}

/* With x' = (x - mean) * inverse: gx = scale * (g - sum(g) / n - x' * sum(g x') / n) = scale * (g - rest - x * each). */
INLINE void settle_back(const derivation *s, int64_t c, double count, double sum, double products, float *each,
                        float *rest) {
    const double inverse = s->inverse[c], product = (products - s->mean[c] * sum) * inverse;
    *each = (float)(product * inverse / count);
    *rest = (float)((sum - s->mean[c] * inverse * product) / count);
    s->weight[c] = (float)product;
    s->bias[c] = (float)sum;
}

INLINE void derive(const derivation *s) {
    const int64_t plane = s->channels * s->inner;
    const double count = (double)(s->examples * s->inner);
    float some[TILE], each[SOME], rest[SOME];
    int32_t largest = 0;
    for (int64_t from = s->first, end; from < s->last; from = end) {
        end = from + at_a_time(s->examples, s->inner) < s->last ? from + at_a_time(s->examples, s->inner) : s->last;
        double first[SOME][LANES] = {{0.0}}, second[SOME][LANES] = {{0.0}};
        for (int64_t e = 0; e < s->examples; e++)
            for (int64_t c = from; c < end; c++)
                for (int64_t start = 0; start < s->inner; start += TILE) {
                    const int64_t at = e * plane + c * s->inner + start;
                    const int64_t width = s->inner - start < TILE ? s->inner - start : TILE;
                    const float *grad = s->grad + at;
                    if (s->y) {
                        passed_sum(s, at, width, first[c - from], second[c - from]);
                        continue;
                    }
                    if (s->limited) {
                        passed(s, s->x + at, grad, width, c, some);
                        grad = some;
                    }
                    sums_of_two(grad, s->x + at, width, first[c - from], second[c - from]);
                }
        for (int64_t c = from; c < end; c++)
            settle_back(s, c, count, total_of(first[c - from]), total_of(second[c - from]), each + c - from,
                        rest + c - from);
        for (int64_t e = 0; e < s->examples; e++)
            for (int64_t c = from; c < end; c++)
                for (int64_t start = 0; start < s->inner; start += TILE) {
                    const int64_t at = e * plane + c * s->inner + start;
                    const int64_t width = s->inner - start < TILE ? s->inner - start : TILE;
                    const float scale = s->scale[c], times = each[c - from], less = rest[c - from];
                    const float *restrict x = s->x + at, *grad = s->grad + at;
                    float *restrict out = s->out + at;
                    if (s->y)
                        grad = s->passed + at;
                    else if (s->limited) {
                        passed(s, x, grad, width, c, some);
                        grad = some;
                    }
                    for (int64_t i = 0; i < width; i++) {
                        const float value = scale * (grad[i] - less - x[i] * times);
                        const int32_t bits = magnitude(value);
                        out[i] = value;
                        largest = bits > largest ? bits : largest;
                    }
                }
    }
    *s->largest = largest;
}

#if defined(__x86_64__)
/* --- the same a line of sixteen at a time, whose last is masked: short rows take no longer than long ones ---------------- */
#define WIDE __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw")))

/* Sums of sixteen lanes: p of values, q of products. A product of two floats is exact in double, so fusing it with the sum
 * changes no bit; nor does a lane to which zero is added, because it is no negative zero. */
typedef struct {
    __m512d p[2], q[2];
} sixteen;

WIDE INLINE sixteen sixteen_of(const double *first, const double *second) {
    const sixteen sums = {{_mm512_loadu_pd(first), _mm512_loadu_pd(first + 8)},
                          {_mm512_loadu_pd(second), _mm512_loadu_pd(second + 8)}};
    return sums;
}

WIDE INLINE void put_sixteen(const sixteen *sums, double *first, double *second) {
    _mm512_storeu_pd(first, sums->p[0]);
    _mm512_storeu_pd(first + 8, sums->p[1]);
    _mm512_storeu_pd(second, sums->q[0]);
    _mm512_storeu_pd(second + 8, sums->q[1]);
}

WIDE INLINE void add_sixteen(sixteen *sums, __m512 a, __m512 b) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
    sums->p[0] = _mm512_add_pd(sums->p[0], low);
    sums->p[1] = _mm512_add_pd(sums->p[1], high);
    sums->q[0] = _mm512_fmadd_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(b)), sums->q[0]);
    sums->q[1] = _mm512_fmadd_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(b, 1)), sums->q[1]);
}

/* Which of the sixteen from i on there are. */
WIDE INLINE __mmask16 rest_of(int64_t i, int64_t n) { return n - i < LANES ? (__mmask16)((1u << (n - i)) - 1) : 0xFFFF; }

WIDE INLINE __m512 wide_cut(__m512 value, __m512 low, __m512 high) {
    return _mm512_min_ps(high, _mm512_max_ps(low, value)); /* what is not a number stays so */
}

/* How lines are written: past the cache, so that none is fetched before, or with what is written next fetched for it. */
typedef struct {
    int past;
    int64_t next; /* how far that is; 0 for nothing */
} writing;

WIDE INLINE writing writing_of(const float *to, int64_t all, int64_t inner, int64_t next) {
    const writing found = {all >= LARGE && inner % LANES == 0 && (uintptr_t)to % 64 == 0, inner <= SHORT ? next : 0};
    return found;
}

WIDE INLINE void put_line(float *to, __mmask16 some, __m512 value, const writing *how) {
    if (how->past) {
        _mm512_stream_ps(to, value);
        return;
    }
    if (how->next) __builtin_prefetch(to + how->next, 1, 2);
    _mm512_mask_storeu_ps(to, some, value);
}

/* Another thread reads it next. */
INLINE void settled(const writing *how) {
    if (how->past) _mm_sfence();
}

/* Does something with every line of n numbers: the last may not be whole. */
#define EACH_LINE(n, does)                                                                                            \
    do {                                                                                                              \
        int64_t i = 0;                                                                                                \
        for (; i + LANES <= (n); i += LANES) does(0xFFFF);                                                            \
        if (i < (n)) does(rest_of(i, n));                                                                             \
    } while (0)

#define SOON 512 /* numbers that lie side by side, after which one is read that is fetched now */

/* next: how far it is to what is read soon, which is fetched meanwhile. */
WIDE INLINE void wide_sums(const float *x, int64_t n, const int64_t next, double *first, double *second) {
    sixteen sums = sixteen_of(first, second);
#define SUM(some)                                                                                                     \
    {                                                                                                                 \
        const __m512 value = _mm512_maskz_loadu_ps(some, x + i);                                                      \
        __builtin_prefetch(x + i + next, 0, 2);                                                                       \
        add_sixteen(&sums, value, value);                                                                             \
    }
    EACH_LINE(n, SUM);
#undef SUM
    put_sixteen(&sums, first, second);
}

WIDE INLINE void wide_scaled(const normalisation *s, int64_t at, int64_t c, const writing *how, const int limited,
                             const int adds) {
    const float *x = s->x + at, *added = adds ? s->added + at : NULL;
    float *y = s->y + at;
    const __m512 scale = _mm512_set1_ps(s->scale[c]), shift = _mm512_set1_ps(s->shift[c]);
    const __m512 low = _mm512_set1_ps(s->low), high = _mm512_set1_ps(s->high);
#define SCALE(some)                                                                                                   \
    {                                                                                                                 \
        __m512 value = _mm512_add_ps(_mm512_mul_ps(_mm512_maskz_loadu_ps(some, x + i), scale), shift);                \
        if (adds) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(some, added + i));                               \
        if (limited) value = wide_cut(value, low, high);                                                              \
        put_line(y + i, some, value, how);                                                                            \
    }
    EACH_LINE(s->inner, SCALE);
#undef SCALE
}

WIDE INLINE void wide_scaled_any(const normalisation *s, int64_t at, int64_t c, const writing *how) {
    if (s->added)
        s->limited ? wide_scaled(s, at, c, how, 1, 1) : wide_scaled(s, at, c, how, 0, 1);
    else
        s->limited ? wide_scaled(s, at, c, how, 1, 0) : wide_scaled(s, at, c, how, 0, 0);
}

/* What was read last is still near, so it is read first again. */
WIDE static void wide_normalise(const normalisation *s) {
    const int64_t plane = s->channels * s->inner, step = at_a_time(s->examples, s->inner);
    const writing how = writing_of(s->y, s->examples * plane, s->inner, -plane);
    for (int64_t from = s->first, end; from < s->last; from = end) {
        end = from + step < s->last ? from + step : s->last;
        double first[SOME][LANES], second[SOME][LANES];
        memset(first, 0, (size_t)(end - from) * sizeof first[0]);
        memset(second, 0, (size_t)(end - from) * sizeof second[0]);
        for (int64_t e = 0; e < s->examples; e++)
            for (int64_t c = from; c < end; c++)
                wide_sums(s->x + e * plane + c * s->inner, s->inner, s->inner <= SHORT && e + 1 < s->examples ? plane : SOON,
                          first[c - from], second[c - from]);
        for (int64_t c = from; c < end; c++) settle(s, c, total_of(first[c - from]), total_of(second[c - from]));
        for (int64_t e = s->examples - 1; e >= 0; e--)
            for (int64_t c = from; c < end; c++) wide_scaled_any(s, e * plane + c * s->inner, c, &how);
    }
    settled(&how);
}

WIDE static void wide_affine(const normalisation *s) {
    const int64_t plane = s->channels * s->inner;
    const writing how = writing_of(s->y, s->examples * plane, s->inner, 0);
    for (int64_t e = 0; e < s->examples; e++)
        for (int64_t c = s->first; c < s->last; c++) wide_scaled_any(s, e * plane + c * s->inner, c, &how);
    settled(&how);
}

/* kind: whether an activation behind the normalisation stops the gradient, or one behind a sum, or none. */
enum { FREE, LIMITED, SUMMED };

WIDE INLINE __m512 wide_passed(__m512 x, __m512 grad, __m512 scale, __m512 shift, __m512 low, __m512 high) {
    const __m512 y = _mm512_add_ps(_mm512_mul_ps(x, scale), shift);
    const __mmask16 above = _mm512_cmp_ps_mask(y, low, _CMP_GT_OQ);
    return _mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(above, y, high, _CMP_LT_OQ), grad);
}

WIDE INLINE __m512 wide_let_pass(__m512 grad, __m512 y, __m512 low, __m512 high) {
    const __mmask16 stops = _mm512_cmp_ps_mask(y, low, _CMP_LE_OQ) | _mm512_cmp_ps_mask(y, high, _CMP_GE_OQ);
    return _mm512_maskz_mov_ps((__mmask16)~stops, grad);
}

WIDE INLINE void wide_back_sums(const derivation *s, int64_t at, int64_t c, int64_t next, const int kind, double *first,
                                double *second) {
    const float *xs = s->x + at, *grads = s->grad + at, *ys = kind == SUMMED ? s->y + at : NULL;
    float *out = kind == SUMMED ? s->passed + at : NULL;
    const __m512 scale = _mm512_set1_ps(s->scale[c]), shift = _mm512_set1_ps(s->shift[c]);
    const __m512 low = _mm512_set1_ps(s->low), high = _mm512_set1_ps(s->high);
    sixteen sums = sixteen_of(first, second);
#define SUM(some)                                                                                                     \
    {                                                                                                                 \
        const __m512 x = _mm512_maskz_loadu_ps(some, xs + i);                                                         \
        __m512 grad = _mm512_maskz_loadu_ps(some, grads + i);                                                         \
        __builtin_prefetch(xs + i + next, 0, 2);                                                                      \
        __builtin_prefetch(grads + i + next, 0, 2);                                                                   \
        if (kind == LIMITED) grad = wide_passed(x, grad, scale, shift, low, high);                                    \
        if (kind == SUMMED) {                                                                                         \
            grad = wide_let_pass(grad, _mm512_maskz_loadu_ps(some, ys + i), low, high);                               \
            __builtin_prefetch(ys + i + next, 0, 2);                                                                  \
            _mm512_mask_storeu_ps(out + i, some, grad);                                                               \
        }                                                                                                             \
        add_sixteen(&sums, grad, x);                                                                                  \
    }
    EACH_LINE(s->inner, SUM);
#undef SUM
    put_sixteen(&sums, first, second);
}

WIDE INLINE __m512i wide_back(const derivation *s, int64_t at, int64_t c, float each, float rest, const writing *how,
                              const int kind, __m512i largest) {
    const float *xs = s->x + at, *grads = (kind == SUMMED ? s->passed : s->grad) + at;
    float *out = s->out + at;
    const __m512 scale = _mm512_set1_ps(s->scale[c]), shift = _mm512_set1_ps(s->shift[c]);
    const __m512 low = _mm512_set1_ps(s->low), high = _mm512_set1_ps(s->high);
    const __m512 times = _mm512_set1_ps(each), less = _mm512_set1_ps(rest);
    const __m512i bits = _mm512_set1_epi32(0x7fffffff);
#define DERIVE(some)                                                                                                  \
    {                                                                                                                 \
        const __m512 x = _mm512_maskz_loadu_ps(some, xs + i);                                                         \
        __m512 grad = _mm512_maskz_loadu_ps(some, grads + i);                                                         \
        if (kind == LIMITED) grad = wide_passed(x, grad, scale, shift, low, high);                                    \
        const __m512 both = _mm512_sub_ps(_mm512_sub_ps(grad, less), _mm512_mul_ps(x, times));                        \
        const __m512 value = _mm512_mul_ps(scale, both);                                                              \
        put_line(out + i, some, value, how);                                                                          \
        largest = _mm512_mask_max_epi32(largest, some, largest, _mm512_and_epi32(_mm512_castps_si512(value), bits));  \
    }
    EACH_LINE(s->inner, DERIVE);
#undef DERIVE
    return largest;
}

WIDE INLINE void wide_derive_kind(const derivation *s, const int kind) {
    const int64_t plane = s->channels * s->inner, step = at_a_time(s->examples, s->inner);
    const double count = (double)(s->examples * s->inner);
    const writing how = writing_of(s->out, s->examples * plane, s->inner, -plane);
    float each[SOME], rest[SOME];
    __m512i largest = _mm512_setzero_si512();
    for (int64_t from = s->first, end; from < s->last; from = end) {
        end = from + step < s->last ? from + step : s->last;
        double first[SOME][LANES], second[SOME][LANES];
        memset(first, 0, (size_t)(end - from) * sizeof first[0]);
        memset(second, 0, (size_t)(end - from) * sizeof second[0]);
        for (int64_t e = 0; e < s->examples; e++)
            for (int64_t c = from; c < end; c++)
                wide_back_sums(s, e * plane + c * s->inner, c, s->inner <= SHORT && e + 1 < s->examples ? plane : SOON,
                               kind, first[c - from], second[c - from]);
        for (int64_t c = from; c < end; c++)
            settle_back(s, c, count, total_of(first[c - from]), total_of(second[c - from]), each + c - from,
                        rest + c - from);
        for (int64_t e = s->examples - 1; e >= 0; e--)
            for (int64_t c = from; c < end; c++)
                largest = wide_back(s, e * plane + c * s->inner, c, each[c - from], rest[c - from], &how, kind, largest);
    }
    settled(&how);
    *s->largest = _mm512_reduce_max_epi32(largest);
}

WIDE static void wide_derive(const derivation *s) {
    if (s->y)
        wide_derive_kind(s, SUMMED);
    else if (s->limited)
        wide_derive_kind(s, LIMITED);
    else
        wide_derive_kind(s, FREE);
}
#endif

/* --- behind a product ---------------------------------------------------------------------------------------------- */
typedef struct {
    float *y; /* overwritten */
    int64_t examples, channels, inner;
    const float *bias; /* by channel; or none */
    float low, high;
    int64_t limited; /* whether y is cut to [low, high] */
    const float *scale, *shift; /* by channel: what a normalisation makes of it before it is cut; or none */
} finishing;

/* With all that there may be: what is missing changes nothing, not even the sign of a zero. */
INLINE void finish_channel(const finishing *s, float *restrict y, int64_t c, float low, float high) {
    const float bias = s->bias ? s->bias[c] : -0.0f;
    const float scale = s->scale ? s->scale[c] : 1.0f, shift = s->scale ? s->shift[c] : -0.0f;
    for (int64_t i = 0; i < s->inner; i++) y[i] = cut((y[i] + bias) * scale + shift, low, high);
}

INLINE void finish(const finishing *s) {
    const float low = s->limited ? s->low : -INFINITY, high = s->limited ? s->high : INFINITY;
    if (s->inner == 1 && s->bias && !s->scale) {
        for (int64_t e = 0; e < s->examples; e++) {
            float *restrict y = s->y + e * s->channels;
            const float *restrict bias = s->bias;
            for (int64_t c = 0; c < s->channels; c++) y[c] = cut(y[c] + bias[c], low, high);
        }
        return;
    }
    for (int64_t e = 0; e < s->examples; e++)
        for (int64_t c = 0; c < s->channels; c++) {
            float *restrict y = s->y + (e * s->channels + c) * s->inner;
            if (s->scale)
                finish_channel(s, y, c, low, high);
            else if (s->bias) {
                const float bias = s->bias[c];
                for (int64_t i = 0; i < s->inner; i++) y[i] = cut(y[i] + bias, low, high);
            } else
                for (int64_t i = 0; i < s->inner; i++) y[i] = cut(y[i], low, high);
        }
}

typedef struct {
    const float *grad;
    const float *y; /* what an activation gave: where it is not between low and high, no gradient passes; or none */
    float *out;     /* what passes; or none, if there is no activation */
    int64_t examples, channels, inner;
    float low, high;
    double *sums;     /* by channel, of what passes: zero before */
    int32_t *largest; /* bits of the largest magnitude of what passes */
    int64_t first, last; /* channels that are done here */
} returning;

/* One run of one channel. stops: a constant, whether there is an activation. */
INLINE void run_back(const returning *s, int64_t at, const int stops, double *restrict totals, int32_t *restrict most) {
    const float *restrict grad = s->grad + at, *restrict y = stops ? s->y + at : NULL;
    float *restrict out = stops ? s->out + at : NULL;
    const float low = s->low, high = s->high;
    double sums[LANES];
    int32_t largest[LANES];
    int64_t i = 0;
    memcpy(sums, totals, sizeof sums);
    memcpy(largest, most, sizeof largest);
    for (; i + LANES <= s->inner; i += LANES) {
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            const float value = stops ? let_pass(grad[i + l], y[i + l], low, high) : grad[i + l];
            const int32_t bits = magnitude(value);
            if (stops) out[i + l] = value;
            sums[l] += (double)value;
            largest[l] = bits > largest[l] ? bits : largest[l];
        }
    }
    for (int l = 0; i < s->inner; i++, l++) {
        const float value = stops ? let_pass(grad[i], y[i], low, high) : grad[i];
        const int32_t bits = magnitude(value);
        if (stops) out[i] = value;
        sums[l] += (double)value;
        largest[l] = bits > largest[l] ? bits : largest[l];
    }
    memcpy(totals, sums, sizeof sums);
    memcpy(most, largest, sizeof largest);
}

/* The channels of one example, where each has one position. */
INLINE int32_t row_back(const returning *s, int64_t at, const int stops, int32_t largest) {
    const float *restrict grad = s->grad + at, *restrict y = stops ? s->y + at : NULL;
    float *restrict out = stops ? s->out + at : NULL;
    double *restrict sums = s->sums;
    const float low = s->low, high = s->high;
    for (int64_t c = s->first; c < s->last; c++) {
        const float value = stops ? let_pass(grad[c], y[c], low, high) : grad[c];
        const int32_t bits = magnitude(value);
        if (stops) out[c] = value;
        sums[c] += (double)value;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

INLINE void come_back(const returning *s) {
    int32_t most[LANES] = {0}, largest = 0;
    for (int64_t e = 0; e < s->examples; e++) {
        const int64_t start = e * s->channels * s->inner;
        if (s->inner == 1) {
            largest = s->y ? row_back(s, start, 1, largest) : row_back(s, start, 0, largest);
            continue;
        }
        for (int64_t c = s->first; c < s->last; c++) {
            double sums[LANES] = {0.0};
            if (s->y)
                run_back(s, start + c * s->inner, 1, sums, most);
            else
                run_back(s, start + c * s->inner, 0, sums, most);
            s->sums[c] += total_of(sums);
        }
    }
    for (int l = 0; l < LANES; l++) largest = most[l] > largest ? most[l] : largest;
    *s->largest = largest;
}

#if defined(__x86_64__)
/* As run_back, for sums that begin at nothing. */
WIDE INLINE double wide_run_back(const returning *s, int64_t at, const writing *how, const int stops, __m512i *largest) {
    const float *grads = s->grad + at, *ys = stops ? s->y + at : NULL;
    float *out = stops ? s->out + at : NULL;
    const __m512 low = _mm512_set1_ps(s->low), high = _mm512_set1_ps(s->high);
    const __m512i bits = _mm512_set1_epi32(0x7fffffff);
    __m512d first = _mm512_setzero_pd(), second = first;
    __m512i most = *largest;
    double lanes[LANES];
#define BACK(some)                                                                                                    \
    {                                                                                                                 \
        __m512 grad = _mm512_maskz_loadu_ps(some, grads + i);                                                         \
        __builtin_prefetch(grads + i + SOON, 0, 2);                                                                   \
        if (stops) {                                                                                                  \
            __builtin_prefetch(ys + i + SOON, 0, 2);                                                                  \
            grad = wide_let_pass(grad, _mm512_maskz_loadu_ps(some, ys + i), low, high);                               \
            put_line(out + i, some, grad, how);                                                                       \
        }                                                                                                             \
        first = _mm512_add_pd(first, _mm512_cvtps_pd(_mm512_castps512_ps256(grad)));                                  \
        second = _mm512_add_pd(second, _mm512_cvtps_pd(_mm512_extractf32x8_ps(grad, 1)));                             \
        most = _mm512_max_epi32(most, _mm512_and_epi32(_mm512_castps_si512(grad), bits));                             \
    }
    EACH_LINE(s->inner, BACK);
#undef BACK
    *largest = most;
    _mm512_storeu_pd(lanes, first);
    _mm512_storeu_pd(lanes + 8, second);
    return total_of(lanes);
}

WIDE static void wide_come_back(const returning *s) {
    const int64_t plane = s->channels * s->inner;
    const writing how = writing_of(s->out, s->examples * plane, s->inner, 0);
    __m512i largest = _mm512_setzero_si512();
    if (s->inner == 1) {
        come_back(s);
        return;
    }
    for (int64_t e = 0; e < s->examples; e++)
        for (int64_t c = s->first; c < s->last; c++) {
            const int64_t at = e * plane + c * s->inner;
            s->sums[c] += s->y ? wide_run_back(s, at, &how, 1, &largest) : wide_run_back(s, at, &how, 0, &largest);
        }
    *s->largest = _mm512_reduce_max_epi32(largest);
    settled(&how);
}
#endif

/* --- max pooling --------------------------------------------------------------------------------------------------- */
typedef struct {
    const float *x;
    float *y;
    uint8_t *taps; /* of y: which tap of its window it is; or none */
    int64_t planes, height, width, out_height, out_width;
    int64_t kernel_height, kernel_width, step_height, step_width, before_height, before_width;
} pooling;

/* Which outputs of a row meet an input under this tap. */
INLINE void reach(int64_t tap, int64_t step, int64_t before, int64_t inputs, int64_t outputs, int64_t *first,
                  int64_t *end) {
    const int64_t shift = tap - before, left = inputs - 1 - shift;
    const int64_t last = left < 0 ? 0 : left / step + 1;
    *first = shift < 0 ? (-shift + step - 1) / step : 0;
    *end = last < outputs ? last : outputs;
}

/* The most usual one: two by two, in steps of two, without anything around. */
INLINE int by_twos(const pooling *s) {
    return s->kernel_height == 2 && s->kernel_width == 2 && s->step_height == 2 && s->step_width == 2 &&
           s->before_height == 0 && s->before_width == 0;
}

INLINE void pool_twos(const pooling *s) {
    int32_t where[TILE];
    for (int64_t p = 0; p < s->planes; p++)
        for (int64_t row = 0; row < s->out_height; row++) {
            const float *restrict upper = s->x + (p * s->height + 2 * row) * s->width, *restrict lower = upper + s->width;
            const int64_t to = (p * s->out_height + row) * s->out_width;
            float *restrict y = s->y + to;
#pragma omp simd
            for (int64_t c = 0; c < s->out_width; c++) {
                const float values[3] = {upper[2 * c + 1], lower[2 * c], lower[2 * c + 1]};
                float best = upper[2 * c];
                int32_t tap = 0;
#pragma GCC unroll 3
                for (int32_t i = 0; i < 3; i++) {
                    const int taken = values[i] > best || values[i] != values[i];
                    best = taken ? values[i] : best;
                    tap = taken ? i + 1 : tap;
                }
                y[c] = best;
                where[c] = tap;
            }
            if (s->taps)
                for (int64_t c = 0; c < s->out_width; c++) s->taps[to + c] = (uint8_t)where[c];
        }
}

INLINE void pool(const pooling *s) {
    float best[TILE];
    int32_t where[TILE];
    if (by_twos(s)) {
        pool_twos(s);
        return;
    }
    for (int64_t p = 0; p < s->planes; p++)
        for (int64_t row = 0; row < s->out_height; row++) {
            const float *x = s->x + p * s->height * s->width;
            const int64_t to = (p * s->out_height + row) * s->out_width;
            for (int64_t c = 0; c < s->out_width; c++) {
                best[c] = -INFINITY;
                where[c] = 255; /* none yet: the first one is taken whatever it is */
            }
            for (int64_t i = 0; i < s->kernel_height; i++) {
                const int64_t from = row * s->step_height + i - s->before_height;
                if (from < 0 || from >= s->height) continue;
                for (int64_t j = 0; j < s->kernel_width; j++) {
                    const int32_t tap = (int32_t)(i * s->kernel_width + j);
                    const float *restrict line = x + from * s->width + j - s->before_width;
                    int64_t first, end;
                    reach(j, s->step_width, s->before_width, s->width, s->out_width, &first, &end);
#define STEP(step)                                                                                                    \
    for (int64_t c = first; c < end; c++) {                                                                           \
        const float value = line[c * (step)];                                                                         \
        const int taken = value > best[c] || value != value || where[c] == 255;                                       \
        best[c] = taken ? value : best[c];                                                                            \
        where[c] = taken ? tap : where[c];                                                                            \
    }
                    if (s->step_width == 1)
                        STEP(1)
                    else if (s->step_width == 2)
                        STEP(2)
                    else
                        STEP(s->step_width)
                }
            }
            memcpy(s->y + to, best, (size_t)s->out_width * sizeof(float));
            if (s->taps)
                for (int64_t c = 0; c < s->out_width; c++) s->taps[to + c] = (uint8_t)where[c];
        }
}

/* Here x is the gradient of y, and y the gradient of x. No two windows meet: each number is written once. The bits of a
 * gradient are cut out, two rows apart, in loops that a compiler makes vectors of; a choice between floats is none. */
INLINE void unpool_twos(const pooling *s) {
    const int64_t inner = 2 * s->out_width;
    int32_t bits[TILE], where[TILE], upper[2 * TILE], lower[2 * TILE];
    for (int64_t p = 0; p < s->planes; p++) {
        for (int64_t row = 0; row < s->out_height; row++) {
            const int64_t at = (p * s->out_height + row) * s->out_width;
            float *to = s->y + (p * s->height + 2 * row) * s->width;
            for (int64_t c = 0; c < s->out_width; c++) {
                const float value = 0.0f + s->x[at + c]; /* as if it were added to nothing: -0 becomes 0 */
                memcpy(bits + c, &value, sizeof value);
            }
            for (int64_t c = 0; c < s->out_width; c++) where[c] = s->taps[at + c];
            for (int64_t c = 0; c < s->out_width; c++) {
                upper[2 * c] = bits[c] & -(where[c] == 0);
                upper[2 * c + 1] = bits[c] & -(where[c] == 1);
            }
            for (int64_t c = 0; c < s->out_width; c++) {
                lower[2 * c] = bits[c] & -(where[c] == 2);
                lower[2 * c + 1] = bits[c] & -(where[c] == 3);
            }
            memcpy(to, upper, (size_t)inner * sizeof(float));
            memcpy(to + s->width, lower, (size_t)inner * sizeof(float));
            if (inner < s->width) to[inner] = to[s->width + inner] = 0.0f;
        }
        if (2 * s->out_height < s->height)
            memset(s->y + (p * s->height + s->height - 1) * s->width, 0, (size_t)s->width * sizeof(float));
    }
}

/* The same for any window. */
INLINE void unpool(const pooling *s) {
    if (by_twos(s) && s->out_width >= LANES) { /* shorter rows are no faster in vectors */
        unpool_twos(s);
        return;
    }
    memset(s->y, 0, (size_t)(s->planes * s->height * s->width) * sizeof(float));
    for (int64_t p = 0; p < s->planes; p++)
        for (int64_t row = 0; row < s->out_height; row++) {
            const int64_t at = (p * s->out_height + row) * s->out_width;
            for (int64_t c = 0; c < s->out_width; c++) {
                const int64_t tap = s->taps[at + c], i = tap / s->kernel_width, j = tap - i * s->kernel_width;
                const int64_t from = row * s->step_height + i - s->before_height;
                const int64_t column = c * s->step_width + j - s->before_width;
                s->y[(p * s->height + from) * s->width + column] += s->x[at + c];
            }
        }
}

#if defined(__x86_64__)
/* --- the same, a line of sixteen outputs at a time ------------------------------------------------------------------- */
WIDE INLINE __m512i evens(void) {
    return _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}

/* The numbers of two lines in turns. */
WIDE INLINE __m512 woven(__m512 even, __m512 odd, const int half) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(even, half ? _mm512_add_epi32(first, _mm512_set1_epi32(8)) : first, odd);
}

/* The larger of what there is and of another tap, where that is met; the first if there is none yet, or no number. */
WIDE INLINE void take_larger(__m512 value, int32_t tap, __mmask16 met, __mmask16 none, __m512 *best, __m512i *where) {
    const __mmask16 larger = _mm512_cmp_ps_mask(value, *best, _CMP_GT_OQ) | _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __mmask16 taken = met & (larger | none);
    *best = _mm512_mask_mov_ps(*best, taken, value);
    *where = _mm512_mask_mov_epi32(*where, taken, _mm512_set1_epi32(tap));
}

WIDE INLINE void wide_pool_twos(const pooling *s) {
    const __m512i even = evens(), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int64_t p = 0; p < s->planes; p++)
        for (int64_t row = 0; row < s->out_height; row++) {
            const float *upper = s->x + (p * s->height + 2 * row) * s->width, *lower = upper + s->width;
            const int64_t to = (p * s->out_height + row) * s->out_width;
            for (int64_t c = 0; c < s->out_width; c += LANES) {
                const __mmask16 some = rest_of(c, s->out_width), left = rest_of(2 * c, 2 * s->out_width);
                const __mmask16 right = 2 * c + LANES < 2 * s->out_width ? rest_of(2 * c + LANES, 2 * s->out_width) : 0;
                for (int64_t line = 0; line < 2 * LANES; line += LANES) { /* two pairs of rows further on */
                    __builtin_prefetch(upper + 4 * s->width + 2 * c + line, 0, 2);
                    __builtin_prefetch(lower + 4 * s->width + 2 * c + line, 0, 2);
                }
                const __m512 a = _mm512_maskz_loadu_ps(left, upper + 2 * c);
                const __m512 b = _mm512_maskz_loadu_ps(right, upper + 2 * c + LANES);
                const __m512 d = _mm512_maskz_loadu_ps(left, lower + 2 * c);
                const __m512 e = _mm512_maskz_loadu_ps(right, lower + 2 * c + LANES);
                __m512 best = _mm512_permutex2var_ps(a, even, b);
                __m512i where = _mm512_setzero_si512();
                take_larger(_mm512_permutex2var_ps(a, odd, b), 1, 0xFFFF, 0, &best, &where);
                take_larger(_mm512_permutex2var_ps(d, even, e), 2, 0xFFFF, 0, &best, &where);
                take_larger(_mm512_permutex2var_ps(d, odd, e), 3, 0xFFFF, 0, &best, &where);
                _mm512_mask_storeu_ps(s->y + to + c, some, best);
                if (s->taps) _mm512_mask_cvtepi32_storeu_epi8(s->taps + to + c, some, where);
            }
        }
}

/* Of what a tap meets, for a line of outputs: which numbers of one line, or two, of a row, and which outputs. */
typedef struct {
    __mmask16 left, right, met;
} meeting;

/* The lanes from first on, up to end. */
INLINE __mmask16 lanes_of(int64_t first, int64_t end) {
    const int64_t from = first < 0 ? 0 : first, to = end < LANES ? end : LANES;
    return from < to ? (__mmask16)((1u << to) - (1u << from)) : 0;
}

INLINE meeting meeting_of(const pooling *s, int64_t start, int64_t tap, const int step) {
    const int64_t column = start * step + tap - s->before_width, left = s->width - column;
    const meeting found = {lanes_of(-column, left), step == 2 ? lanes_of(-column - LANES, left - LANES) : 0,
                           step == 2 ? lanes_of((1 - column) >> 1, (left + 1) >> 1) : lanes_of(-column, left)};
    return found;
}

/* A line of outputs, down the rows of a plane. wide: a constant where it is usual. */
WIDE INLINE void wide_pool_line(const pooling *s, int64_t plane, int64_t start, const int step, const int64_t wide) {
    const __m512i even = evens(), none = _mm512_set1_epi32(255);
    const __mmask16 some = rest_of(start, s->out_width);
    meeting met[MOST_TAPS];
    for (int64_t j = 0; j < wide; j++) met[j] = meeting_of(s, start, j, step);
    for (int64_t row = 0; row < s->out_height; row++) {
        const int64_t above = row * s->step_height - s->before_height;
        const int64_t to = (plane * s->out_height + row) * s->out_width + start;
        __m512 best = _mm512_set1_ps(-INFINITY);
        __m512i where = none;
        for (int64_t i = above < 0 ? -above : 0; i < s->kernel_height && above + i < s->height; i++) {
            const float *x = s->x + (plane * s->height + above + i) * s->width + start * step - s->before_width;
            for (int64_t j = 0; j < wide; j++) {
                __m512 value = _mm512_maskz_loadu_ps(met[j].left, x + j);
                if (step == 2)
                    value = _mm512_permutex2var_ps(value, even, _mm512_maskz_loadu_ps(met[j].right, x + j + LANES));
                take_larger(value, (int32_t)(i * wide + j), met[j].met, _mm512_cmpeq_epi32_mask(where, none), &best,
                            &where);
            }
        }
        _mm512_mask_storeu_ps(s->y + to, some, best);
        if (s->taps) _mm512_mask_cvtepi32_storeu_epi8(s->taps + to, some, where);
    }
}

WIDE INLINE void wide_pool_steps(const pooling *s, const int step) {
    for (int64_t p = 0; p < s->planes; p++)
        for (int64_t start = 0; start < s->out_width; start += LANES)
            s->kernel_width == 3 ? wide_pool_line(s, p, start, step, 3) : wide_pool_line(s, p, start, step, s->kernel_width);
}

WIDE static void wide_pool(const pooling *s) {
    if (by_twos(s))
        wide_pool_twos(s);
    else if (s->step_width == 1)
        wide_pool_steps(s, 1);
    else if (s->step_width == 2)
        wide_pool_steps(s, 2);
    else
        pool(s);
}

WIDE INLINE void wide_unpool_row(const pooling *s, int64_t at, float *to, int32_t first, const writing *how) {
    for (int64_t c = 0; c < s->out_width; c += LANES) {
        const __mmask16 some = rest_of(c, s->out_width);
        __builtin_prefetch(s->x + at + c + SOON, 0, 2);
        const __m512 grad = _mm512_add_ps(_mm512_setzero_ps(), _mm512_maskz_loadu_ps(some, s->x + at + c));
        const __m512i where = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(some, s->taps + at + c));
        const __m512 even = _mm512_maskz_mov_ps(_mm512_cmpeq_epi32_mask(where, _mm512_set1_epi32(first)), grad);
        const __m512 odd = _mm512_maskz_mov_ps(_mm512_cmpeq_epi32_mask(where, _mm512_set1_epi32(first + 1)), grad);
        put_line(to + 2 * c, rest_of(2 * c, 2 * s->out_width), woven(even, odd, 0), how);
        if (2 * c + LANES < 2 * s->out_width)
            put_line(to + 2 * c + LANES, rest_of(2 * c + LANES, 2 * s->out_width), woven(even, odd, 1), how);
    }
    if (2 * s->out_width < s->width) to[2 * s->out_width] = 0.0f;
}

WIDE static void wide_unpool(const pooling *s) {
    if (!by_twos(s)) {
        unpool(s);
        return;
    }
    const writing how = writing_of(s->y, s->planes * s->height * s->width, s->width, SOON);
    for (int64_t p = 0; p < s->planes; p++) {
        float *plane = s->y + p * s->height * s->width;
        for (int64_t row = 0; row < s->out_height; row++) {
            const int64_t at = (p * s->out_height + row) * s->out_width;
            wide_unpool_row(s, at, plane + 2 * row * s->width, 0, &how);
            wide_unpool_row(s, at, plane + (2 * row + 1) * s->width, 2, &how);
        }
        if (2 * s->out_height < s->height)
            memset(plane + (s->height - 1) * s->width, 0, (size_t)s->width * sizeof(float));
    }
    settled(&how);
}
#endif

/* --- once for any processor, once for AVX2, once for AVX-512 -------------------------------------------------------- */
#define EVERY(apply, more)                                                                                            \
    apply(normalise, normalisation, more) apply(affine, normalisation, more) apply(derive, derivation, more)          \
        apply(by_running, normalisation, more)                                                                        \
        apply(pool, pooling, more) apply(unpool, pooling, more) apply(finish, finishing, more)                    \
        apply(come_back, returning, more)
#define PLAIN(name, kind, _) static void name##_plain(const kind *s) { name(s); }
#define AVX2(name, kind, _) __attribute__((target("avx2"))) static void name##_avx2(const kind *s) { name(s); }
#define AVX512(name, kind, _)                                                                                         \
    __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512"))) static void name##_avx512(  \
        const kind *s) {                                                                                              \
        name(s);                                                                                                      \
    }
#define HELD(name, kind, _) static void (*chosen_##name)(const kind *) = name##_plain;
#define CHOSEN(name, kind, variant) chosen_##name = name##_##variant;

EVERY(PLAIN, )
#if defined(__x86_64__)
EVERY(AVX2, )
EVERY(AVX512, )
#endif
EVERY(HELD, )

__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        EVERY(CHOSEN, avx2)
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
        EVERY(CHOSEN, avx512)
        chosen_normalise = wide_normalise;
        chosen_affine = wide_affine;
        chosen_derive = wide_derive;
        chosen_come_back = wide_come_back;
        chosen_pool = wide_pool;
        chosen_unpool = wide_unpool;
    }
#endif
}

/* The number in the names is that of this interface, so that a library with another one is not mistaken for this. The
 * others of each are for tests: without vector instructions of this processor, and with those of AVX2. */
#define SHOWN(name, kind, _)                                                                                          \
    void darknight_##name##_4(const kind *s) { chosen_##name(s); }                                                    \
    void darknight_##name##_plain_4(const kind *s) { name##_plain(s); }
#define SHOWN_AVX2(name, kind, _)                                                                                     \
    void darknight_##name##_avx2_4(const kind *s) { name##_avx2(s); }
EVERY(SHOWN, )
#if defined(__x86_64__)
EVERY(SHOWN_AVX2, )
#endif
