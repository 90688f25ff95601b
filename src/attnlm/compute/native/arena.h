/* Memory that is divided among arrays. If `base` is NULL, it only counts how much they need. */
struct arena {
    float *base;
    int64_t used;
};

INLINE float *take(struct arena *arena, int64_t count)
{
    float *here = arena->base ? arena->base + arena->used : NULL;
    arena->used += round_up(count);
    return here;
}
