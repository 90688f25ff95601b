/* Causal attention, softmax(scale · q kᵀ) v, forward and backward, in blocks of queries
   and keys, so that scores stay in the cache and are never all in memory. The backward pass computes
   them again (Dao et al., 2022). In a block of scores, keys are rows and queries are columns. A thread
   computes a key/value head with all of its query heads. */

#include "simd.h"
#include "arena.h"
#include "thread_team.h"
#include "attention.h"

#define BLOCK 64 /* number of queries, and of keys */
#define BLOCK_VECTORS (BLOCK / LANES)
#define ATTEND_TILE_VECTORS 2 /* vectors of a tile */
#if LANES == 16
#define ATTEND_TILE_ROWS 8 /* rows of a tile */
#else
#define ATTEND_TILE_ROWS 4
#endif

/* A thread's scratch memory. Rows are padded to whole vectors. */
struct buffers {
    float *keys, *values, *d_keys, *d_values; /* (T, D), of a key/value head */
    float *queries, *grads;                   /* (BLOCK, D), of a block of queries and outputs */
    float *columns, *grad_columns;            /* (D, BLOCK), the transposes of both */
    float *mixed, *d_queries;                 /* (BLOCK, D) */
    float *scores, *d_scores;                 /* (BLOCK, BLOCK) */
};

static void assign_buffers(int64_t length, int64_t size, struct arena *arena, struct buffers *b)
{
    const int64_t width = round_up(size);
    b->keys = take(arena, length * width);
    b->values = take(arena, length * width);
    b->d_keys = take(arena, length * width);
    b->d_values = take(arena, length * width);
    b->queries = take(arena, BLOCK * width);
    b->grads = take(arena, BLOCK * width);
    b->columns = take(arena, BLOCK * width);
    b->grad_columns = take(arena, BLOCK * width);
    b->mixed = take(arena, BLOCK * width);
    b->d_queries = take(arena, BLOCK * width);
    b->scores = take(arena, BLOCK * BLOCK);
    b->d_scores = take(arena, BLOCK * BLOCK);
}

/* Return the number of scratch floats for each thread. */
int64_t attention_scratch(int64_t length, int64_t size)
{
    struct arena arena = {0};
    struct buffers buffers;
    assign_buffers(length, size, &arena, &buffers);
    return arena.used;
}

/* Compute out (rows, vectors · LANES) = a (rows, steps) · b (steps, vectors · LANES), or += with `add`.
   `rows` and `vectors` are constants at each call, so that sums stay in registers. */
INLINE void multiply_tile(const int rows, const int vectors, int64_t steps, const float *a,
                          int64_t a_row, int64_t a_step, const float *b, int64_t b_step, float *out,
                          int64_t out_row, int add)
{
    vector sums[ATTEND_TILE_ROWS * ATTEND_TILE_VECTORS] = {{0}};
    for (int64_t i = 0; i < steps; i++)
        for (int v = 0; v < vectors; v++) {
            vector right = load(b + i * b_step + v * LANES);
            for (int r = 0; r < rows; r++)
                sums[r * vectors + v] += a[r * a_row + i * a_step] * right;
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            vector *target = (vector *)(out + r * out_row + v * LANES);
            if (add)
                sums[r * vectors + v] += *target;
            *target = sums[r * vectors + v];
        }
}

/* A block of scores on the diagonal has the same tokens as keys and queries, so half of its scores are
   masked. This names the products that are needed: all, only columns at or right of the diagonal, or
   only the steps up to or from the row. */
enum needed { ALL, LATER_COLUMNS, STEPS_TO_ROW, STEPS_FROM_ROW };

/* Multiply matrices by tiles; `columns` is a multiple of LANES. Unneeded elements are unspecified. */
static void multiply(enum needed needed, int64_t rows, int64_t columns, int64_t steps, const float *a,
                     int64_t a_row, int64_t a_step, const float *b, int64_t b_step, float *out,
                     int64_t out_row, int add)
{
#define TILES(tile_rows, tile_vectors) \
    for (; r + tile_rows <= rows; r += tile_rows) { \
        const int64_t from = needed == STEPS_FROM_ROW ? r : 0; \
        const int64_t to = needed == STEPS_TO_ROW && r + tile_rows < steps ? r + tile_rows : steps; \
        if (needed != LATER_COLUMNS || c + tile_vectors * LANES > r) \
            multiply_tile(tile_rows, tile_vectors, to - from, a + r * a_row + from * a_step, a_row, \
                          a_step, b + c + from * b_step, b_step, out + r * out_row + c, out_row, add); \
    }
    for (int64_t c = 0, r = 0; c < columns; r = 0)
        if (c + ATTEND_TILE_VECTORS * LANES <= columns) {
            TILES(ATTEND_TILE_ROWS, ATTEND_TILE_VECTORS);
            TILES(1, ATTEND_TILE_VECTORS);
            c += ATTEND_TILE_VECTORS * LANES;
        } else {
            TILES(ATTEND_TILE_ROWS, 1);
            TILES(1, 1);
            c += LANES;
        }
#undef TILES
}

