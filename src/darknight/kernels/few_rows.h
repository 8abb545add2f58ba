/* The loops of few_rows.c, once for each kind of vector: there stands what NAME, TARGET, WIDTH and the rest are.
 *
 * ADDED(sum, x, y) is sum + x * y, rounded once where the processor can. PAST(to, vector) writes past the cache.
 * DOT_ROWS by DOT_OUTS sums, BACK_ROWS by BACK_VECTORS and OUTER_OUTS by OUTER_VECTORS vectors stay in registers;
 * OUTER_VECTORS are whole lanes.
 */
#define VEC NAME(vec)
#define PIECES (LANES / WIDTH)
typedef float VEC __attribute__((vector_size(4 * WIDTH)));

TARGET INLINE VEC NAME(get)(const float *from) {
    VEC vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

TARGET INLINE void NAME(put)(float *to, VEC vector) { memcpy(to, &vector, sizeof vector); }

/* One number in every place. */
TARGET INLINE VEC NAME(every)(float number) { return number - (VEC){0}; }

/* --- forward: sums of x * weight along both --------------------------------------------------------------------------- */
/* sums (out, row, lane) += over n inputs, which are whole lanes. What stands `next` further is fetched meanwhile. */
TARGET INLINE void NAME(dots)(const product *s, const float *restrict x, const float *restrict w, int64_t pitch, int64_t n,
                              int64_t next, const int rows, const int outs, float (*restrict sums)[MOST_ROWS][LANES]) {
    VEC held[DOT_OUTS][DOT_ROWS][PIECES], some[DOT_OUTS];
    UNROLLED for (int o = 0; o < outs; o++)
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int p = 0; p < PIECES; p++) held[o][r][p] = NAME(get)(sums[o][r] + p * WIDTH);
    for (int64_t i = 0; i < n; i += LANES)
        UNROLLED for (int p = 0; p < PIECES; p++) {
            UNROLLED for (int o = 0; o < outs; o++) {
                some[o] = NAME(get)(w + o * pitch + i + p * WIDTH);
                if (p == 0) __builtin_prefetch(w + o * pitch + i + next, 0, 2);
            }
            UNROLLED for (int r = 0; r < rows; r++) {
                const VEC value = NAME(get)(x + i * s->rows + r * LANES + p * WIDTH);
                UNROLLED for (int o = 0; o < outs; o++) held[o][r][p] = ADDED(held[o][r][p], value, some[o]);
            }
        }
    UNROLLED for (int o = 0; o < outs; o++)
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int p = 0; p < PIECES; p++) NAME(put)(sums[o][r] + p * WIDTH, held[o][r][p]);
}

/* The same for every row; a few at a time. */
TARGET INLINE void NAME(all_dots)(const product *s, const float *x, const float *w, int64_t pitch, int64_t n, int64_t next,
                                  const int outs, float (*sums)[MOST_ROWS][LANES]) {
    for (int64_t r = 0; r < s->rows; r += DOT_ROWS) {
        float(*here)[MOST_ROWS][LANES] = (float(*)[MOST_ROWS][LANES])sums[0][r];
        switch (least(s->rows - r, DOT_ROWS)) {
#define CASE(k)                                                                                                       \
    case k:                                                                                                           \
        if (k <= DOT_ROWS) NAME(dots)(s, x + r * LANES, w, pitch, n, r ? 0 : next, k, outs, here);                    \
        break;
            UP_TO_EIGHT(CASE)
#undef CASE
        }
    }
}

/* One output or DOT_OUTS of them, over some inputs, the last of which may not fill the lanes. */
TARGET INLINE void NAME(some_outputs)(const product *s, int64_t input, int64_t n, int64_t output, const int outs) {
    float sums[DOT_OUTS][MOST_ROWS][LANES], rest[DOT_OUTS][LANES] = {{0.0f}};
    const int64_t whole = n / LANES * LANES;
    const float *w = s->weight + output * s->inputs + input, *x = s->x + input * s->rows;
    for (int o = 0; o < outs; o++) memset(sums[o], 0, (size_t)s->rows * sizeof sums[o][0]);
    NAME(all_dots)(s, x, w, s->inputs, whole, DOT_OUTS * s->inputs, outs, sums);
    if (whole < n) {
        for (int o = 0; o < outs; o++) memcpy(rest[o], w + o * s->inputs + whole, (size_t)(n - whole) * sizeof(float));
        NAME(all_dots)(s, x + whole * s->rows, rest[0], LANES, LANES, 0, outs, sums);
    }
    for (int o = 0; o < outs; o++)
        for (int64_t r = 0; r < s->rows; r++) {
            float *y = s->y + r * s->outputs + output + o;
            const float before = input ? *y : s->bias ? s->bias[output + o] : 0.0f;
            *y = before + total_of(sums[o][r]);
        }
}

