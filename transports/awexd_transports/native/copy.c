/* Copies of strided boxes in host memory, and their additive checksums in the same pass.
 *
 * Why C: NumPy and torch write through the caches, so memory that is about to be overwritten is read first, and each
 * tile costs a call under the GIL. Streaming stores and a sum of what just passed through the core's first cache need
 * neither; nothing else that was measured came near a plain memcpy.
 *
 * The cells and the digest are those of cells.py and digest.py, which do the same where this library is missing; the
 * tests run both. A job is one box of one stored piece; it is cut into tiles, which threads draw from a common counter.
 */
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words of 64 bits are summed as they lie in memory, which must be little-endian"
#endif

#define DIMS 8
#define SPAN_BITS 18
#define SPAN (1 << SPAN_BITS)     /* digest.SPAN */
#define CHUNK 8192                /* bytes that are summed and copied in turn: they stay in the first cache */
#define STREAM_RUN 256            /* shorter runs are not worth a streaming store */
#define PARTS 8                   /* cells.PARTS */
/* Built once for each generation of x86; which is taken is decided when the library is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

enum { COPY, STORE, COMPARE };

typedef uint64_t word __attribute__((aligned(1), may_alias));

/* kernel.JOB has the same fields. Arrays have one item a dimension, the last being contiguous on both sides. */
struct job {
    uint64_t destination, source; /* addresses of the box's first element */
    uint64_t piece;               /* COMPARE: of the packed piece's first element */
    uint64_t table;               /* of the stored checksum of the piece's first cell */
    int64_t mode, ndim, itemsize;
    int64_t together;             /* cells side by side along the last dimension are one tile */
    int64_t row, column;          /* of the piece's first element in the tensor: row number, and byte in the row */
    int64_t tiles, first;         /* how many, and how many there are before this job */
    int64_t wrong;                /* the number of a tile that did not add up; only then */
    int64_t low[DIMS], high[DIMS], shape[DIMS], step[DIMS]; /* box, piece and cell, in the piece's coordinates */
    int64_t into[DIMS], from[DIMS]; /* strides in bytes */
    int64_t rows[DIMS];           /* by how many rows of the tensor each dimension but the last moves */
};

/* One run of a table. Threads draw tiles from `next`. */
struct run {
    int64_t next, done, wrong; /* the next tile; tiles finished; those among them that did not add up */
};

struct keys {
    uint64_t words, rows, spans, offset; /* address of the weights of the words of a span; digest's and segment's keys */
    uint64_t first;                      /* the weight of the first span */
};

INLINE uint64_t mix(uint64_t key, uint64_t number) {
    uint64_t z = number * 0x9E3779B97F4A7C15u + key;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) | 1;
}

INLINE uint64_t dot(const word *restrict held, const uint64_t *restrict weights, int64_t count) {
    uint64_t sum = 0;
    for (int64_t at = 0; at < count; at++)
        sum += held[at] * weights[at];
    return sum;
}

/* The weighted words of a run of bytes, which begins at byte `column` of its tensor's row; its row's weight is not in it. */
INLINE uint64_t sum_run(const struct keys *keys, const uint8_t *held, int64_t nbytes, int64_t column) {
    uint64_t total = 0;
    if (!((column | nbytes) & 7) && column + nbytes <= SPAN * 8) /* as nearly always */
        return dot((const word *)held, (const uint64_t *)keys->words + (column >> 3), nbytes >> 3) * keys->first;
    while (nbytes > 0) {
        int64_t first = column >> 3, lead = column & 7, span = first >> SPAN_BITS;
        int64_t part = (span + 1) * SPAN * 8 - column;
        if (part > nbytes)
            part = nbytes;
        const uint64_t *weights = (const uint64_t *)keys->words + (first & (SPAN - 1));
        const uint8_t *at = held;
        int64_t left = part;
        uint64_t sum = 0, edge;
        if (lead) {
            int64_t few = left < 8 - lead ? left : 8 - lead;
            edge = 0;
            memcpy((uint8_t *)&edge + lead, at, (size_t)few);
            sum += edge * *weights++;
            at += few;
            left -= few;
        }
        sum += dot((const word *)at, weights, left >> 3);
        weights += left >> 3;
        at += left & ~(int64_t)7;
        if (left & 7) {
            edge = 0;
            memcpy(&edge, at, (size_t)(left & 7));
            sum += edge * *weights;
        }
        total += sum * (span ? mix(keys->spans, (uint64_t)span) : keys->first);
        held += part;
        column += part;
        nbytes -= part;
    }
    return total;
}

