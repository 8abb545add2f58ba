/* The keystream of AES-256 in counter mode, by the processor's own instructions.
 *
 * The compiled twin of what randomness.keystream does with a library: counter blocks are a number and the place of the
 * block, 64 bits each, big-endian. One round of AES is one instruction, which takes the same time whatever the key and the
 * data are; there are no tables, and no branch depends on either. A processor without these instructions gets nothing from
 * here. What was made of a key is wiped from memory and registers before a call returns.
 *
 * No Python.h. Nothing is checked here: compiled_keystream.py does that.
 */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 16
#define ROUNDS 14

typedef struct {
    const uint8_t *key; /* 32 bytes */
    uint64_t number, block;
    int64_t skip; /* bytes of the first block that were read before: less than a block */
    uint8_t *out;
    int64_t size; /* in bytes */
} keystream;

#if defined(__x86_64__)
#define AES __attribute__((target("aes,sse4.1")))
#define VAES __attribute__((target("aes,vaes,avx512f,avx512bw")))

typedef struct {
    __m128i round[ROUNDS + 1];
} schedule;

typedef void (*filling)(const schedule *keys, uint64_t number, uint64_t block, uint8_t *out, int64_t blocks);

/* The next four words of a schedule, from those eight before and what the instruction made of the last four. */
AES INLINE __m128i next(__m128i before, __m128i made) {
    before = _mm_xor_si128(before, _mm_slli_si128(before, 4));
    before = _mm_xor_si128(before, _mm_slli_si128(before, 8));
    return _mm_xor_si128(before, made);
}

/* Words that a constant goes into and those between; the instruction takes its constant from the code. */
#define MADE(at, constant, word) _mm_shuffle_epi32(_mm_aeskeygenassist_si128(k->round[(at) - 1], constant), word)
#define EVEN(at, constant) k->round[at] = next(k->round[(at) - 2], MADE(at, constant, 0xFF))
#define ODD(at) k->round[at] = next(k->round[(at) - 2], MADE(at, 0, 0xAA))

AES static void expand(schedule *k, const uint8_t *key) {
    k->round[0] = _mm_loadu_si128((const __m128i *)key);
    k->round[1] = _mm_loadu_si128((const __m128i *)(key + BLOCK));
    EVEN(2, 0x01), ODD(3);
    EVEN(4, 0x02), ODD(5);
    EVEN(6, 0x04), ODD(7);
    EVEN(8, 0x08), ODD(9);
    EVEN(10, 0x10), ODD(11);
    EVEN(12, 0x20), ODD(13);
    EVEN(14, 0x40);
}

AES INLINE __m128i counter(uint64_t number, uint64_t block) {
    return _mm_set_epi64x((int64_t)__builtin_bswap64(block), (int64_t)__builtin_bswap64(number));
}

/* Whole blocks, eight at a time: one instruction takes four cycles, and two begin in each. */
AES static void fill_aes(const schedule *keys, uint64_t number, uint64_t block, uint8_t *out, int64_t blocks) {
    while (blocks > 0) {
        const int count = blocks < 8 ? (int)blocks : 8;
        __m128i b[8];
        for (int i = 0; i < 8; i++) b[i] = _mm_xor_si128(counter(number, block + (uint64_t)i), keys->round[0]);
        for (int r = 1; r < ROUNDS; r++)
            for (int i = 0; i < 8; i++) b[i] = _mm_aesenc_si128(b[i], keys->round[r]);
        for (int i = 0; i < 8; i++) b[i] = _mm_aesenclast_si128(b[i], keys->round[ROUNDS]);
        if (count == 8)
            for (int i = 0; i < 8; i++) _mm_storeu_si128((__m128i *)out + i, b[i]);
        else
            for (int i = 0; i < count; i++) _mm_storeu_si128((__m128i *)out + i, b[i]);
        block += 8, out += 8 * BLOCK, blocks -= 8;
    }
}

