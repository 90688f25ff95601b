/* Logits of the next token, for every architecture that embeds its tokens; the parts of a model are
   data. generation/native_decoder.py prepares weights and memory; tests compare the logits with the
   textbook pass.

   Axes: B windows, S tokens of a window, T new tokens of it, C embed_dim, H heads, K key and value
   heads, D head size, F hidden units, V vocabulary, L layers. */

#include "vectors.h"

#include "layout.h"
#include "team.h"
#include "products.h"

#define MANY 32 /* with this many new tokens in a window, rows of matrices are copied to panels */

struct block {
    const float *attention_norm, *mlp_norm; /* (2, C): gains and biases */
    const float *query_gains, *key_gains;   /* (D), the former times the scale; or NULL */
    struct map qkv, projection, up, down;   /* `up` of SwiGLU: gate and up, each in whole panels */
};

struct model {
    int64_t layers, width, vocab_size, heads, kv_heads, size;
    int64_t key_at, value_at; /* offsets in a row of queries, keys and values */
    int64_t norm, normed_heads, residual, mlp;
    float epsilon;
    const float *tokens, *positions;           /* (V, C), (S, C) or NULL */
    const float *token_maps, *position_maps;   /* the first layer's `qkv` applied to both, or NULL */
    const float *cosines, *sines;              /* (S, D/2), or NULL */
    const struct block *blocks;
    const float *last_norm;
    struct map head;
};

/* The memory of a decoder: the key/value cache, and scratch for `rows` tokens that go through the layers
   together. All rows are whole panels. Each thread has its own query, scores and panel. */
struct memory {
    int64_t rows, capacity, stride, mixed_stride; /* tokens of a window; strides of rows */
    float *keys, *values;                         /* (L, B, K, S/LANES, D, LANES), (L, B, K, S, D) */
    float *x, *read, *packed, *mixed, *hidden;    /* the residual stream, and the results of its parts */
    float *query, *scores;                        /* (members, D + a panel), (members, S) */
    float *panel;                                 /* (members, panel_size) */
    int64_t panel_size;                           /* 0 if no projection needs a panel */
};

/* New tokens that go through the layers together: `rows` of the `count` new tokens of all windows. */
struct tokens {
    const int64_t *ids;
    int64_t samples, count, known, begin, rows;
};

/* A token's window, and its index among the new tokens of this window. */
struct place {
    int64_t sample, at;
};

/* Return nonzero if anything reads the layer's output for a token. */
INLINE int is_wanted(const struct model *m, int64_t layer, const struct tokens *t, struct place p)
{
    return layer < m->layers - 1 || p.at == t->count - 1;
}

static struct place first_of(const struct tokens *t)
{
    return (struct place){t->begin / t->count, t->begin % t->count};
}

static void move_on(struct place *p, const struct tokens *t)
{
    if (++p->at == t->count)
        p->at = 0, p->sample++;
}

/* Return the mean of numbers, or of their squares. */
INLINE float mean(int64_t size, const float *x, const int squared)
{
    vector sums = {0};
    float sum = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vector part = load(x + i);
        if (squared)
            part *= part;
        sums += part;
    }
    for (; i < size; i++)
        sum += squared ? x[i] * x[i] : x[i];
    return (sum + total(sums)) / size;
}

/* Return the input rows of the next part: normalised rows in `read`, or the stream itself. */
static const float *normed(struct member who, const struct model *m, const struct memory *to,
                           int64_t rows, int64_t size, const float *gains)
{
    if (m->norm == NO_NORM)
        return to->x;
    struct range own = share(who, rows);
    for (int64_t r = own.begin; r < own.end; r++) {
        const float *x = to->x + r * to->stride;
        float *y = to->read + r * to->stride, middle = m->norm == LAYER_NORM ? mean(size, x, 0) : 0;
        for (int64_t i = 0; i < size; i++)
            y[i] = x[i] - middle;
        float scale = 1 / sqrtf(mean(size, y, 1) + m->epsilon);
        for (int64_t i = 0; i < size; i++)
            y[i] = y[i] * scale * gains[i] + gains[size + i];
    }
    barrier(who);
    return to->read;
}

