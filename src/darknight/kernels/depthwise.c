/* Depthwise convolution in float32, forward and backward: every channel with a kernel of its own. Forward, with what
 * stands behind it.
 *
 * Every tensor is (example, channel, row, column), without gaps; a plane is one channel of one example. A few rows at a
 * time are laid out with zeros around them, in lines that are `pitch` numbers apart. With a step of two, rows and columns
 * are laid out by parity, each in a phase of its own. Then an output is a sum over taps of which each lies at a fixed
 * distance from it, and rows, gaps and tails are one loop without a border; what it computes in gaps is not used.
 * Where there is AVX-512, 3x3 taps are read from x itself, and its gradient is made of that of y itself: what is outside
 * a row is masked.
 *
 * Each output is a sum in the order of its taps, in float. The gradient of a weight is a sum in float over a few rows, in
 * eight lanes, and in double over those; of 3x3 taps in sixteen lanes, by columns, of which two are added first. No product
 * is fused with a sum, so every variant gives the same bits. Planes are written from the first to the last, so a row may
 * overwrite what stands behind it, where the tensor goes on that far.
 * Nothing is checked here: compiled_depthwise.py does that.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 8
#define SLACK 16      /* numbers that may be read or written behind a row */
#define BEHIND 32     /* zeros behind the last line, which is as far as a loop reads */
#define MOST_TAPS 49
#define MOST_OUT 1024 /* numbers that are computed at a time */
#define TOGETHER 9    /* taps at a time */
#define ROWS 4        /* rows at a time, if a kernel is 3x3 */
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const float *x, *weight, *bias, *grad;         /* bias: or none */
    float *y, *grad_x, *grad_weight, *grad_bias;   /* gradients: or none */
    float *lines, *held;                           /* room, all zero, for x and for grad */
    double *sums;                                  /* room, all zero: (channel, tap and one more, lane) */
    int64_t planes, channels, height, width, out_height, out_width;
    int64_t kernel_height, kernel_width, step_height, step_width, before_height, before_width;
    int64_t pitch, rows, together, room; /* rows of together planes are laid out at a time; room of a phase of one */
    const float *scale, *shift; /* by channel: what a normalisation makes of y; or none */
    float low, high;
    int64_t limited; /* whether y is then cut to [low, high] */
} convolution;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* n zeros, and up to LANES - 1 more. */
INLINE void nought(float *to, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) memset(to + i, 0, LANES * sizeof(float));
}

/* --- rows to lines and back; loose: up to SLACK numbers more may be read and written -------------------------------- */
INLINE void moved(const float *restrict from, float *restrict to, int64_t n, int loose) {
    if (loose)
        for (int64_t i = 0; i < n; i += LANES) memcpy(to + i, from + i, LANES * sizeof(float));
    else
        memcpy(to, from, (size_t)n * sizeof(float));
}

INLINE void parted(const float *restrict from, float *restrict even, float *restrict odd, int64_t n, int loose) {
    if (loose) {
        const int64_t pairs = up((n + 1) / 2);
#pragma omp simd
        for (int64_t i = 0; i < pairs; i++) {
            even[i] = from[2 * i];
            odd[i] = from[2 * i + 1];
        }
    } else {
        for (int64_t i = 0; i < n; i += 2) even[i / 2] = from[i];
        for (int64_t i = 1; i < n; i += 2) odd[i / 2] = from[i];
    }
}

INLINE void woven(const float *restrict even, const float *restrict odd, float *restrict to, int64_t n, int loose) {
    if (loose) {
        const int64_t pairs = up((n + 1) / 2);
#pragma omp simd
        for (int64_t i = 0; i < pairs; i++) {
            to[2 * i] = even[i];
            to[2 * i + 1] = odd[i];
        }
    } else {
        for (int64_t i = 0; i < n; i += 2) to[i] = even[i / 2];
        for (int64_t i = 1; i < n; i += 2) to[i] = odd[i / 2];
    }
}

/* The rows of x that some rows of y are made of, by phases, in the order in which they lie in memory: it is read several
 * times as fast in that order. Steps are 1 or 2: to divide by them is to shift. */