INLINE float *row_at(const struct heads *x, int64_t window, int64_t head, int64_t token)
{
    return x->data + window * x->window + head * x->head + token * x->token;
}

/* Copy rows of a head, times `scale`, padded with zeros to whole vectors. */
static void pack_rows(float *to, const float *from, int64_t stride, int64_t count, int64_t size,
                      float scale)
{
    for (int64_t r = 0; r < count; r++, to += round_up(size), from += stride) {
        for (int64_t i = 0; i < size; i++)
            to[i] = from[i] * scale;
        for (int64_t i = size; i < round_up(size); i++)
            to[i] = 0;
    }
}

/* Copy rows back to a head, times `scale`, without the padding. */
static void unpack_rows(const float *from, float *to, int64_t stride, int64_t count, int64_t size,
                        float scale)
{
    for (int64_t r = 0; r < count; r++, from += round_up(size), to += stride)
        for (int64_t i = 0; i < size; i++)
            to[i] = from[i] * scale;
}

/* Transpose the rows of a block to (D, BLOCK), padded with zeros to whole vectors, by 4 × 4 numbers. */
static void transpose(float *columns, float *rows, int64_t count, int64_t size)
{
    const int64_t width = round_up(size);
    memset(rows + count * width, 0, (round_up(count) - count) * width * sizeof(float));
    for (int64_t t = 0; t < round_up(count); t += 4, rows += 4 * width)
        for (int64_t i = 0; i < width; i += 4) {
            const vector4 a = *(vector4 *)(rows + i), b = *(vector4 *)(rows + width + i);
            const vector4 c = *(vector4 *)(rows + 2 * width + i), d = *(vector4 *)(rows + 3 * width + i);
            for (int l = 0; l < 4; l++)
                *(vector4 *)(columns + (i + l) * BLOCK + t) = (vector4){a[l], b[l], c[l], d[l]};
        }
}

/* Replace scores (keys, BLOCK) by exp(score − largest), where `largest` is the largest score of the
   query up to this block, and add them to `sums`. The caller multiplies outputs of earlier blocks by
   `factors`. */
INLINE void exponentials(const int masked, int64_t queries, int64_t keys, float *scores, vector *largest,
                         vector *sums, vector *factors)
{
    for (int64_t c = 0; c * LANES < queries; c++) {
        /* All later keys come after these queries. */
        const float *end = scores + (masked ? smaller(keys, (c + 1) * LANES) : keys) * BLOCK;
        vector new_largest = largest[c], sum = {0};
        int64_t s = 0;
        for (const float *entry = scores + c * LANES; entry < end; entry += BLOCK, s++) {
            vector score = load(entry);
            if (masked)
                score = blend(mask_before(c * LANES, s), new_largest, score);
            new_largest = blend(score > new_largest, score, new_largest);
        }
        s = 0;
        for (float *entry = scores + c * LANES; entry < end; entry += BLOCK, s++) {
            vector exponential = vector_exp(load(entry) - new_largest);
            if (masked)
                exponential = blend(mask_before(c * LANES, s), (vector){0}, exponential);
            *(vector *)entry = exponential;
            sum += exponential;
        }
        factors[c] = vector_exp(largest[c] - new_largest);
        sums[c] = sums[c] * factors[c] + sum;
        largest[c] = new_largest;
    }
}