/* Return a head's query or key, normalised and rotated to its position if the model does so. Element i of
   the first half and element i of the second half form a pair that is rotated. */
static const float *turned(const struct model *m, const float *restrict x,
                           const float *restrict gains, int64_t position, float *restrict y)
{
    if (!gains)
        return x;
    const int64_t half = m->size / 2;
    float scale = m->normed_heads ? 1 / sqrtf(mean(m->size, x, 1) + m->epsilon) : 1;
    for (int64_t i = 0; i < m->size; i++)
        y[i] = x[i] * scale * gains[i];
    if (!m->cosines)
        return y;
    const float *cosines = m->cosines + position * half, *sines = m->sines + position * half;
    for (int64_t i = 0; i < half; i++) {
        float first = y[i], second = y[half + i];
        y[i] = first * cosines[i] - second * sines[i];
        y[half + i] = second * cosines[i] + first * sines[i];
    }
    return y;
}

/* Attention of one query to the cache. Keys are (S/LANES, D, LANES), values (S, D).

   Return the vector at `x`, and prefetch the vector `ahead` of it unless `ahead` is 0. */
INLINE vector load_ahead(const float *x, int64_t ahead)
{
    if (ahead)
        __builtin_prefetch(x + ahead, 0, 2);
    return load(x);
}

/* Compute the scores of `parts` vectors of tokens. */
INLINE void score(const int parts, int64_t size, const float *query, const float *keys,
                  int64_t ahead, float *scores)
{
    vector sums[4] = {{0}};
    for (int64_t i = 0; i < size; i++)
        for (int p = 0; p < parts; p++)
            sums[p] += query[i] * load_ahead(keys + p * size * LANES + i * LANES, ahead);
    for (int p = 0; p < parts; p++)
        *(vector *)(scores + p * LANES) = sums[p];
}

/* Compute `parts` vectors of the sum of all visible values, weighted by scores; write `room` numbers. */
INLINE void mix(const int parts, int64_t size, int64_t visible, const float *scores,
                const float *values, int64_t ahead, float share, float *mixed, int64_t room)
{
    vector sums[4][4] = {{{0}}}; /* one sum for every fourth token */
    int64_t s = 0;
    for (; s + 4 <= visible; s += 4)
        for (int j = 0; j < 4; j++)
            for (int p = 0; p < parts; p++)
                sums[j][p] += scores[s + j] * load_ahead(values + (s + j) * size + p * LANES, ahead);
    for (; s < visible; s++)
        for (int p = 0; p < parts; p++)
            sums[0][p] += scores[s] * load(values + s * size + p * LANES);
    for (int p = 0; p < parts; p++) {
        vector made = ((sums[0][p] + sums[1][p]) + (sums[2][p] + sums[3][p])) * share;
        if (room >= LANES * (p + 1))
            *(vector *)(mixed + p * LANES) = made;
        else
            for (int64_t i = p * LANES; i < room; i++)
                mixed[i] = made[i - p * LANES];
    }
}

/* Compute softmax(keysᵀ query) · values over the first `visible` tokens. The keys and values that are
   needed next lie `ahead` of these. */
static void gather(int64_t size, int64_t visible, const float *query, const float *keys,
                   const float *values, int64_t ahead, float *scores, float *mixed)
{
    int64_t s = 0;
    for (; s + 4 * LANES <= visible; s += 4 * LANES)
        score(4, size, query, keys + s * size, ahead, scores + s);
    for (; s < visible; s += LANES)
        score(1, size, query, keys + s * size, ahead, scores + s);
    for (s = visible; s % LANES; s++)
        scores[s] = -INFINITY;
    vector top = load(scores), sum = {0};
    for (s = LANES; s < visible; s += LANES)
        top = either(load(scores + s) > top, load(scores + s), top);
    float largest = top[0];
    for (int l = 1; l < LANES; l++)
        largest = top[l] > largest ? top[l] : largest;
    for (s = 0; s < visible; s += LANES) {
        vector weight = exp_of(load(scores + s) - largest);
        *(vector *)(scores + s) = weight;
        sum += weight;
    }
    float share = 1 / total(sum);
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        mix(4, size, visible, scores, values + i, ahead, share, mixed + i, 4 * LANES);
    for (; i + 2 * LANES <= size; i += 2 * LANES)
        mix(2, size, visible, scores, values + i, ahead, share, mixed + i, 2 * LANES);
    for (; i < size; i += LANES) /* whole vectors can be read */
        mix(1, size, visible, scores, values + i, ahead, share, mixed + i, size - i);
}