/* memmove copies runs of 2 KiB to 1 MiB by `rep movsb`, at half the speed where the two sides are not aligned alike. */
INLINE void copy_run(uint8_t *to, const uint8_t *from, int64_t nbytes, int stream) {
    if (to == from) /* only summed: a device has copied it, or will */
        return;
#if defined(__SSE2__)
    if (nbytes >= STREAM_RUN) {
        int64_t head = -(int64_t)(uintptr_t)to & 63;
        if (head)
            memcpy(to, from, (size_t)head);
        int64_t at = head, end = nbytes - 64;
        if (stream)
            for (; at <= end; at += 64) {
                __m128i a = _mm_loadu_si128((const __m128i *)(from + at)), b = _mm_loadu_si128((const __m128i *)(from + at + 16));
                __m128i c = _mm_loadu_si128((const __m128i *)(from + at + 32)), d = _mm_loadu_si128((const __m128i *)(from + at + 48));
                _mm_stream_si128((__m128i *)(to + at), a);
                _mm_stream_si128((__m128i *)(to + at + 16), b);
                _mm_stream_si128((__m128i *)(to + at + 32), c);
                _mm_stream_si128((__m128i *)(to + at + 48), d);
            }
        else
            for (; at <= end; at += 64) {
                __m128i a = _mm_loadu_si128((const __m128i *)(from + at)), b = _mm_loadu_si128((const __m128i *)(from + at + 16));
                __m128i c = _mm_loadu_si128((const __m128i *)(from + at + 32)), d = _mm_loadu_si128((const __m128i *)(from + at + 48));
                _mm_store_si128((__m128i *)(to + at), a);
                _mm_store_si128((__m128i *)(to + at + 16), b);
                _mm_store_si128((__m128i *)(to + at + 32), c);
                _mm_store_si128((__m128i *)(to + at + 48), d);
            }
        if (at < nbytes)
            memcpy(to + at, from + at, (size_t)(nbytes - at));
        return;
    }
#endif
    (void)stream;
    memcpy(to, from, (size_t)nbytes);
}

/* STORE: what the live tensor holds is summed and streamed into the segment while it is in the first cache. */
INLINE uint64_t sum_and_copy(const struct keys *keys, uint8_t *to, const uint8_t *from, int64_t nbytes, int64_t column, int stream) {
    uint64_t sum = 0;
    for (int64_t at = 0, part; at < nbytes; at += part) {
        part = CHUNK - ((int64_t)(uintptr_t)(to + at) & 63); /* whole cache lines, but at the ends */
        if (part > nbytes - at)
            part = nbytes - at;
        sum += sum_run(keys, from + at, part, column + at);
        copy_run(to + at, from + at, part, stream);
    }
    return sum;
}

/* COMPARE: what has arrived is read back from the destination. */
INLINE uint64_t copy_and_sum(const struct keys *keys, uint8_t *to, const uint8_t *from, int64_t nbytes, int64_t column) {
    uint64_t sum = 0;
    for (int64_t at = 0, part; at < nbytes; at += part) {
        part = nbytes - at < CHUNK ? nbytes - at : CHUNK;
        copy_run(to + at, from + at, part, 0);
        __asm__ volatile("" ::: "memory");
        sum += sum_run(keys, to + at, part, column + at);
    }
    return sum;
}

struct tile {
    int64_t cell, cells;             /* the first, and how many, side by side */
    int64_t low[DIMS], high[DIMS];   /* what those cells are */
    int64_t begin[DIMS], end[DIMS];  /* what of them is in the box */
};

INLINE void find_tile(const struct job *job, int64_t number, struct tile *tile) {
    int last = (int)job->ndim - 1;
    int64_t at[DIMS];
    tile->cells = 1;
    for (int d = last; d >= 0; d--) {
        int64_t first = job->low[d] / job->step[d], count = (job->high[d] + job->step[d] - 1) / job->step[d] - first;
        if (d == last && job->together) {
            tile->cells = count;
            at[d] = first;
        } else {
            at[d] = first + number % count;
            number /= count;
        }
    }
    tile->cell = 0;
    for (int d = 0; d <= last; d++) {
        int64_t width = d == last ? tile->cells : 1;
        tile->cell = tile->cell * ((job->shape[d] + job->step[d] - 1) / job->step[d]) + at[d];
        tile->low[d] = at[d] * job->step[d];
        tile->high[d] = (at[d] + width) * job->step[d];
        if (tile->high[d] > job->shape[d])
            tile->high[d] = job->shape[d];
        tile->begin[d] = tile->low[d] > job->low[d] ? tile->low[d] : job->low[d];
        tile->end[d] = tile->high[d] < job->high[d] ? tile->high[d] : job->high[d];
    }
}

/* The next index of all dimensions but the last between two corners, row-major; 0 after the last one. */
INLINE int step_row(int64_t *at, const int64_t *low, const int64_t *high, int64_t ndim) {
    for (int d = (int)ndim - 2; d >= 0; d--) {
        if (++at[d] < high[d])
            return 1;
        at[d] = low[d];
    }
    return 0;
}