INLINE void lay_lines(const convolution *s, int64_t plane, int64_t row, int64_t here, float *lines) {
    const float *x = s->x + plane * s->height * s->width, *end = s->x + s->planes * s->height * s->width;
    const int64_t tall = s->step_height - 1, wide = s->step_width - 1;
    const int64_t first = s->before_width & wide, skip = s->before_width >> wide;
    const int64_t rows = ((here - 1) << tall) + s->kernel_height, start = (row << tall) - s->before_height;
    const int64_t above = start < 0 ? least(rows, -start) : 0, there = least(rows, s->height - start);
    const int64_t evens = (s->width + 1) / 2, odds = s->width / 2;
    const int loose = end - (x + (start + rows) * s->width) >= SLACK;
#define LINE(u) (lines + (((u) & tall) << wide) * s->room + ((u) >> tall) * s->pitch)
    for (int64_t u = 0; u < above; u++)
        for (int64_t j = 0; j <= wide; j++) nought(LINE(u) + j * s->room, s->pitch);
    for (int64_t u = above; u < there; u++) {
        float *to = LINE(u) + skip;
        const float *from = x + (start + u) * s->width;
        if (wide) {
            float *even = to + first * s->room, *odd = to + (1 - first) * s->room + first;
            parted(from, even, odd, s->width, loose);
            nought(even + evens, s->pitch - evens);
            nought(odd + odds, s->pitch - odds);
        } else {
            moved(from, to, s->width, loose);
            nought(to + s->width, s->pitch - s->width);
        }
    }
    for (int64_t u = there > above ? there : above; u < rows + s->step_height; u++)
        for (int64_t j = 0; j <= wide; j++) nought(LINE(u) + j * s->room, u < rows ? s->pitch : BEHIND);
#undef LINE
}

/* Some rows of the gradient of y, and those before them that a gradient of x is made of. */
INLINE void lay_held(const convolution *s, int64_t plane, int64_t row, int64_t here, int64_t halo, float *held) {
    const float *grad = s->grad + plane * s->out_height * s->out_width;
    const float *end = s->grad + s->planes * s->out_height * s->out_width;
    const int64_t rows = here + halo, start = row - halo, above = start < 0 ? least(rows, -start) : 0;
    const int64_t there = least(rows, s->out_height - start);
    const float *from = grad + start * s->out_width;
    const int loose = end - (from + there * s->out_width) >= SLACK;
    nought(held, above * s->pitch);
    for (int64_t r = above; r < there; r++) {
        moved(from + r * s->out_width, held + r * s->pitch, s->out_width, loose);
        nought(held + r * s->pitch + s->out_width, s->pitch - s->out_width);
    }
    const int64_t done = (there > above ? there : above) * s->pitch;
    nought(held + done, rows * s->pitch - done + BEHIND);
}

/* --- sums over taps ------------------------------------------------------------------------------------------------- */
/* to[i] = start + sum of by[t] * from[at[t] + i]; with `more`, what was there takes the place of start. */
INLINE void part_weighed(const float *from, const int64_t *at, const float *by, int taps, int more, float start,
                         float *restrict to, int64_t n) {
    const float *tap[TOGETHER];
    float weight[TOGETHER];
    for (int t = 0; t < taps; t++) {
        tap[t] = from + at[t];
        weight[t] = by[t];
    }
    n = n / LANES * LANES; /* it is one: so the compiler knows too */
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float value = more ? to[i] : start;
#pragma GCC unroll 9
        for (int t = 0; t < taps; t++) value += weight[t] * tap[t][i];
        to[i] = value;
    }
}

INLINE void weighed(const float *from, const int64_t *at, const float *by, int64_t taps, float start,
                    float *restrict to, int64_t n) {
    if (taps == 0) nought(to, n); /* a phase that no tap meets */
    for (int64_t t = 0; t < taps; t += TOGETHER)
        switch (least(taps - t, TOGETHER)) {
#define CASE(k)                                                                                                       \
    case k:                                                                                                           \
        if (t)                                                                                                        \
            part_weighed(from, at + t, by + t, k, 1, start, to, n);                                                   \
        else                                                                                                          \
            part_weighed(from, at + t, by + t, k, 0, start, to, n);                                                   \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9)
        }
}

/* The same for 3x3 taps that lie side by side, and for ROWS rows: a number that is read serves three of them. */
INLINE void nine_weighed(const float *from, int64_t pitch, const float *by, float start, float *restrict to,
                         int64_t n) {
    float weight[9];
    for (int t = 0; t < 9; t++) weight[t] = by[t];
    n = n / LANES * LANES;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float value[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) value[r] = start;
#pragma GCC unroll 6
        for (int line = 0; line < ROWS + 2; line++) {
#pragma GCC unroll 3
            for (int j = 0; j < 3; j++) {
                const float x = from[line * pitch + j + i];
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++)
                    if (line - r >= 0 && line - r < 3) value[r] += weight[(line - r) * 3 + j] * x;
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) to[r * pitch + i] = value[r];
    }
}