/* Read the first layer's queries, keys and values from the tables of tokens and positions. */
static void look_up(struct member who, const struct model *m, const struct memory *to,
                    const struct tokens *t)
{
    const int64_t size = m->blocks->qkv.outputs;
    float *packed = to->packed;
    struct place p = first_of(t);
    for (int64_t r = 0; who.number == 0 && r < t->rows; r++, packed += size, move_on(&p, t)) {
        const float *token = m->token_maps + t->ids[t->begin + r] * size;
        const float *added = m->position_maps + (t->known + p.at) * size;
        for (int64_t i = is_wanted(m, 0, t, p) ? 0 : m->key_at; i < size; i += LANES)
            *(vector *)(packed + i) = load(token + i) + load(added + i);
    }
    barrier(who);
}

/* Compute `attend` for one key/value head and its query heads. Rows of `packed` have queries, keys and
   values. */
static void attend_head(struct member who, const struct model *m, const struct memory *to,
                        int64_t layer, const struct tokens *t, const float *packed, int64_t stride,
                        int64_t k)
{
    const struct block *b = m->blocks + layer;
    const int64_t size = m->size, group = m->heads / m->kv_heads;
    float *turning = to->query + who.number * (size + PANEL);
    float *scores = to->scores + who.number * to->capacity, *mixed = to->mixed;
    /* With one token per window, the next token's keys may not be in the processor's cache yet. */
    const int one_each = t->count == 1 && t->samples > 1;
    const int64_t ahead = one_each ? m->kv_heads * to->capacity * size : 0;
    struct place p = first_of(t);
    for (int64_t r = 0; r < t->rows; r++, packed += stride, move_on(&p, t)) {
        int64_t position = t->known + p.at, part = position % LANES;
        int64_t cached = ((layer * t->samples + p.sample) * m->kv_heads + k) * to->capacity * size;
        float *keys = to->keys + cached, *values = to->values + cached;
        const float *key = turned(m, packed + m->key_at + k * size, b->key_gains, position, turning);
        for (int64_t i = 0; i < size; i++)
            keys[(position - part) * size + i * LANES + part] = key[i];
        memcpy(values + position * size, packed + m->value_at + k * size, size * sizeof(float));
        if (!is_wanted(m, layer, t, p))
            continue;
        for (int64_t h = k * group; h < (k + 1) * group; h++)
            gather(size, position + 1,
                   turned(m, packed + h * size, b->query_gains, position, turning), keys, values,
                   ahead, scores, mixed + h * size);
        mixed += to->mixed_stride;
    }
}

/* Append the keys and values of tokens to the cache, and write the outputs of the heads to `mixed`; in
   the last layer only those of each window's last token. */
static void attend(struct member who, const struct model *m, const struct memory *to, int64_t layer,
                   const struct tokens *t, float *panel)
{
    const struct map *qkv = &m->blocks[layer].qkv;
    const float *packed = to->packed;
    int64_t stride = qkv->outputs;
    if (layer == 0 && m->token_maps) {
        look_up(who, m, to, t);
    } else {
        const float *read = normed(who, m, to, t->rows, m->width, m->blocks[layer].attention_norm);
        if (there_is(qkv)) {
            product(who, qkv, panel, t->rows, read, to->stride, to->packed, stride, 0);
            barrier(who);
        } else {
            packed = read, stride = to->stride;
        }
    }
    struct range own = share(who, m->kv_heads);
    for (int64_t k = own.begin; k < own.end; k++)
        attend_head(who, m, to, layer, t, packed, stride, k);
    barrier(who);
}