static void attend_group(const struct attention *task, int64_t window, int64_t kv_head,
                         const struct buffers *b)
{
    const int64_t length = task->length, size = task->size, width = round_up(size);
    const int64_t group = task->heads / task->kv_heads;
    const struct heads *q = &task->query, *k = &task->key, *v = &task->value, *o = &task->out;
    float *keys = b->keys, *values = b->values, *queries = b->queries, *columns = b->columns;
    float *mixed = b->mixed, *scores = b->scores;
    pack_rows(keys, row_at(k, window, kv_head, 0), k->token, length, size, 1);
    pack_rows(values, row_at(v, window, kv_head, 0), v->token, length, size, 1);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int64_t t = 0; t < length; t += BLOCK) {
            const int64_t count = smaller(length - t, BLOCK);
            float *log_sums = task->log_sums + (window * task->heads + head) * length + t;
            float *out = row_at(o, window, head, t);
            vector largest[BLOCK_VECTORS], sums[BLOCK_VECTORS] = {{0}}, factors[BLOCK_VECTORS];
            for (int c = 0; c < BLOCK_VECTORS; c++)
                largest[c] = (vector){0} - INFINITY;
            pack_rows(queries, row_at(q, window, head, t), q->token, count, size, task->scale);
            transpose(columns, queries, count, size);
            for (int64_t s = 0; s <= t; s += BLOCK) {
                const int64_t num_keys = s < t ? BLOCK : count;
                const int is_diagonal = s == t;
                multiply(is_diagonal ? LATER_COLUMNS : ALL, num_keys, round_up(count), size,
                         keys + s * width, width, 1, columns, BLOCK, scores, BLOCK, 0);
                if (!is_diagonal)
                    exponentials(0, count, num_keys, scores, largest, sums, factors);
                else
                    exponentials(1, count, num_keys, scores, largest, sums, factors);
                if (s > 0)
                    for (int64_t i = 0; i < count; i++)
                        for (int64_t d = 0; d < width; d++)
                            mixed[i * width + d] *= factors[i / LANES][i % LANES];
                multiply(is_diagonal ? STEPS_TO_ROW : ALL, count, width, num_keys, scores, 1, BLOCK,
                         values + s * width, width, mixed, width, s > 0);
            }
            for (int64_t i = 0; i < count; i++) {
                const float sum = sums[i / LANES][i % LANES];
                log_sums[i] = largest[i / LANES][i % LANES] + logf(sum);
                unpack_rows(mixed + i * width, out + i * o->token, 0, 1, size, 1 / sum);
            }
        }
}

/* Replace scores (keys, BLOCK) by probabilities, and gradients of probabilities by gradients of
   scores: p · (d_p − delta), where delta is Σ p · d_p over all keys of the query. */
INLINE void softmax_backward(const int masked, int64_t queries, int64_t keys, float *scores, float *d_probabilities,
                             const float *log_sums, const float *delta)
{
    for (int64_t s = 0; s < keys; s++)
        for (int64_t t = masked ? s / LANES * LANES : 0; t < queries; t += LANES) {
            float *entry = scores + s * BLOCK + t, *d_entry = d_probabilities + s * BLOCK + t;
            vector probability = vector_exp(load(entry) - load(log_sums + t));
            if (masked)
                probability = blend(mask_before(t, s), (vector){0}, probability);
            vector d_score = probability * (load(d_entry) - load(delta + t));
            if (masked)
                d_score = blend(mask_before(t, s), (vector){0}, d_score);
            *(vector *)entry = probability;
            *(vector *)d_entry = d_score;
        }
}

