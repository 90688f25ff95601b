/* Causal attention, softmax(scale · q kᵀ) v, forward and backward, in blocks of queries
   and keys, so that scores stay in the cache and are never all in memory. The backward pass computes
   them again (Dao et al., 2022). In a block of scores, keys are rows and queries are columns. A thread
   computes a key/value head with all of its query heads. */

#include "vectors.h"

#include "layout.h"
#include "team.h"
#include "attention.h"

#define BLOCK 64 /* number of queries, and of keys */
#define BLOCK_VECTORS (BLOCK / LANES)
#define ATTEND_TILE_VECTORS 2 /* vectors of a tile */
#if LANES == 16
#define ATTEND_TILE_ROWS 8 /* rows of a tile */
#else
#define ATTEND_TILE_ROWS 4
#endif

int64_t attention_lanes(void) { return LANES; }

/* Return the number of scratch floats for each thread: all keys and values and their gradients; a block
   of queries and of output gradients, each by rows and by columns, and its query gradients; two blocks
   of scores. */
int64_t attention_scratch(int64_t length, int64_t size)
{
    return round_up(size) * (4 * length + 5 * BLOCK) + 2 * BLOCK * BLOCK;
}

/* Compute out (rows, parts · LANES) = a (rows, steps) · b (steps, parts · LANES), or += with `add`.
   `rows` and `parts` are constants at each call, so that sums stay in registers. */