INLINE uint64_t row_weight(const struct job *job, const struct keys *keys, const int64_t *at) {
    int64_t row = job->row;
    for (int d = 0; d < job->ndim - 1; d++)
        row += at[d] * job->rows[d];
    return mix(keys->rows, (uint64_t)row);
}

/* What of a tile's cells is not in the box, as it is held. */
INLINE uint64_t sum_rest(const struct job *job, const struct keys *keys, const struct tile *tile) {
    int last = (int)job->ndim - 1;
    int64_t at[DIMS], size = job->itemsize;
    uint64_t total = 0;
    memcpy(at, tile->low, sizeof at);
    do {
        int inside = 1;
        int64_t place = 0;
        for (int d = 0; d < last; d++) {
            inside &= tile->begin[d] <= at[d] && at[d] < tile->end[d];
            place = place * job->shape[d] + at[d];
        }
        const uint8_t *held = (const uint8_t *)job->piece + place * job->shape[last] * size;
        int64_t a = tile->low[last], b = tile->high[last], c = inside ? tile->begin[last] : b, e = inside ? tile->end[last] : b;
        uint64_t sum = sum_run(keys, held + a * size, (c - a) * size, job->column + a * size);
        sum += sum_run(keys, held + e * size, (b - e) * size, job->column + e * size);
        total += sum * row_weight(job, keys, at);
    } while (step_row(at, tile->low, tile->high, job->ndim));
    return total;
}

/* Whether it adds up. */
CLONED static int run_tile(struct job *job, const struct keys *keys, int64_t number, int stream) {
    struct tile tile;
    find_tile(job, number, &tile);
    int last = (int)job->ndim - 1;
    int64_t size = job->itemsize, begin = tile.begin[last], nbytes = (tile.end[last] - begin) * size, at[DIMS];
    uint64_t sums[PARTS] = {0}, total = 0;
    memcpy(at, tile.begin, sizeof at);
    do {
        uint8_t *to = (uint8_t *)job->destination + (begin - job->low[last]) * size;
        const uint8_t *from = (const uint8_t *)job->source + (begin - job->low[last]) * size;
        for (int d = 0; d < last; d++) {
            to += (at[d] - job->low[d]) * job->into[d];
            from += (at[d] - job->low[d]) * job->from[d];
        }
        if (job->mode == COPY) {
            copy_run(to, from, nbytes, stream);
        } else if (job->mode == COMPARE) {
            total += copy_and_sum(keys, to, from, nbytes, job->column + begin * size) * row_weight(job, keys, at);
        } else {
            uint64_t weight = row_weight(job, keys, at);
            int64_t step = job->step[last] * size;
            for (int64_t cell = 0, done = 0; done < nbytes; cell++, done += step) {
                int64_t part = nbytes - done < step ? nbytes - done : step;
                sums[cell] += sum_and_copy(keys, to + done, from + done, part, job->column + begin * size + done, stream) * weight;
            }
        }
    } while (step_row(at, tile.begin, tile.end, job->ndim));
    if (job->mode == STORE) {
        for (int64_t cell = 0; cell < tile.cells; cell++)
            ((word *)job->table)[tile.cell + cell] = sums[cell] + keys->offset;
    } else if (job->mode == COMPARE) {
        int whole = 1;
        for (int d = 0; d <= last; d++)
            whole &= tile.begin[d] == tile.low[d] && tile.end[d] == tile.high[d];
        if (!whole)
            total += sum_rest(job, keys, &tile);
        for (int64_t cell = 0; cell < tile.cells; cell++)
            total -= ((const word *)job->table)[tile.cell + cell] - keys->offset;
        if (total)
            __atomic_store_n(&job->wrong, number, __ATOMIC_RELAXED);
    }
#if defined(__SSE2__)
    if (stream)
        _mm_sfence();
#endif
    return total == 0;
}

/* Does tiles until none is left to begin: called by as many threads as shall share them. */
EXPORT void awexd_run(struct job *jobs, int64_t count, struct run *run, const struct keys *keys, int64_t stream) {
    int64_t tiles = count ? jobs[count - 1].first + jobs[count - 1].tiles : 0;
    for (;;) {
        int64_t tile = __atomic_fetch_add(&run->next, 1, __ATOMIC_RELAXED);
        if (tile >= tiles)
            return;
        int64_t low = 0, high = count;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if (jobs[middle].first <= tile)
                low = middle;
            else
                high = middle;
        }
        if (!run_tile(&jobs[low], keys, tile - jobs[low].first, (int)stream))
            __atomic_fetch_add(&run->wrong, 1, __ATOMIC_RELAXED);
        __atomic_fetch_add(&run->done, 1, __ATOMIC_RELAXED);
    }
}

EXPORT int64_t awexd_job_bytes(void) {
    return (int64_t)sizeof(struct job);
}

/* To be raised, with VERSION in __init__.py, when a function or a structure changes. */
EXPORT uint64_t awexd_native_version(void) {
    return 2;
}