INLINE void rows_weighed(const float *from, int64_t pitch, const int64_t *at, const float *by, int64_t taps,
                         float start, float *restrict to, int64_t rows, int64_t columns) {
    int64_t r = 0;
    if (taps == 9 && at[8] - at[0] == 2 * pitch + 2)
        for (; r + ROWS <= rows; r += ROWS)
            nine_weighed(from + at[0] + r * pitch, pitch, by, start, to + r * pitch, up(columns));
    if (r < rows)
        weighed(from + r * pitch, at, by, taps, start, to + r * pitch, up((rows - r - 1) * pitch + columns));
}

/* Sums of grad[i] * from[at[t] + i], in lanes. */
INLINE void part_products(const float *grad, const float *from, const int64_t *at, int taps, int64_t n,
                          float *restrict sums) {
    float lanes[TOGETHER][LANES];
    const float *tap[TOGETHER];
    for (int t = 0; t < taps; t++) tap[t] = from + at[t];
    memset(lanes, 0, sizeof lanes);
    for (int64_t i = 0; i < n; i += LANES) {
#pragma GCC unroll 9
        for (int t = 0; t < taps; t++) {
#pragma omp simd
            for (int l = 0; l < LANES; l++) lanes[t][l] += grad[i + l] * tap[t][i + l];
        }
    }
    memcpy(sums, lanes, (size_t)taps * sizeof lanes[0]);
}

INLINE void add_products(const float *grad, const float *from, const int64_t *at, int64_t taps, int64_t n,
                         double *restrict sums) {
    float part[MOST_TAPS * LANES];
    int64_t t = 0;
    if (taps % 5)
        for (; taps - t >= 9; t += 9) part_products(grad, from, at + t, 9, n, part + t * LANES);
    for (; taps - t >= 5; t += 5) part_products(grad, from, at + t, 5, n, part + t * LANES);
    for (; t < taps; t++) part_products(grad, from, at + t, 1, n, part + t * LANES);
    for (int64_t i = 0; i < taps * LANES; i++) sums[i] += (double)part[i];
}

/* The same for 3x3 taps, of a few rows that are `pitch` apart: lanes by columns, sixteen of them, lines of columns from left
 * to right and down the rows. The last of the ten is of grad itself, for a bias. */
typedef float eight __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t eight_bits __attribute__((vector_size(LANES * sizeof(float))));

/* Some rows of one line, to sums that stay in registers. inside: what of it is in a row; what is behind that is another row,
 * of anything. all: a constant, all of it. */
INLINE void add_line(const float *held, const float *from, const int64_t *at, int64_t pitch, int64_t rows,
                     const eight_bits *inside, const int all, eight *restrict sum) {
    eight grad, x;
    for (int64_t r = 0; r < rows; r++) {
        memcpy(&grad, held + r * pitch, sizeof grad);
        if (!all) grad = (eight)((eight_bits)grad & *inside);
#pragma GCC unroll 9
        for (int t = 0; t < 9; t++) {
            memcpy(&x, from + at[t] + r * pitch, sizeof x);
            if (!all) x = (eight)((eight_bits)x & *inside);
            sum[t] += grad * x;
        }
        sum[9] += grad;
    }
}

INLINE void add_nine(const float *held, const float *from, const int64_t *at, int64_t pitch, int64_t rows,
                     int64_t columns, double *restrict sums) {
    float lanes[2][10][LANES];
    for (int half = 0; half < 2; half++) {
        eight sum[10] = {{0.0f}};
        eight_bits inside = {0};
        int64_t start = half * LANES;
        for (; start + LANES <= columns; start += 2 * LANES)
            add_line(held + start, from + start, at, pitch, rows, &inside, 1, sum);
        for (int l = 0; l < LANES; l++) inside[l] = start + l < columns ? -1 : 0;
        if (start < columns) add_line(held + start, from + start, at, pitch, rows, &inside, 0, sum);
        memcpy(lanes[half], sum, sizeof sum);
    }
    for (int t = 0; t < 10; t++)
        for (int l = 0; l < LANES; l++) sums[t * LANES + l] += (double)(lanes[0][t][l] + lanes[1][t][l]);
}

INLINE void add_numbers(const float *grad, int64_t n, double *restrict sums) {
    float part[LANES] = {0.0f};
    for (int64_t i = 0; i < n; i += LANES)
        for (int l = 0; l < LANES; l++) part[l] += grad[i + l];
    for (int l = 0; l < LANES; l++) sums[l] += (double)part[l];
}