static void attend_group_backward(const struct attention *task, int64_t window, int64_t kv_head,
                                  const struct buffers *b)
{
    const int64_t length = task->length, size = task->size, width = round_up(size);
    const int64_t group = task->heads / task->kv_heads;
    const struct heads *q = &task->query, *k = &task->key, *v = &task->value, *o = &task->out;
    const struct heads *d_q = &task->d_query, *d_k = &task->d_key, *d_v = &task->d_value;
    const struct heads *d_o = &task->d_out;
    float *keys = b->keys, *values = b->values, *d_keys = b->d_keys, *d_values = b->d_values;
    float *queries = b->queries, *columns = b->columns, *d_queries = b->d_queries;
    float *grads = b->grads, *grad_columns = b->grad_columns;
    float *scores = b->scores, *d_scores = b->d_scores;
    pack_rows(keys, row_at(k, window, kv_head, 0), k->token, length, size, 1);
    pack_rows(values, row_at(v, window, kv_head, 0), v->token, length, size, 1);
    memset(d_keys, 0, length * width * sizeof(float));
    memset(d_values, 0, length * width * sizeof(float));
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int64_t t = 0; t < length; t += BLOCK) {
            const int64_t count = smaller(length - t, BLOCK);
            const float *out = row_at(o, window, head, t);
            float delta[BLOCK] = {0}, log_sums[BLOCK] = {0};
            memcpy(log_sums, task->log_sums + (window * task->heads + head) * length + t,
                   count * sizeof(float));
            pack_rows(queries, row_at(q, window, head, t), q->token, count, size, task->scale);
            transpose(columns, queries, count, size);
            pack_rows(grads, row_at(d_o, window, head, t), d_o->token, count, size, 1);
            transpose(grad_columns, grads, count, size);
            for (int64_t i = 0; i < count; i++)
                for (int64_t d = 0; d < size; d++)
                    delta[i] += grads[i * width + d] * out[i * o->token + d];
            for (int64_t s = 0; s <= t; s += BLOCK) {
                const int64_t num_keys = s < t ? BLOCK : count;
                const int is_diagonal = s == t;
                multiply(is_diagonal ? LATER_COLUMNS : ALL, num_keys, round_up(count), size,
                         keys + s * width, width, 1, columns, BLOCK, scores, BLOCK, 0);
                multiply(is_diagonal ? LATER_COLUMNS : ALL, num_keys, round_up(count), size,
                         values + s * width, width, 1, grad_columns, BLOCK, d_scores, BLOCK, 0);
                if (!is_diagonal)
                    softmax_backward(0, count, num_keys, scores, d_scores, log_sums, delta);
                else
                    softmax_backward(1, count, num_keys, scores, d_scores, log_sums, delta);
                multiply(is_diagonal ? STEPS_FROM_ROW : ALL, num_keys, width, count, scores, BLOCK, 1,
                         grads, width, d_values + s * width, width, 1);
                multiply(is_diagonal ? STEPS_FROM_ROW : ALL, num_keys, width, count, d_scores, BLOCK, 1,
                         queries, width, d_keys + s * width, width, 1);
                multiply(is_diagonal ? STEPS_TO_ROW : ALL, count, width, num_keys, d_scores, 1, BLOCK,
                         keys + s * width, width, d_queries, width, s > 0);
            }
            unpack_rows(d_queries, row_at(d_q, window, head, t), d_q->token, count, size,
                        task->scale);
        }
    unpack_rows(d_keys, row_at(d_k, window, kv_head, 0), d_k->token, length, size, 1);
    unpack_rows(d_values, row_at(d_v, window, kv_head, 0), d_v->token, length, size, 1);
}

void attend_groups(struct member self, const void *argument)
{
    const struct attention *task = argument;
    const int64_t heads = task->kv_heads;
    const int64_t used = self.number * attention_scratch(task->length, task->size);
    struct buffers buffers;
    assign_buffers(task->length, task->size, &(struct arena){task->scratch, used}, &buffers);
    struct range groups = own_range(self, task->windows * heads);
    for (int64_t i = groups.begin; i < groups.end; i++)
        if (task->d_out.data)
            attend_group_backward(task, i / heads, i % heads, &buffers);
        else
            attend_group(task, i / heads, i % heads, &buffers);
}

/* Compute all heads for training/one_layer.py, whose axes these are: forward or, if `d_packed` is not
   NULL, backward. `packed` (B, T, 3·H·D) has queries, keys and values, `mixed` (B, T, H·D) the heads'
   outputs, and `log_sums` (B, H, T) is for the backward pass. */
void attend_packed(int64_t batch, int64_t length, int64_t heads, int64_t size, float *packed,
                   float *mixed, float *log_sums, float *d_mixed, float *d_packed, float *scratch)
{
    const int64_t width = heads * size;
#define VIEW(data, stride) {data, length * (stride), size, stride}
    struct attention task = {
        .windows = batch, .heads = heads, .kv_heads = heads, .length = length, .size = size,
        .scale = 1 / sqrtf(size), .query = VIEW(packed, 3 * width),
        .key = VIEW(packed + width, 3 * width), .value = VIEW(packed + 2 * width, 3 * width),
        .out = VIEW(mixed, width), .log_sums = log_sums, .scratch = scratch,
    };
    if (d_packed) {
        task.d_query = (struct heads)VIEW(d_packed, 3 * width);
        task.d_key = (struct heads)VIEW(d_packed + width, 3 * width);
        task.d_value = (struct heads)VIEW(d_packed + 2 * width, 3 * width);
        task.d_out = (struct heads)VIEW(d_mixed, width);
    }
#undef VIEW
    struct team alone = {.members = 1};
    attend_groups((struct member){&alone, 0}, &task);
}