TARGET static void NAME(multiply)(const product *s) {
    for (int64_t input = 0; input < s->inputs; input += BLOCK) {
        const int64_t n = least(BLOCK, s->inputs - input);
        int64_t o = s->first;
        for (; o + DOT_OUTS <= s->last; o += DOT_OUTS) NAME(some_outputs)(s, input, n, o, DOT_OUTS);
        for (; o < s->last; o++) NAME(some_outputs)(s, input, n, o, 1);
    }
}

/* --- the gradient of x: sums of grad * weight over outputs ------------------------------------------------------------ */
/* Of BACK_VECTORS vectors of inputs, over some outputs; grad is (output, row). `fresh`: the first that are summed. */
TARGET INLINE void NAME(sum_back)(const float *restrict w, int64_t pitch, int64_t outs, int64_t next,
                                  const float *restrict grad, const int rows, float *restrict to, int64_t to_pitch,
                                  int fresh) {
    VEC held[BACK_ROWS][BACK_VECTORS], some[BACK_VECTORS];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < BACK_VECTORS; v++) held[r][v] = (VEC){0};
    for (int64_t o = 0; o < outs; o++) {
        UNROLLED for (int v = 0; v < BACK_VECTORS; v++) {
            some[v] = NAME(get)(w + o * pitch + v * WIDTH);
            if (v * WIDTH % LANES == 0) __builtin_prefetch(w + o * pitch + v * WIDTH + next, 0, 2);
        }
        UNROLLED for (int r = 0; r < rows; r++) {
            const VEC value = NAME(every)(grad[o * MOST_ROWS + r]);
            UNROLLED for (int v = 0; v < BACK_VECTORS; v++) held[r][v] = ADDED(held[r][v], value, some[v]);
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < BACK_VECTORS; v++) {
            float *place = to + r * to_pitch + v * WIDTH;
            NAME(put)(place, fresh ? held[r][v] : NAME(get)(place) + held[r][v]);
        }
}

/* The same for every row; a few at a time. */
TARGET INLINE void NAME(sum_rows_back)(const product *s, const float *w, int64_t pitch, int64_t outs, int64_t next,
                                       const float *grad, float *to, int64_t to_pitch, int fresh) {
    for (int64_t r = 0; r < s->rows; r += BACK_ROWS)
        switch (least(s->rows - r, BACK_ROWS)) {
#define CASE(k)                                                                                                       \
    case k:                                                                                                           \
        if (k <= BACK_ROWS)                                                                                           \
            NAME(sum_back)(w, pitch, outs, r ? 0 : next, grad + r, k, to + r * to_pitch, to_pitch, fresh);            \
        break;
            UP_TO_EIGHT(CASE)
#undef CASE
        }
}

/* The inputs from `from` to `end`, over some outputs. */
TARGET INLINE void NAME(inputs_back)(const product *s, int64_t from, int64_t end, int64_t output, int64_t outs,
                                     const float *grad) {
    const float *w = s->weight + output * s->inputs;
    int64_t i = from;
    for (; i + BACK_VECTORS * WIDTH <= end; i += BACK_VECTORS * WIDTH)
        NAME(sum_rows_back)(s, w + i, s->inputs, outs, AHEAD, grad, s->grad_x + i, s->inputs, output == 0);
    if (i == end) return;
    float rest[GROUP][BACK_VECTORS * WIDTH], made[MOST_ROWS][BACK_VECTORS * WIDTH];
    memset(rest, 0, sizeof rest);
    for (int64_t o = 0; o < outs; o++) memcpy(rest[o], w + o * s->inputs + i, (size_t)(end - i) * sizeof(float));
    NAME(sum_rows_back)(s, rest[0], BACK_VECTORS * WIDTH, outs, 0, grad, made[0], BACK_VECTORS * WIDTH, 1);
    for (int64_t r = 0; r < s->rows; r++)
        for (int64_t k = i; k < end; k++) {
            float *to = s->grad_x + r * s->inputs + k;
            *to = output ? *to + made[r][k - i] : made[r][k - i];
        }
}