/* --- forward -------------------------------------------------------------------------------------------------------- */
/* What is done to a channel of y before it is written: each step is rounded as if alone, and what is missing changes
 * nothing, not even the sign of a zero. */
typedef struct {
    float scale, shift, low, high;
} finish;

INLINE float finished(float value, const finish *end) {
    const float sum = value * end->scale + end->shift, above = sum < end->low ? end->low : sum;
    return above > end->high ? end->high : above;
}

INLINE finish finish_of(const convolution *s, int64_t c) {
    const finish end = {s->scale ? s->scale[c] : 1.0f, s->scale ? s->shift[c] : -0.0f,
                        s->limited ? s->low : -INFINITY, s->limited ? s->high : INFINITY};
    return end;
}

/* As moved. */
INLINE void moved_finished(const float *restrict from, float *restrict to, int64_t n, int loose, const finish *end) {
    const finish by = *end;
    if (loose) {
        n = up(n);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) to[i] = finished(from[i], &by);
    } else
        for (int64_t i = 0; i < n; i++) to[i] = finished(from[i], &by);
}

/* Where in the lines the taps of the first output lie. */
INLINE void place_taps(const convolution *s, int64_t *phase, int64_t *away) {
    for (int64_t i = 0, t = 0; i < s->kernel_height; i++)
        for (int64_t j = 0; j < s->kernel_width; j++, t++) {
            phase[t] = i % s->step_height * s->step_width + j % s->step_width;
            away[t] = i / s->step_height * s->pitch + j / s->step_width;
        }
}

INLINE void convolve(const convolution *s) {
    const int64_t taps = s->kernel_height * s->kernel_width, size = s->room * s->step_height * s->step_width;
    const float *end = s->y + s->planes * s->out_height * s->out_width;
    int64_t phase[MOST_TAPS], at[MOST_TAPS];
    float out[MOST_OUT + BEHIND];
    place_taps(s, phase, at);
    for (int64_t t = 0; t < taps; t++) at[t] += phase[t] * s->room;
    for (int64_t from = 0; from < s->planes; from += s->together) {
        const int64_t some = least(s->together, s->planes - from);
        for (int64_t row = 0; row < s->out_height; row += s->rows) {
            const int64_t here = least(s->rows, s->out_height - row);
            for (int64_t p = 0; p < some; p++) lay_lines(s, from + p, row, here, s->lines + p * size);
            for (int64_t p = 0, c = from % s->channels; p < some; p++, c = c + 1 < s->channels ? c + 1 : 0) {
                float *y = s->y + ((from + p) * s->out_height + row) * s->out_width;
                rows_weighed(s->lines + p * size, s->pitch, at, s->weight + c * taps, taps, s->bias ? s->bias[c] : 0.0f,
                             out, here, s->out_width);
                const int loose = end - (y + (here - 1) * s->out_width) >= s->out_width + SLACK;
                if (s->scale || s->limited) {
                    const finish end = finish_of(s, c);
                    for (int64_t r = 0; r < here; r++)
                        moved_finished(out + r * s->pitch, y + r * s->out_width, s->out_width, loose, &end);
                } else
                    for (int64_t r = 0; r < here; r++)
                        moved(out + r * s->pitch, y + r * s->out_width, s->out_width, loose);
            }
        }
    }
}

#if defined(__x86_64__)
/* --- forward, 3x3, a line of the cache at a time: straight from where x is, without any room --------------------------- */
#define WIDE __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw")))
#define LINE 16
#define BAND 8 /* rows of y at a time, from left to right: a row of x that is read serves three of them, or two */
#define SOON 4 /* bands further on, x is fetched meanwhile, */
#define NEXT 2 /* and y: beyond the end that does nothing */

/* Which of a line's numbers, from this column on, are in a row. */
WIDE INLINE __mmask16 inside(int64_t column, int64_t width) {
    const int64_t first = column < 0 ? -column : 0, left = width - column;
    if (first >= LINE || left <= first) return 0;
    return (__mmask16)((left < LINE ? (1u << left) - 1 : 0xFFFFu) & (0xFFFFu << first));
}

/* What three taps side by side meet in one row of x, for a line of y. */
typedef struct {
    __m512 at[3];
} met;

/* Where: the column of the first tap, and what of the lines from there on is in the row. */
typedef struct {
    int64_t column;
    __mmask16 inside[4];
    int64_t further; /* numbers to what is fetched meanwhile */
} span;