/* The same, four blocks in a register and eight registers at a time. */
VAES static void fill_vaes(const schedule *keys, uint64_t number, uint64_t block, uint8_t *out, int64_t blocks) {
    if (blocks >= 32) {
        const __m512i swap = _mm512_broadcast_i32x4(
            _mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
        const int64_t n = (int64_t)number;
        __m512i at = _mm512_set_epi64((int64_t)(block + 3), n, (int64_t)(block + 2), n, (int64_t)(block + 1), n,
                                      (int64_t)block, n);
        const __m512i four = _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0);
        __m512i k[ROUNDS + 1];
        for (int r = 0; r <= ROUNDS; r++) k[r] = _mm512_broadcast_i32x4(keys->round[r]);
        for (; blocks >= 32; block += 32, out += 32 * BLOCK, blocks -= 32) {
            __m512i b[8];
            for (int i = 0; i < 8; i++) {
                b[i] = _mm512_xor_si512(_mm512_shuffle_epi8(at, swap), k[0]);
                at = _mm512_add_epi64(at, four);
            }
            for (int r = 1; r < ROUNDS; r++)
                for (int i = 0; i < 8; i++) b[i] = _mm512_aesenc_epi128(b[i], k[r]);
            for (int i = 0; i < 8; i++)
                _mm512_storeu_si512(out + 64 * i, _mm512_aesenclast_epi128(b[i], k[ROUNDS]));
        }
    }
    fill_aes(keys, number, block, out, blocks);
}

INLINE int64_t make(const keystream *s, filling fill) {
    schedule keys;
    uint8_t single[BLOCK];
    int64_t done = 0;
    expand(&keys, s->key);
    while (done < s->size) {
        const int64_t from = s->skip + done, inside = from % BLOCK, left = s->size - done;
        const uint64_t block = s->block + (uint64_t)(from / BLOCK);
        int64_t some = left - left % BLOCK;
        if (inside || !some) { /* a part of a block, at the beginning or at the end */
            some = left < BLOCK - inside ? left : BLOCK - inside;
            fill(&keys, s->number, block, single, 1);
            memcpy(s->out + done, single + inside, (size_t)some);
        } else
            fill(&keys, s->number, block, s->out + done, some / BLOCK);
        done += some;
    }
    memset(&keys, 0, sizeof keys);
    memset(single, 0, sizeof single);
    __asm__ volatile("" : : "r"(&keys), "r"(single) : "memory"); /* or the compiler would leave that out */
    return done;
}

#define WIPED(n) "pxor %%xmm" #n ", %%xmm" #n "\n\t"
#define WIPED_WIDE(n) "vpxorq %%zmm" #n ", %%zmm" #n ", %%zmm" #n "\n\t"

AES static int64_t make_aes(const keystream *s) {
    const int64_t done = make(s, fill_aes);
    __asm__ volatile(WIPED(0) WIPED(1) WIPED(2) WIPED(3) WIPED(4) WIPED(5) WIPED(6) WIPED(7) WIPED(8) WIPED(9) WIPED(10)
                         WIPED(11) WIPED(12) WIPED(13) WIPED(14) WIPED(15)
                     :
                     :
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                       "xmm12", "xmm13", "xmm14", "xmm15");
    return done;
}

VAES static int64_t make_vaes(const keystream *s) {
    const int64_t done = make(s, fill_vaes);
    __asm__ volatile("vzeroall\n\t" WIPED_WIDE(16) WIPED_WIDE(17) WIPED_WIDE(18) WIPED_WIDE(19) WIPED_WIDE(20)
                         WIPED_WIDE(21) WIPED_WIDE(22) WIPED_WIDE(23) WIPED_WIDE(24) WIPED_WIDE(25) WIPED_WIDE(26)
                             WIPED_WIDE(27) WIPED_WIDE(28) WIPED_WIDE(29) WIPED_WIDE(30) WIPED_WIDE(31)
                     :
                     :
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                       "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22",
                       "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31");
    return done;
}

/* Older compilers do not know the name of these instructions here. */
static int has_vaes(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 9 & 1);
}
#endif

static int64_t none(const keystream *s) {
    (void)s;
    return -1;
}

static int64_t (*chosen)(const keystream *) = none, (*narrow)(const keystream *) = none;

__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("aes") || !__builtin_cpu_supports("sse4.1")) return;
    chosen = narrow = make_aes;
    if (has_vaes() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) chosen = make_vaes;
#endif
}

/* How many bytes were written; -1, and none is, without instructions for AES. The number in the names is that of this
 * interface, so that a library with another one is not mistaken for this. The other is for tests. */
int64_t darknight_keystream_1(const uint8_t *key, uint64_t number, uint64_t block, int64_t skip, uint8_t *out,
                              int64_t size) {
    const keystream s = {key, number, block, skip, out, size};
    return chosen(&s);
}
int64_t darknight_keystream_aes_1(const uint8_t *key, uint64_t number, uint64_t block, int64_t skip, uint8_t *out,
                                  int64_t size) {
    const keystream s = {key, number, block, skip, out, size};
    return narrow(&s);
}