/* Move the stream of the windows' last tokens to the front. Return the number of these tokens. */
static int64_t keep_last(struct member who, const struct memory *to, const struct tokens *t)
{
    int64_t kept = 0;
    struct place p = first_of(t);
    for (int64_t r = 0; r < t->rows; r++, move_on(&p, t)) {
        if (p.at < t->count - 1)
            continue;
        if (who.number == 0)
            memmove(to->x + kept * to->stride, to->x + r * to->stride, to->stride * sizeof(float));
        kept++;
    }
    barrier(who);
    return kept;
}

/* Add the outputs of the heads, projected if the model does so, to the stream, or replace the stream. */
static void pass_on(struct member who, const struct model *m, const struct memory *to,
                    const struct map *projection, float *panel, int64_t rows)
{
    if (there_is(projection)) {
        product(who, projection, panel, rows, to->mixed, to->mixed_stride, to->x, to->stride,
                m->residual);
        barrier(who);
        return;
    }
    struct range own = share(who, rows);
    for (int64_t r = own.begin; r < own.end; r++) {
        float *x = to->x + r * to->stride;
        const float *mixed = to->mixed + r * to->mixed_stride;
        for (int64_t i = 0; i < m->heads * m->size; i++)
            x[i] = m->residual ? x[i] + mixed[i] : mixed[i];
    }
    barrier(who);
}

INLINE vector activation(int64_t kind, vector x)
{
    if (kind == SWIGLU)
        return x * sigmoid(x);
    if (kind == GELU) /* (1 + tanh(u)) / 2 is sigmoid(2u) */
        return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    return either(x < 0, (vector){0}, x * x);
}

static void feed_forward(struct member who, const struct model *m, const struct memory *to,
                         const struct block *b, float *panel, int64_t rows)
{
    const float *read = normed(who, m, to, rows, m->width, b->mlp_norm);
    const int64_t stride = b->up.outputs, hidden = m->mlp == SWIGLU ? stride / 2 : stride;
    product(who, &b->up, panel, rows, read, to->stride, to->hidden, stride, 0);
    barrier(who);
    struct range own = share(who, hidden / PANEL);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = own.begin * PANEL; i < own.end * PANEL; i += LANES) {
            float *x = to->hidden + r * stride + i;
            vector y = activation(m->mlp, load(x));
            if (m->mlp == SWIGLU)
                y *= load(x + hidden);
            *(vector *)x = y;
        }
    barrier(who);
    product(who, &b->down, panel, rows, to->hidden, stride, to->x, to->stride, m->residual);
    barrier(who);
}

static void embed(struct member who, const struct model *m, const struct memory *to,
                  const struct tokens *t)
{
    struct place p = first_of(t);
    for (int64_t r = 0; who.number == 0 && r < t->rows; r++, move_on(&p, t)) {
        const float *token = m->tokens + t->ids[t->begin + r] * m->width;
        float *x = to->x + r * to->stride;
        memcpy(x, token, m->width * sizeof(float));
        if (m->positions) {
            const float *position = m->positions + (t->known + p.at) * m->width;
            for (int64_t i = 0; i < m->width; i++)
                x[i] += position[i];
        }
    }
    barrier(who);
}

struct task {
    const struct model *model;
    const struct memory *memory;
    int64_t samples, count, known;
    const int64_t *ids;
    float *logits;
};