WIDE INLINE span span_of(const convolution *s, int64_t start, int64_t band, const int step) {
    const int64_t column = start * step - s->before_width;
    span found = {column, {0}, SOON * band * step * s->width};
    for (int k = 0; k < 4; k++) /* three lines, each a column further; or two, and two that are two columns further */
        found.inside[k] = inside(column + (step == 1 ? k : k % 2 * LINE + k / 2 * 2), s->width);
    return found;
}

WIDE INLINE met met_in(const convolution *s, const float *plane, int64_t row, const span *w, const int step) {
    met found;
    if (row < 0 || row >= s->height) {
#pragma GCC unroll 3
        for (int j = 0; j < 3; j++) found.at[j] = _mm512_setzero_ps();
        return found;
    }
    const float *x = plane + row * s->width + w->column;
    __builtin_prefetch(x + w->further, 0, 2);
    if (step == 2) __builtin_prefetch(x + w->further + LINE, 0, 2);
    if (step == 1) {
#pragma GCC unroll 3
        for (int j = 0; j < 3; j++) found.at[j] = _mm512_maskz_loadu_ps(w->inside[j], x + j);
        return found;
    }
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512 first = _mm512_maskz_loadu_ps(w->inside[0], x), second = _mm512_maskz_loadu_ps(w->inside[1], x + LINE);
    const __m512 third = _mm512_maskz_loadu_ps(w->inside[2], x + 2);
    const __m512 fourth = _mm512_maskz_loadu_ps(w->inside[3], x + 2 + LINE);
    found.at[0] = _mm512_permutex2var_ps(first, even, second);
    found.at[1] = _mm512_permutex2var_ps(first, odd, second);
    found.at[2] = _mm512_permutex2var_ps(third, even, fourth);
    return found;
}

/* Some rows of y, of one line of columns. */
WIDE INLINE void wide_rows(const convolution *s, const float *x, float *y, const __m512 *weight, __m512 bias,
                           const finish *end, int64_t row, int64_t band, int64_t start, const int step, const int ends) {
    const span w = span_of(s, start, band, step);
    const int64_t here = least(band, s->out_height - row), left = s->out_width - start;
    const int64_t above = row * step - s->before_height;
    const __mmask16 some = left < LINE ? (__mmask16)((1u << left) - 1) : 0xFFFF;
    met lines[3];
#pragma GCC unroll 3
    for (int i = 0; i < 3 - step; i++) lines[i] = met_in(s, x, above + i, &w, step);
    for (int64_t r = 0; r < here; r++) {
#pragma GCC unroll 3
        for (int i = 3 - step; i < 3; i++) lines[i] = met_in(s, x, above + r * step + i, &w, step);
        __m512 value = bias;
#pragma GCC unroll 9
        for (int t = 0; t < 9; t++) value = _mm512_add_ps(value, _mm512_mul_ps(weight[t], lines[t / 3].at[t % 3]));
        if (ends) {
            value = _mm512_add_ps(_mm512_mul_ps(value, _mm512_set1_ps(end->scale)), _mm512_set1_ps(end->shift));
            value = _mm512_max_ps(_mm512_set1_ps(end->low), value); /* what is not a number stays so */
            value = _mm512_min_ps(_mm512_set1_ps(end->high), value);
        }
        float *to = y + (row + r) * s->out_width + start;
        _mm512_mask_storeu_ps(to, some, value);
        __builtin_prefetch(to + NEXT * band * s->out_width, 1, 2);
#pragma GCC unroll 3
        for (int i = 0; i < 3 - step; i++) lines[i] = lines[i + step];
    }
}

WIDE INLINE void wide_planes(const convolution *s, const int step, const int ends) {
    for (int64_t p = 0, c = 0; p < s->planes; p++, c = c + 1 < s->channels ? c + 1 : 0) {
        const float *x = s->x + p * s->height * s->width;
        float *y = s->y + p * s->out_height * s->out_width;
        const finish end = finish_of(s, c);
        const __m512 bias = _mm512_set1_ps(s->bias ? s->bias[c] : 0.0f);
        __m512 weight[9];
        for (int t = 0; t < 9; t++) weight[t] = _mm512_set1_ps(s->weight[c * 9 + t]);
        const int64_t band = s->out_width > LINE ? BAND : s->out_height;
        for (int64_t row = 0; row < s->out_height; row += band)
            for (int64_t start = 0; start < s->out_width; start += LINE)
                wide_rows(s, x, y, weight, bias, &end, row, band, start, step, ends);
    }
}

WIDE static void wide_convolve(const convolution *s) {
    const int ends = s->scale || s->limited;
    if (s->step_width == 1)
        ends ? wide_planes(s, 1, 1) : wide_planes(s, 1, 0);
    else
        ends ? wide_planes(s, 2, 1) : wide_planes(s, 2, 0);
}

