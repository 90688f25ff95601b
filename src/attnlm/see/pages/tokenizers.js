"use strict";
/* Text to token ids and back, as attnlm's tokenizers do: characters, bytes, and byte pairs. */

/* Raised where a text has characters that the vocabulary lacks. */
class TextError extends Error {}

function newTokenizer(described) {
  return {char: CharTokenizer, bytes: ByteTokenizer, pairs: PairTokenizer}[described.kind].from(described);
}

class CharTokenizer {
  static from({characters}) {
    const made = new CharTokenizer();
    made.characters = [...characters];
    made.idOf = new Map(made.characters.map((character, id) => [character, id]));
    return made;
  }

  encode(text) {
    const lacking = new Set([...text].filter((character) => !this.idOf.has(character)));
    if (lacking.size) throw new TextError(`The vocabulary lacks ${[...lacking].slice(0, 5).map((c) => `“${c}”`).join(", ")}.`);
    return Array.from(text, (character) => this.idOf.get(character));
  }

  decode(ids) { return Array.from(ids, (id) => this.characters[id]).join(""); }
}

class ByteTokenizer {
  static from() { return new ByteTokenizer(); }

  encode(text) { return Array.from(new TextEncoder().encode(text)); }

  decode(ids) { return textOf(Uint8Array.from(ids)); }
}

/* Byte-pair encoding: within each word that the pattern finds, the pair of neighbours whose bytes together have
   the lowest rank is merged, again and again. Bytes are strings of characters U+0000 to U+00FF here; U+0100 is
   between the tokens of a vocabulary. */
class PairTokenizer {
  static from({tokens, pattern, special, nfc}) {
    const made = new PairTokenizer();
    made.tokens = tokens.split("\u0100");
    made.rankOf = new Map();
    made.tokens.forEach((token, id) => token !== "" && made.rankOf.set(token, id));
    made.special = new Map(Object.entries(special));
    for (const [text, id] of made.special) made.tokens[id] = byteString(text);
    const escaped = [...made.special.keys()].map((text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    made.splitter = new RegExp(`(${escaped.join("|") || "(?!)"})`, "u");
    made.pattern = new RegExp(pattern, "gu");
    made.nfc = nfc;
    return made;
  }

  encode(text) {
    return text.split(this.splitter).flatMap((part, number) => {
      if (number % 2) return [this.special.get(part)];
      const words = (this.nfc ? part.normalize("NFC") : part).match(this.pattern) ?? [];
      return words.flatMap((word) => this.merged(byteString(word)));
    });
  }

  merged(bytes) {
    if (this.rankOf.has(bytes)) return [this.rankOf.get(bytes)];
    const parts = [...bytes];
    for (;;) {
      let best = Infinity, at = -1;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.rankOf.get(parts[i] + parts[i + 1]) ?? Infinity;
        if (rank < best) [best, at] = [rank, i];
      }
      if (at < 0) return parts.map((part) => this.rankOf.get(part));
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }

  decode(ids) {
    const bytes = Array.from(ids, (id) => this.tokens[id] ?? "").join("");
    return textOf(Uint8Array.from(bytes, (sign) => sign.charCodeAt(0)));
  }
}

function byteString(text) { return Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join(""); }

function textOf(bytes) { return new TextDecoder("utf-8", {ignoreBOM: true}).decode(bytes); } // U+FEFF stays

/* The models of a page: the tensors of all of a model's weights lie in one string, in base64. */
function unpackModels(described) {
  return described.map(({name, architecture, shapes, type, weights, tokenizer, first}) => {
    const {buffer} = bytesOf(weights), numbers = type === "f16" ? fromHalves(new Uint16Array(buffer)) : new Float32Array(buffer);
    const tensors = {};
    let start = 0;
    for (const [tensor, shape] of Object.entries(shapes)) {
      const end = start + shape.reduce((count, size) => count * size, 1);
      tensors[tensor] = {shape, values: numbers.subarray(start, end)};
      start = end;
    }
    const model = new Model({name, architecture, weights: tensors, tokenizer: newTokenizer(tokenizer)});
    model.first = first; // the id that stands for an empty text
    return model;
  });
}

/* IEEE 754 half precision to single, of finite numbers: sign, 5 bits of exponent, 10 of fraction. */
function fromHalves(halves) {
  const valueOf = Float32Array.from({length: 2 ** 16}, (_, half) => {
    const sign = half >> 15 ? -1 : 1, exponent = (half >> 10) & 31, fraction = (half & 1023) / 1024;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
  });
  const values = new Float32Array(halves.length);
  for (let i = 0; i < values.length; i++) values[i] = valueOf[halves[i]];
  return values;
}