static void compute(struct member who, const void *about)
{
    const struct task *task = about;
    const struct model *m = task->model;
    const struct memory *to = task->memory;
    const int64_t all = task->samples * task->count;
    float *logits = task->logits;
    struct tokens t = {task->ids, task->samples, task->count, task->known, 0, 0};
    for (; t.begin < all; t.begin += t.rows) {
        int64_t left = all - t.begin, rows = t.rows = left < to->rows ? left : to->rows;
        if (!m->token_maps || m->residual)
            embed(who, m, to, &t);
        float *panel = to->panel + who.number * to->panel_size;
        if (task->count < MANY || !to->panel_size)
            panel = NULL;
        for (int64_t layer = 0; layer < m->layers; layer++) {
            const struct block *b = m->blocks + layer;
            if (m->heads)
                attend(who, m, to, layer, &t, panel);
            if (layer == m->layers - 1)
                rows = keep_last(who, to, &t), panel = NULL;
            if (m->heads)
                pass_on(who, m, to, &b->projection, panel, rows);
            if (m->mlp != NO_MLP)
                feed_forward(who, m, to, b, panel, rows);
        }
        const float *read = normed(who, m, to, rows, m->head.inputs, m->last_norm);
        product(who, &m->head, NULL, rows, read, to->stride, logits, m->head.outputs, 0);
        barrier(who);
        logits += rows * m->head.outputs;
    }
}

/* Return 1 if all ids (B, count), whose rows are `stride` apart, are in the vocabulary. */
static int are_ids(const struct model *m, int64_t samples, int64_t count, const int64_t *ids,
                   int64_t stride)
{
    for (int64_t s = 0; s < samples; s++)
        for (int64_t i = 0; i < count; i++)
            if (ids[s * stride + i] < 0 || ids[s * stride + i] >= m->vocab_size)
                return 0;
    return 1;
}

/* Compute logits (B, V) after the last of `count` new tokens in each of B windows, of which `known`
   tokens are in the cache: ids (B, count); by `members` threads, for which `to` has room. Return 0,
   and do nothing, if an id is not in the vocabulary. */
int next_logits(const struct model *m, const struct memory *to, int64_t members, int64_t samples,
                int64_t count, int64_t known, const int64_t *ids, float *logits)
{
    if (!are_ids(m, samples, count, ids, count))
        return 0;
    struct task task = {m, to, samples, count, known, ids, logits};
    together(members, compute, &task);
    return 1;
}

/* The texts so far, and the position of their window. */
struct generation {
    int64_t block_size, kept;   /* tokens of a window, and tokens kept of a full one */
    int64_t columns;            /* columns of `ids`: room for two windows */
    int64_t start, known, length; /* start and cached tokens of the window; length of the texts */
    int64_t *ids, *fresh;       /* (B, columns); new tokens of all windows, (B, block_size) */
    float *logits;              /* (B, V in whole panels) */
    double *sums;               /* (V) */
    double temperature;
};

struct stream {
    struct task task;
    struct generation *g;
    int64_t wanted, made;
    int is_finite;
    const double *uniforms; /* (wanted, B) */
    int64_t *out;           /* (wanted, B): given tokens, and -1 for tokens to draw */
};

/* Return the token where the running sum of exp((logit - largest) / temperature) passes a fraction of
   the whole; the likeliest one at temperature 0; -1 if a logit is not finite. The same sums in the same
   order as in generation/next_token.py. */
static int64_t choose(int64_t size, const float *logits, double temperature, double fraction,
                      double *sums)
{
    double sum = 0;
    int64_t likeliest = 0;
    for (int64_t v = 0; v < size; v++) {
        sum += logits[v];
        likeliest = logits[v] > logits[likeliest] ? v : likeliest;
    }
    if (!isfinite(sum))
        return -1;
    if (temperature == 0)
        return likeliest;
    sum = 0;
    for (int64_t v = 0; v < size; v++)
        sums[v] = sum += exp(((double)logits[v] - logits[likeliest]) / temperature);
    const double below = nextafter(sum, 0), wanted = fraction * sum < below ? fraction * sum : below;
    int64_t v = 0;
    while (sums[v] <= wanted)
        v++;
    return v;
}

/* Move a full window on, and collect the tokens that are not in the cache. */
static void before_token(struct stream *stream)
{
    struct generation *g = stream->g;
    struct task *task = &stream->task;
    if (g->length - g->start > g->block_size)
        g->start = g->length - g->kept, g->known = 0;
    task->known = g->known;
    task->count = g->length - g->start - g->known;
    for (int64_t s = 0; s < task->samples; s++)
        memcpy(g->fresh + s * task->count, g->ids + s * g->columns + g->start + g->known,
               task->count * sizeof(int64_t));
}