/* Whether it is for this one. */
INLINE int is_wide(const convolution *s) {
    return s->kernel_height == 3 && s->kernel_width == 3 && s->step_height == s->step_width;
}
#endif

/* --- backward ------------------------------------------------------------------------------------------------------- */
/* The taps of one phase of x, from the last to the first: so they lie in the gradient as those of y lie in x. */
typedef struct {
    int64_t count, tap[MOST_TAPS], at[MOST_TAPS];
} wiring;

/* Some rows of the gradient of x. A row of a phase is made of the row of the gradient of y before it, and those before. */
INLINE void derive_rows(const convolution *s, const wiring *of, const float *held, int64_t plane, int64_t channel,
                        int64_t row, int64_t here) {
    const int64_t taps = s->kernel_height * s->kernel_width, tall = s->step_height - 1, wide = s->step_width - 1;
    const int64_t first = s->before_width & 1, skip = s->before_width >> 1;
    const float *end = s->grad_x + s->planes * s->height * s->width;
    float out[4][MOST_OUT + BEHIND], by[MOST_TAPS];
    for (int64_t k = 0; k < s->step_height * s->step_width; k++) {
        for (int64_t n = 0; n < of[k].count; n++) by[n] = s->weight[channel * taps + of[k].tap[n]];
        rows_weighed(wide ? held : held + s->before_width, s->pitch, of[k].at, by, of[k].count, 0.0f, out[k], here,
                     wide ? s->pitch : s->width);
    }
    for (int64_t u = 0; u < here * s->step_height; u++) {
        const int64_t line = row * s->step_height + u - s->before_height, i = u & tall, at = (u >> tall) * s->pitch;
        if (line < 0 || line >= s->height) continue;
        float *to = s->grad_x + (plane * s->height + line) * s->width;
        const int loose = end - to >= s->width + SLACK;
        if (wide)
            woven(out[2 * i + first] + at + skip, out[2 * i + 1 - first] + at + skip + first, to, s->width, loose);
        else
            moved(out[i] + at, to, s->width, loose);
    }
}

INLINE void settle_back(const convolution *s, int64_t taps) {
    for (int64_t c = 0; c < s->channels; c++)
        for (int64_t t = 0; t <= taps; t++) {
            double total = 0.0;
            for (int l = 0; l < LANES; l++) total += s->sums[(c * (taps + 1) + t) * LANES + l];
            if (t < taps && s->grad_weight) s->grad_weight[c * taps + t] = (float)total;
            if (t == taps && s->grad_bias) s->grad_bias[c] = (float)total;
        }
}

INLINE void convolve_back(const convolution *s) {
    const int64_t taps = s->kernel_height * s->kernel_width, phases = s->step_height * s->step_width;
    const int64_t size = s->room * phases, halo = (s->kernel_height - 1) / s->step_height;
    const int64_t reach = (s->height + s->before_height + s->step_height - 1) / s->step_height;
    const int64_t all = reach > s->out_height ? reach : s->out_height;
    const int nine = taps == 9 && (s->grad_weight || s->grad_bias); /* both of them are summed together then */
    int64_t phase[MOST_TAPS], at[MOST_TAPS];
    wiring of[4];
    place_taps(s, phase, at);
    memset(of, 0, sizeof of);
    for (int64_t t = taps - 1; t >= 0; t--) {
        wiring *w = of + phase[t];
        w->tap[w->count] = t;
        w->at[w->count++] = -at[t];
        at[t] += phase[t] * s->room;
    }
    for (int64_t from = 0; from < s->planes; from += s->together) {
        const int64_t some = least(s->together, s->planes - from);
        for (int64_t row = 0; row < all; row += s->rows) {
            const int64_t here = least(s->rows, all - row), outputs = least(here, s->out_height - row);
            const int64_t n = up((outputs - 1) * s->pitch + s->out_width);
            for (int64_t p = 0; p < some; p++) {
                lay_held(s, from + p, row, here, halo, s->held + p * s->room + SLACK);
                if ((s->grad_weight || nine) && outputs > 0) lay_lines(s, from + p, row, outputs, s->lines + p * size);
            }
            for (int64_t p = 0, c = from % s->channels; p < some; p++, c = c + 1 < s->channels ? c + 1 : 0) {
                const float *held = s->held + p * s->room + SLACK + halo * s->pitch;
                double *sums = s->sums + c * (taps + 1) * LANES;
                if (s->grad_x) derive_rows(s, of, held, from + p, c, row, here);
                if (outputs <= 0) continue;
                if (nine)
                    add_nine(held, s->lines + p * size, at, s->pitch, outputs, s->out_width, sums);
                else if (s->grad_weight)
                    add_products(held, s->lines + p * size, at, taps, n, sums);
                if (s->grad_bias && !nine) add_numbers(held, n, sums + taps * LANES);
            }
        }
    }
    settle_back(s, taps);
}

