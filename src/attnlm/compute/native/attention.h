/* Attention of a team's member, for attention.c and block.c. */

/* A tensor (B, H, T, D) with its strides, in numbers, between windows, heads and tokens. */
struct heads {
    float *data;
    int64_t window, head, token;
};

struct attention {
    int64_t windows, heads, kv_heads, length, size;
    float scale;
    struct heads query, key, value, out;
    float *log_sums; /* log Σ exp(score) of each query, (B, H, T) */
    struct heads d_query, d_key, d_value, d_out; /* gradients, for the backward pass */
    float *scratch;
};

/* Compute a member's key/value heads: forward, or backward if `d_out` has data. The argument is a
   struct attention, whose `scratch` has attention_scratch(length, size) numbers for each member. */
void attend_groups(struct member self, const void *attention);
int64_t attention_scratch(int64_t length, int64_t size);
