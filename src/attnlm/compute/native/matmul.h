/* Matmuls of any sizes, with the factors in any layout. The columns of the second factor are copied to
   panels, whose rows are read one after another; the first factor is read in place. Each element is
   summed in the same order for any number of members (Goto and van de Geijn, 2008). */

#if LANES == 16
#define TALL 12
#elif LANES == 8
#define TALL 6
#else
#define TALL 4
#endif
#define SIDE 2 /* vectors of a panel */
#define PANEL (SIDE * LANES)
#define DEEP 256    /* the most steps of a panel */
#define COLUMNS 512 /* columns whose panels exist together; whole panels */
#define ROWS (8 * TALL)
#define MATMUL_SCRATCH (DEEP * (COLUMNS + ROWS)) /* numbers that each member needs */

#ifdef __clang__
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

/* Element (i, j) is at[i * row + j * column]; `row` or `column` is 1. */
struct matrix {
    const float *at;
    int64_t row, column;
};

/* c (rows, PANEL) = a (rows, deep) · panel (deep, PANEL) + bias, or += with `add`. `rows` is a constant
   at each call, so that the sums stay in registers. */
INLINE void matmul_tile(const int rows, int64_t deep, struct matrix a, const float *panel, float *c,
                        int64_t stride, const float *bias, int add)
{
    vector sums[TALL][SIDE] = {{{0}}};
    for (int64_t k = 0; k < deep; k++, panel += PANEL) {
        const vector left = load(panel), right = load(panel + LANES);
        UNROLLED
        for (int r = 0; r < rows; r++) {
            sums[r][0] += a.at[r * a.row + k * a.column] * left;
            sums[r][1] += a.at[r * a.row + k * a.column] * right;
        }
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int p = 0; p < SIDE; p++) {
            vector *place = (vector *)(c + r * stride + p * LANES), sum = sums[r][p];
            if (add)
                sum += *place;
            else if (bias)
                sum += load(bias + p * LANES);
            *place = sum;
        }
}

/* Copy (deep, width) of b to a panel, padded with zeros. */
static void fill_panel(struct matrix b, int64_t deep, int64_t width, float *panel)
{
    int64_t j = 0;
    if (b.column == 1 && width == PANEL) {
        for (int64_t k = 0; k < deep; k++)
            for (int p = 0; p < PANEL; p += LANES)
                *(vector *)(panel + k * PANEL + p) = load(b.at + k * b.row + p);
        return;
    }
    for (; b.row == 1 && j + 4 <= width; j += 4) {
        const float *from = b.at + j * b.column;
        int64_t k = 0;
        for (; k + 4 <= deep; k += 4) {
            const four a = *(four *)(from + k), c = *(four *)(from + b.column + k);
            const four d = *(four *)(from + 2 * b.column + k), e = *(four *)(from + 3 * b.column + k);
            for (int l = 0; l < 4; l++)
                *(four *)(panel + (k + l) * PANEL + j) = (four){a[l], c[l], d[l], e[l]};
        }
        for (; k < deep; k++)
            for (int l = 0; l < 4; l++)
                panel[k * PANEL + j + l] = from[l * b.column + k];
    }
    for (; j < PANEL; j++)
        for (int64_t k = 0; k < deep; k++)
            panel[k * PANEL + j] = j < width ? b.at[k * b.row + j * b.column] : 0;
}

/* Some rows of c, from one panel; the last panel may have fewer columns, `width`. */
INLINE void by_tiles(int64_t rows, int64_t deep, struct matrix a, const float *panel, int64_t width,
                     float *c, int64_t stride, const float *bias, int add)
{
    float edge[TALL * PANEL], edge_bias[PANEL] = {0};
    if (width < PANEL && bias)
        bias = memcpy(edge_bias, bias, width * sizeof(float));
#define TILES(few) \
    for (; rows >= few; rows -= few, a.at += few * a.row, c += few * stride) { \
        if (width == PANEL) { \
            matmul_tile(few, deep, a, panel, c, stride, bias, add); \
            continue; \
        } \
        for (int r = 0; add && r < few; r++) \
            memcpy(edge + r * PANEL, c + r * stride, width * sizeof(float)); \
        matmul_tile(few, deep, a, panel, edge, PANEL, bias, add); \
        for (int r = 0; r < few; r++) \
            memcpy(c + r * stride, edge + r * PANEL, width * sizeof(float)); \
    }
    TILES(TALL)
    TILES(2)
    TILES(1)
#undef TILES
}

/* Compute a member's part of c (rows, columns) = a (rows, deep) · b (deep, columns) + bias, or += with
   `add` and without bias. Rows of c are `stride` apart. `bias` may be NULL. */
static void matmul(struct member who, int64_t rows, int64_t columns, int64_t deep, struct matrix a,
                   struct matrix b, float *c, int64_t stride, const float *bias, int add,
                   float *scratch)
{
    const int64_t panels = (columns + PANEL - 1) / PANEL, tiles = (rows + TALL - 1) / TALL;
    struct range own_rows = {0, rows}, own = {0, columns};
    if (panels >= 2 * who.team->members || panels >= tiles) {
        own = share(who, panels);
        own = (struct range){own.begin * PANEL, own.end * PANEL < columns ? own.end * PANEL : columns};
    } else {
        own_rows = share(who, tiles);
        own_rows.begin *= TALL;
        own_rows.end = own_rows.end * TALL < rows ? own_rows.end * TALL : rows;
    }
    const int64_t pieces = (deep + DEEP - 1) / DEEP, most = (deep + pieces - 1) / pieces;
    for (int64_t j = own.begin; j < own.end; j += COLUMNS)
        for (int64_t k = 0; k < deep; k += most) {
            const int64_t end = j + COLUMNS < own.end ? j + COLUMNS : own.end;
            const int64_t some = deep - k < most ? deep - k : most;
            for (int64_t p = j; p < end; p += PANEL) {
                struct matrix from = {b.at + k * b.row + p * b.column, b.row, b.column};
                fill_panel(from, some, end - p < PANEL ? end - p : PANEL, scratch + (p - j) * DEEP);
            }
            for (int64_t i = own_rows.begin; i < own_rows.end; i += ROWS) {
                const int64_t left = own_rows.end - i < ROWS ? own_rows.end - i : ROWS;
                struct matrix rest = {a.at + i * a.row + k * a.column, a.row, a.column};
                if (a.column != 1) {
                    float *copy = scratch + DEEP * COLUMNS;
                    for (int64_t l = 0; l < some; l++)
                        if (left == ROWS)
                            memcpy(copy + l * ROWS, rest.at + l * a.column, ROWS * sizeof(float));
                        else
                            memcpy(copy + l * ROWS, rest.at + l * a.column, left * sizeof(float));
                    rest = (struct matrix){copy, 1, ROWS};
                }
                for (int64_t p = j; p < end; p += PANEL) {
                    const int64_t width = end - p < PANEL ? end - p : PANEL;
                    const float *panel = scratch + (p - j) * DEEP, *more = bias ? bias + p : NULL;
                    float *to = c + i * stride + p;
                    if (a.column == 1)
                        by_tiles(left, some, (struct matrix){rest.at, a.row, 1}, panel, width, to, stride,
                                 more, add || k);
                    else
                        by_tiles(left, some, (struct matrix){rest.at, 1, ROWS}, panel, width, to, stride,
                                 more, add || k);
                }
            }
        }
}