#if defined(__x86_64__)
/* --- backward, 3x3, a line of the cache at a time --------------------------------------------------------------------- */
/* The gradient of x, of a plane, in steps of one: what forward makes of the gradient of y, with the taps turned round. */
WIDE INLINE void wide_turned(const convolution *s, int64_t plane, int64_t c) {
    const convolution t = {.height = s->out_height, .width = s->out_width, .out_height = s->height, .out_width = s->width,
                           .before_height = 2 - s->before_height, .before_width = 2 - s->before_width};
    const float *grad = s->grad + plane * s->out_height * s->out_width;
    float *out = s->grad_x + plane * s->height * s->width;
    const finish end = {1.0f, -0.0f, -INFINITY, INFINITY};
    __m512 weight[9];
    for (int k = 0; k < 9; k++) weight[k] = _mm512_set1_ps(s->weight[c * 9 + 8 - k]);
    const int64_t band = s->width > LINE ? BAND : s->height;
    for (int64_t row = 0; row < s->height; row += band)
        for (int64_t start = 0; start < s->width; start += LINE)
            wide_rows(&t, grad, out, weight, _mm512_setzero_ps(), &end, row, band, start, 1, 0);
}

/* A row of the gradient of y, from a column on; zeros where there is none. */
WIDE INLINE __m512 row_of(const convolution *s, const float *grad, int64_t row, int64_t column) {
    if (row < 0 || row >= s->out_height) return _mm512_setzero_ps();
    return _mm512_maskz_loadu_ps(inside(column, s->out_width), grad + row * s->out_width + column);
}

WIDE INLINE void put_woven(const convolution *s, float *plane, int64_t row, int64_t column, __m512 even, __m512 odd) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    if (row < 0 || row >= s->height) return;
    float *to = plane + row * s->width + column;
    _mm512_mask_storeu_ps(to, inside(column, s->width), _mm512_permutex2var_ps(even, first, odd));
    _mm512_mask_storeu_ps(to + LINE, inside(column + LINE, s->width), _mm512_permutex2var_ps(even, second, odd));
    __builtin_prefetch(to + SOON * 2 * s->width, 1, 2);
    __builtin_prefetch(to + SOON * 2 * s->width + LINE, 1, 2);
}

/* The same in steps of two: four numbers of it are made of 4, 2, 2 and 1 taps on the same four of the gradient of y. */
WIDE INLINE void wide_spread(const convolution *s, int64_t plane, int64_t c) {
    const float *grad = s->grad + plane * s->out_height * s->out_width;
    float *out = s->grad_x + plane * s->height * s->width;
    __m512 w[9];
    for (int t = 0; t < 9; t++) w[t] = _mm512_set1_ps(s->weight[c * 9 + t]);
    const __m512 none = _mm512_setzero_ps();
    for (int64_t row = 0; 2 * row - s->before_height < s->height; row++)
        for (int64_t start = 0; 2 * start - s->before_width < s->width; start += LINE) {
            const __m512 here = row_of(s, grad, row, start), left = row_of(s, grad, row, start - 1);
            const __m512 above = row_of(s, grad, row - 1, start), corner = row_of(s, grad, row - 1, start - 1);
            const int64_t line = 2 * row - s->before_height, column = 2 * start - s->before_width;
#define PLUS(sum, tap, value) _mm512_add_ps(sum, _mm512_mul_ps(w[tap], value))
            put_woven(s, out, line, column, PLUS(PLUS(PLUS(PLUS(none, 8, corner), 6, above), 2, left), 0, here),
                      PLUS(PLUS(none, 7, above), 1, here));
            put_woven(s, out, line + 1, column, PLUS(PLUS(none, 5, left), 3, here), PLUS(none, 4, here));
#undef PLUS
        }
}

