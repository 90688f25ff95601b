/* A table of the distinct words of a text, so that each is encoded only once. tokens/word_table.py
   defines the boundaries of words. */

#include <string.h>

#include "layout.h"

struct words {
    int64_t most_words, most_bytes, slots; /* slots: a power of two above twice most_words */
    uint64_t keys[2]; /* of the hash; the second is odd */
    int64_t *words;      /* number of words */
    int64_t *word_at;    /* offset of each word in `bytes`, and the last word's end */
    int64_t *ids_at;     /* offset of each word in `ids`, and the last word's end */
    int32_t *slot;       /* a word's number plus one, or 0 */
    uint64_t *hashes;
    const uint8_t *ends; /* by byte: 0, or the next bytes before which a word ends */
    uint8_t *bytes;
    uint32_t *ids;
};

enum { BEFORE_SPACE = 1, BEFORE_ANY_WHITESPACE = 2 };

static int is_whitespace(uint8_t byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

/* Return nonzero if a word ends between two bytes. */
static int is_boundary(const struct words *w, uint8_t before, uint8_t after)
{
    int ends = w->ends[before];
    return ends && is_whitespace(after) && (after == ' ' || ends == BEFORE_ANY_WHITESPACE);
}

static int64_t next_boundary(const struct words *w, const uint8_t *text, int64_t at, int64_t size)
{
    while (++at < size && !is_boundary(w, text[at - 1], text[at]))
        ;
    return at;
}

/* Return a word's hash. Both keys are random, so that no text can make many words collide. The halves of
   each product are folded, as in wyhash: the low bits of a product do not depend on a word's end. */
static uint64_t hash(const uint8_t *word, int64_t size, const uint64_t *keys)
{
    uint64_t value = keys[0] ^ (uint64_t)size, eight = 0;
    for (; size > 0; word += 8, size -= 8, eight = 0) {
        memcpy(&eight, word, size < 8 ? (size_t)size : 8);
        const unsigned __int128 product = (unsigned __int128)(value ^ eight) * keys[1];
        value = (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    return value;
}

static int append(struct words *w, const uint8_t *word, int64_t size, uint64_t value)
{
    int64_t n = *w->words, at = w->word_at[n];
    if (n == w->most_words || at + size > w->most_bytes)
        return 0;
    memcpy(w->bytes + at, word, (size_t)size);
    w->hashes[n] = value;
    w->word_at[n + 1] = at + size;
    *w->words = n + 1;
    return 1;
}

/* Return a word's number, or -1 if the table is full. New words are stored and encoded consecutively,
   with a filler between two words that would otherwise merge. */
static int64_t number_of(struct words *w, int64_t known, const uint8_t *word, int64_t size)
{
    uint64_t value = hash(word, size, w->keys), mask = (uint64_t)w->slots - 1;
    uint64_t s = value & mask;
    for (; w->slot[s]; s = (s + 1) & mask) {
        int64_t n = w->slot[s] - 1;
        if (w->hashes[n] == value && w->word_at[n + 1] - w->word_at[n] == size &&
            !memcmp(w->bytes + w->word_at[n], word, (size_t)size))
            return n;
    }
    int64_t n = *w->words;
    if (n > known && !is_boundary(w, w->bytes[w->word_at[n] - 1], word[0]) &&
        !append(w, (const uint8_t *)" a", 2, 0))
        return -1;
    if (!append(w, word, size, value))
        return -1;
    w->slot[s] = (int32_t)*w->words;
    return *w->words - 1;
}

/* Write the numbers of the words between a text's first and last boundary to `numbers`, and the offsets
   of both boundaries to `span`. Return the number of words, or -1 if the table is full. */
int64_t find_words(struct words *w, const uint8_t *text, int64_t size, int32_t *numbers, int64_t *span)
{
    int64_t known = *w->words, count = 0, at = next_boundary(w, text, 0, size);
    span[0] = at;
    for (int64_t end; (end = next_boundary(w, text, at, size)) < size; at = end) {
        int64_t number = number_of(w, known, text + at, end - at);
        if (number < 0)
            return -1;
        numbers[count++] = (int32_t)number;
    }
    span[1] = at;
    return count;
}

/* Write the ids of words by their numbers. Return the number of ids. */
int64_t copy_ids(const struct words *w, int64_t count, const int32_t *numbers, uint32_t *ids)
{
    uint32_t *next = ids;
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = w->ids_at[numbers[i]]; j < w->ids_at[numbers[i] + 1]; j++)
            *next++ = w->ids[j];
    return next - ids;
}

const struct layout words_layouts[] = {
    STRUCT(words),
    FIELD(words, most_words), FIELD(words, most_bytes), FIELD(words, slots), FIELD(words, keys),
    FIELD(words, words), FIELD(words, word_at), FIELD(words, ids_at), FIELD(words, slot),
    FIELD(words, hashes), FIELD(words, ends), FIELD(words, bytes), FIELD(words, ids),
    {NULL, 0, 0},
};
