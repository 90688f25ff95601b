/* What one query gathers from keys and values that are remembered: attention, a token at a time. Keys
   lie as (S/LANES, D, LANES), values as (S, D); D head size, S tokens. */

/* What lies at `x`; what lies `ahead` of it, if anything, is fetched for later. */
INLINE vector load_ahead(const float *x, int64_t ahead)
{
    if (ahead)
        __builtin_prefetch(x + ahead, 0, 2);
    return load(x);
}

/* The scores of `parts` vectors of tokens. */
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

/* `parts` vectors of what the values of all visible tokens make, by their scores; `room` numbers. */
INLINE void mix(const int parts, int64_t size, int64_t visible, const float *scores,
                const float *values, int64_t ahead, float share, float *mixed, int64_t room)
{
    vector sums[4][4] = {{{0}}}; /* of every fourth token */
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

/* What a query gathers from the first `visible` tokens: softmax(keysᵀ query) · values. The next keys
   and values that are asked for lie `ahead` of these. */
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