/* Sums for the gradients of weight and bias, of a plane, as add_nine makes them. */
WIDE INLINE void wide_products(const convolution *s, int64_t plane, const int step, double *sums) {
    const float *x = s->x + plane * s->height * s->width, *grad = s->grad + plane * s->out_height * s->out_width;
    for (int64_t row = 0; row < s->out_height; row += s->rows) {
        const int64_t here = least(s->rows, s->out_height - row), above = row * step - s->before_height;
        __m512 sum[10];
#pragma GCC unroll 10
        for (int t = 0; t < 10; t++) sum[t] = _mm512_setzero_ps();
        for (int64_t start = 0; start < s->out_width; start += LINE) {
            const span w = span_of(s, start, s->rows, step);
            const __mmask16 some = inside(start, s->out_width);
            met lines[3];
#pragma GCC unroll 3
            for (int i = 0; i < 3 - step; i++) lines[i] = met_in(s, x, above + i, &w, step);
            for (int64_t r = 0; r < here; r++) {
#pragma GCC unroll 3
                for (int i = 3 - step; i < 3; i++) lines[i] = met_in(s, x, above + r * step + i, &w, step);
                const float *from = grad + (row + r) * s->out_width + start;
                const __m512 value = _mm512_maskz_loadu_ps(some, from);
                __builtin_prefetch(from + NEXT * s->rows * s->out_width, 0, 2);
#pragma GCC unroll 9
                for (int t = 0; t < 9; t++)
                    sum[t] = _mm512_add_ps(sum[t], _mm512_mul_ps(value, lines[t / 3].at[t % 3]));
                sum[9] = _mm512_add_ps(sum[9], value);
#pragma GCC unroll 3
                for (int i = 0; i < 3 - step; i++) lines[i] = lines[i + step];
            }
        }
#pragma GCC unroll 10
        for (int t = 0; t < 10; t++) {
            const __m256 both = _mm256_add_ps(_mm512_castps512_ps256(sum[t]), _mm512_extractf32x8_ps(sum[t], 1));
            double *to = sums + t * LANES;
            _mm512_storeu_pd(to, _mm512_add_pd(_mm512_loadu_pd(to), _mm512_cvtps_pd(both)));
        }
    }
}

WIDE INLINE void wide_planes_back(const convolution *s, const int step) {
    for (int64_t p = 0, c = 0; p < s->planes; p++, c = c + 1 < s->channels ? c + 1 : 0) {
        if (s->grad_x) step == 1 ? wide_turned(s, p, c) : wide_spread(s, p, c);
        if (s->grad_weight || s->grad_bias) wide_products(s, p, step, s->sums + c * 10 * LANES);
    }
}

WIDE static void wide_convolve_back(const convolution *s) {
    s->step_width == 1 ? wide_planes_back(s, 1) : wide_planes_back(s, 2);
    settle_back(s, 9);
}
#endif

/* --- once for any processor, once for AVX2, once for AVX-512, whose vectors are not wider but above: rows are short ---- */
#define EVERY(apply, more) apply(convolve, more) apply(convolve_back, more)
#define PLAIN(name, _) static void name##_plain(const convolution *s) { name(s); }
#define AVX2(name, _) __attribute__((target("avx2"))) static void name##_avx2(const convolution *s) { name(s); }
#define AVX512(name, _)                                                                                               \
    __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=256"))) static void name##_avx512(  \
        const convolution *s) {                                                                                       \
        name(s);                                                                                                      \
    }
#define HELD(name, _) static void (*chosen_##name)(const convolution *) = name##_plain;
#define CHOSEN(name, variant) chosen_##name = name##_##variant;

EVERY(PLAIN, )
#if defined(__x86_64__)
EVERY(AVX2, )
EVERY(AVX512, )
#endif
EVERY(HELD, )

#if defined(__x86_64__)
static void convolve_widest(const convolution *s) { is_wide(s) ? wide_convolve(s) : convolve_avx512(s); }
static void convolve_back_widest(const convolution *s) { is_wide(s) ? wide_convolve_back(s) : convolve_back_avx512(s); }
#endif

__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        EVERY(CHOSEN, avx2)
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
        EVERY(CHOSEN, avx512)
        chosen_convolve = convolve_widest;
        chosen_convolve_back = convolve_back_widest;
    }
#endif
}

/* The number in the names is that of this interface, so that a library with another one is not mistaken for this. The
 * others of each are for tests: without vector instructions of this processor, and with those of AVX2. */
#define SHOWN(name, _)                                                                                                \
    void darknight_##name##_2(const convolution *s) { chosen_##name(s); }                                             \
    void darknight_##name##_plain_2(const convolution *s) { name##_plain(s); }
#define SHOWN_AVX2(name, _)                                                                                           \
    void darknight_##name##_avx2_2(const convolution *s) { name##_avx2(s); }
EVERY(SHOWN, )
#if defined(__x86_64__)
EVERY(SHOWN_AVX2, )
#endif