/* Append the next token to each text; with no room left, first drop what is before the window. */
static void after_token(struct stream *stream)
{
    struct generation *g = stream->g;
    const struct task *task = &stream->task;
    const int64_t size = task->model->vocab_size, at = stream->made * task->samples;
    g->known = g->length - g->start;
    if (g->length == g->columns) {
        for (int64_t s = 0; s < task->samples; s++)
            memmove(g->ids + s * g->columns, g->ids + s * g->columns + g->start,
                    g->known * sizeof(int64_t));
        g->start = 0, g->length = g->known;
    }
    for (int64_t s = 0; s < task->samples; s++) {
        int64_t id = stream->out[at + s];
        if (id < 0)
            id = choose(size, g->logits + s * task->model->head.outputs, g->temperature,
                        stream->uniforms[at + s], g->sums);
        if (id < 0) {
            stream->is_finite = 0;
            return;
        }
        stream->out[at + s] = g->ids[s * g->columns + g->length] = id;
    }
    g->length++, stream->made++;
}

static void continue_texts(struct member who, const void *about)
{
    struct stream *stream = (struct stream *)about;
    while (stream->is_finite && stream->made < stream->wanted) {
        if (who.number == 0)
            before_token(stream);
        barrier(who);
        compute(who, &stream->task);
        if (who.number == 0)
            after_token(stream);
        barrier(who);
    }
}

/* Continue texts by `wanted` tokens: those given in `out`, or drawn with the next of `uniforms`, in [0, 1),
   if `out` has -1. Return how many were made: fewer if logits are not finite, -1 if an id is not in the vocabulary. */
int64_t generate(const struct model *m, const struct memory *to, int64_t members, int64_t samples,
                 struct generation *g, int64_t wanted, const double *uniforms, int64_t *out)
{
    if (!are_ids(m, samples, g->length - g->start, g->ids + g->start, g->columns))
        return -1;
    struct stream stream = {{m, to, samples, 0, 0, g->fresh, g->logits}, g, wanted, 0, 1, uniforms, out};
    together(members, continue_texts, &stream);
    return stream.made;
}

const struct layout decoding_layouts[] = {
    STRUCT(map),
    FIELD(map, inputs), FIELD(map, outputs), FIELD(map, panels), FIELD(map, rows), FIELD(map, bias),
    STRUCT(block),
    FIELD(block, attention_norm), FIELD(block, mlp_norm), FIELD(block, query_gains),
    FIELD(block, key_gains), FIELD(block, qkv), FIELD(block, projection), FIELD(block, up),
    FIELD(block, down),
    STRUCT(model),
    FIELD(model, layers), FIELD(model, width), FIELD(model, vocab_size), FIELD(model, heads),
    FIELD(model, kv_heads), FIELD(model, size), FIELD(model, key_at), FIELD(model, value_at),
    FIELD(model, norm), FIELD(model, normed_heads), FIELD(model, residual), FIELD(model, mlp),
    FIELD(model, epsilon), FIELD(model, tokens), FIELD(model, positions), FIELD(model, token_maps),
    FIELD(model, position_maps), FIELD(model, cosines), FIELD(model, sines), FIELD(model, blocks),
    FIELD(model, last_norm), FIELD(model, head),
    STRUCT(memory),
    FIELD(memory, rows), FIELD(memory, capacity), FIELD(memory, stride),
    FIELD(memory, mixed_stride), FIELD(memory, keys), FIELD(memory, values), FIELD(memory, x),
    FIELD(memory, read), FIELD(memory, packed), FIELD(memory, mixed), FIELD(memory, hidden),
    FIELD(memory, query), FIELD(memory, scores), FIELD(memory, panel), FIELD(memory, panel_size),
    STRUCT(generation),
    FIELD(generation, block_size), FIELD(generation, kept), FIELD(generation, columns),
    FIELD(generation, start), FIELD(generation, known), FIELD(generation, length),
    FIELD(generation, ids), FIELD(generation, fresh), FIELD(generation, logits),
    FIELD(generation, sums), FIELD(generation, temperature),
    {NULL, 0, 0},
};