INLINE void multiply_tile(const int rows, const int parts, int64_t steps, const float *a,
                          int64_t a_row, int64_t a_step, const float *b, int64_t b_step, float *out,
                          int64_t out_row, int add)
{
    vector sums[ATTEND_TILE_ROWS * ATTEND_TILE_VECTORS] = {{0}};
    for (int64_t i = 0; i < steps; i++)
        for (int v = 0; v < parts; v++) {
            vector right = load(b + i * b_step + v * LANES);
            for (int r = 0; r < rows; r++)
                sums[r * parts + v] += a[r * a_row + i * a_step] * right;
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < parts; v++) {
            vector *target = (vector *)(out + r * out_row + v * LANES);
            if (add)
                sums[r * parts + v] += *target;
            *target = sums[r * parts + v];
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

/* Transpose the rows of a block to (D, BLOCK), padded with zeros. */
static void transpose(float *columns, const float *rows, int64_t count, int64_t size)
{
    for (int64_t i = 0; i < size; i++)
        for (int64_t t = 0; t < BLOCK; t++)
            columns[i * BLOCK + t] = t < count ? rows[t * round_up(size) + i] : 0;
}

/* Replace scores (keys, BLOCK) by exp(score − largest), where `largest` is the largest score of the
   query up to this block, and add them to `sums`. The caller multiplies outputs of earlier blocks by
   `factors`. */
INLINE void exponentials(const int masked, int64_t keys, float *scores, vector *largest,
                         vector *sums, vector *factors)
{
    for (int64_t c = 0; c < BLOCK_VECTORS; c++) {
        const float *end = scores + keys * BLOCK;
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
                         float *scratch)
{
    const int64_t length = task->length, size = task->size, width = round_up(size);
    const int64_t group = task->heads / task->kv_heads;
    const struct heads *q = &task->query, *k = &task->key, *v = &task->value, *o = &task->out;
    float *keys = scratch, *values = keys + length * width, *queries = values + length * width;
    float *columns = queries + BLOCK * width, *mixed = columns + BLOCK * width;
    float *scores = mixed + BLOCK * width;
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
                multiply(is_diagonal ? LATER_COLUMNS : ALL, num_keys, BLOCK, size, keys + s * width,
                         width, 1, columns, BLOCK, scores, BLOCK, 0);
                if (!is_diagonal)
                    exponentials(0, num_keys, scores, largest, sums, factors);
                else
                    exponentials(1, num_keys, scores, largest, sums, factors);
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

/* Replace scores (keys, BLOCK) by attention weights, and gradients of weights by gradients of scores:
   weight · (d_weight − delta), where delta is Σ weight · d_weight over all keys of the query. */
INLINE void weights_backward(const int masked, int64_t keys, float *scores, float *d_weights,
                             const float *log_sums, const float *delta)
{
    for (int64_t s = 0; s < keys; s++)
        for (int64_t t = 0; t < BLOCK; t += LANES) {
            float *entry = scores + s * BLOCK + t, *d_entry = d_weights + s * BLOCK + t;
            vector weight = vector_exp(load(entry) - load(log_sums + t));
            if (masked)
                weight = blend(mask_before(t, s), (vector){0}, weight);
            vector d_score = weight * (load(d_entry) - load(delta + t));
            if (masked)
                d_score = blend(mask_before(t, s), (vector){0}, d_score);
            *(vector *)entry = weight;
            *(vector *)d_entry = d_score;
        }
}

static void attend_group_backward(const struct attention *task, int64_t window, int64_t kv_head,
                                  float *scratch)
{
    const int64_t length = task->length, size = task->size, width = round_up(size);
    const int64_t group = task->heads / task->kv_heads, kv_size = length * width;
    const int64_t block_size = BLOCK * width;
    const struct heads *q = &task->query, *k = &task->key, *v = &task->value, *o = &task->out;
    const struct heads *d_q = &task->d_query, *d_k = &task->d_key, *d_v = &task->d_value;
    const struct heads *d_o = &task->d_out;
    float *keys = scratch, *values = keys + kv_size;
    float *d_keys = values + kv_size, *d_values = d_keys + kv_size;
    float *queries = d_values + kv_size, *columns = queries + block_size, *grads = columns + block_size;
    float *grad_columns = grads + block_size, *d_queries = grad_columns + block_size;
    float *scores = d_queries + block_size, *d_scores = scores + BLOCK * BLOCK;
    pack_rows(keys, row_at(k, window, kv_head, 0), k->token, length, size, 1);
    pack_rows(values, row_at(v, window, kv_head, 0), v->token, length, size, 1);
    memset(d_keys, 0, 2 * kv_size * sizeof(float));
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
                multiply(is_diagonal ? LATER_COLUMNS : ALL, num_keys, BLOCK, size, keys + s * width,
                         width, 1, columns, BLOCK, scores, BLOCK, 0);
                multiply(is_diagonal ? LATER_COLUMNS : ALL, num_keys, BLOCK, size, values + s * width,
                         width, 1, grad_columns, BLOCK, d_scores, BLOCK, 0);
                if (!is_diagonal)
                    weights_backward(0, num_keys, scores, d_scores, log_sums, delta);
                else
                    weights_backward(1, num_keys, scores, d_scores, log_sums, delta);
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
    float *scratch = task->scratch + self.number * attention_scratch(task->length, task->size);
    struct range groups = own_range(self, task->windows * heads);
    for (int64_t i = groups.begin; i < groups.end; i++)
        if (task->d_out.data)
            attend_group_backward(task, i / heads, i % heads, scratch);
        else
            attend_group(task, i / heads, i % heads, scratch);
}

/* Compute `out` and `log_sums` or, if `d_out` has data, the other gradients, by `members` threads. */
void attend(int64_t members, const struct attention *task)
{
    run_team(members, attend_groups, task);
}

const struct layout attention_layouts[] = {
    STRUCT(heads),
    FIELD(heads, data), FIELD(heads, window), FIELD(heads, head), FIELD(heads, token),
    STRUCT(attention),
    FIELD(attention, windows), FIELD(attention, heads), FIELD(attention, kv_heads),
    FIELD(attention, length), FIELD(attention, size), FIELD(attention, scale), FIELD(attention, query),
    FIELD(attention, key), FIELD(attention, value), FIELD(attention, out), FIELD(attention, log_sums),
    FIELD(attention, d_query), FIELD(attention, d_key), FIELD(attention, d_value),
    FIELD(attention, d_out), FIELD(attention, scratch),
    {NULL, 0, 0},
};