TARGET static void NAME(derive_x)(const product *s) {
    float grad[GROUP][MOST_ROWS];
    for (int64_t from = s->first; from < s->last; from += COLUMNS)
        for (int64_t output = 0; output < s->outputs; output += GROUP) {
            const int64_t outs = least(GROUP, s->outputs - output);
            for (int64_t r = 0; r < s->rows; r++)
                for (int64_t o = 0; o < outs; o++) grad[o][r] = s->grad[r * s->outputs + output + o];
            NAME(inputs_back)(s, from, least(from + COLUMNS, s->last), output, outs, grad[0]);
        }
}

/* --- the gradients of weight and bias: sums of grad * x over rows ----------------------------------------------------- */
/* Of some outputs and OUTER_VECTORS vectors of inputs; grad is (row, output). */
TARGET INLINE void NAME(sum_outer)(const product *s, const float *restrict x, const float *restrict grad, const int outs,
                                   float *restrict to, int64_t pitch, const int past) {
    VEC held[OUTER_OUTS][OUTER_VECTORS], some[OUTER_VECTORS];
    UNROLLED for (int o = 0; o < outs; o++)
        UNROLLED for (int v = 0; v < OUTER_VECTORS; v++) held[o][v] = (VEC){0};
    for (int64_t r = 0; r < s->rows; r++) {
        UNROLLED for (int v = 0; v < OUTER_VECTORS; v++)
            some[v] = NAME(get)(x + v * WIDTH / LANES * LANES * s->rows + r * LANES + v * WIDTH % LANES);
        UNROLLED for (int o = 0; o < outs; o++) {
            const VEC value = NAME(every)(grad[r * OUTER_OUTS + o]);
            UNROLLED for (int v = 0; v < OUTER_VECTORS; v++) held[o][v] = ADDED(held[o][v], value, some[v]);
        }
    }
    UNROLLED for (int o = 0; o < outs; o++)
        UNROLLED for (int v = 0; v < OUTER_VECTORS; v++) {
            if (past)
                PAST(to + o * pitch + v * WIDTH, held[o][v]);
            else
                NAME(put)(to + o * pitch + v * WIDTH, held[o][v]);
        }
}

TARGET INLINE void NAME(weights_back)(const product *s, int64_t output, const int outs, const int past) {
    float grad[MOST_ROWS][OUTER_OUTS], made[OUTER_OUTS][OUTER_VECTORS * WIDTH];
    for (int64_t r = 0; r < s->rows; r++)
        for (int o = 0; o < outs; o++) grad[r][o] = s->grad[r * s->outputs + output + o];
    float *to = s->grad_weight + output * s->inputs;
    int64_t i = 0;
    for (; i + OUTER_VECTORS * WIDTH <= s->inputs; i += OUTER_VECTORS * WIDTH)
        NAME(sum_outer)(s, s->x + i * s->rows, grad[0], outs, to + i, s->inputs, past);
    if (i == s->inputs) return;
    NAME(sum_outer)(s, s->x + i * s->rows, grad[0], outs, made[0], OUTER_VECTORS * WIDTH, 0);
    for (int o = 0; o < outs; o++) memcpy(to + o * s->inputs + i, made[o], (size_t)(s->inputs - i) * sizeof(float));
}

TARGET static void NAME(derive_weight)(const product *s) {
    const int past = goes_past(s);
    int64_t o = s->grad_weight ? s->first : s->last;
    if (s->grad_bias) sum_rows(s);
    for (; past && o + OUTER_OUTS <= s->last; o += OUTER_OUTS) NAME(weights_back)(s, o, OUTER_OUTS, 1);
    for (; o + OUTER_OUTS <= s->last; o += OUTER_OUTS) NAME(weights_back)(s, o, OUTER_OUTS, 0);
    for (; o < s->last; o++) NAME(weights_back)(s, o, 1, 0);
    settled(past);
}

#undef VEC
#undef PIECES
#undef NAME
#undef TARGET
#undef WIDTH
#undef ADDED
#undef PAST
#undef DOT_ROWS
#undef DOT_OUTS
#undef BACK_ROWS
#undef BACK_VECTORS
#undef OUTER_OUTS
#undef OUTER_VECTORS
