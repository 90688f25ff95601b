/* The tokenizers of attnlm: characters, bytes, byte pairs and numbers. */

/* Thrown for characters that the vocabulary lacks, and for texts that a model can't be trained on. */
export class TextError extends Error {}

export function newTokenizer(data) {
  const kinds = {char: CharTokenizer, bytes: ByteTokenizer, pairs: PairTokenizer, ids: IdTokenizer};
  return new kinds[data.kind](data);
}

/* Encode a text, in which `end`, the special text at the end of records, has the id `id`. */
function encodeParts(text, end, id, encode) {
  return end ? text.split(end).flatMap((part, i) => [...(i ? [id] : []), ...encode(part)]) : encode(text);
}

class CharTokenizer {
  constructor({characters, end}) {
    this.characters = [...characters];
    this.idOf = new Map(this.characters.map((character, id) => [character, id]));
    this.end = end;
    if (end) this.characters.push(end);
  }

  encode(text) { return encodeParts(text, this.end, this.characters.length - 1, (part) => this.encodeOrdinary(part)); }

  encodeOrdinary(text) {
    const missing = [...new Set(text)].filter((character) => !this.idOf.has(character));
    const quoted = missing.slice(0, 5).map((character) => `“${character}”`).join(", ");
    if (missing.length) throw new TextError(`The vocabulary lacks ${quoted}.`);
    return Array.from(text, (character) => this.idOf.get(character));
  }

  decode(ids) { return Array.from(ids, (id) => this.characters[id]).join(""); }
}

class ByteTokenizer {
  constructor({end}) { this.end = end; }

  encode(text) { return encodeParts(text, this.end, 256, bytesOfText); }

  decode(ids) {
    return textOf(Uint8Array.from(Array.from(ids).flatMap((id) => id < 256 ? id : bytesOfText(this.end))));
  }
}

/* Ids that stand for no text, written as numbers: “ 3 1 4”. */
class IdTokenizer {
  constructor({size}) { this.size = size; }

  encode(text) {
    const words = text.match(/\S+/g) ?? [];
    const wrong = words.find((word) => !/^[0-9]{1,9}$/.test(word) || Number(word) >= this.size);
    if (wrong !== undefined) throw new TextError(`“${wrong}” is no id from 0 to ${this.size - 1}.`);
    return words.map(Number);
  }

  decode(ids) { return Array.from(ids, (id) => ` ${id}`).join(""); }
}

function bytesOfText(text) { return Array.from(new TextEncoder().encode(text)); }

/* Byte-pair encoding: in each word that the pattern finds, merge the neighbours whose bytes together have the lowest
   rank, until none has a rank. Bytes are characters U+0000 to U+00FF; U+0100 separates the tokens of a vocabulary. */
class PairTokenizer {
  constructor({tokens, pattern, special, nfc}) {
    this.tokens = tokens.split("\u0100");
    this.rankOf = new Map();
    this.tokens.forEach((token, id) => token !== "" && this.rankOf.set(token, id));
    this.special = new Map(Object.entries(special));
    for (const [text, id] of this.special) this.tokens[id] = byteString(text);
    const escaped = [...this.special.keys()].map((text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    this.splitter = new RegExp(`(${escaped.join("|") || "(?!)"})`, "u");
    this.pattern = new RegExp(pattern, "gu");
    this.nfc = nfc;
  }

  encode(text) {
    return text.split(this.splitter).flatMap((part, number) => {
      if (number % 2) return [this.special.get(part)];
      const words = (this.nfc ? part.normalize("NFC") : part).match(this.pattern) ?? [];
      return words.flatMap((word) => this.merge(byteString(word)));
    });
  }

  /* Return the ids of a word. */
  merge(bytes) {
    if (this.rankOf.has(bytes)) return [this.rankOf.get(bytes)];
    const parts = [...bytes];
    for (;;) {
      let lowest = Infinity;
      let at = -1;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.rankOf.get(parts[i] + parts[i + 1]) ?? Infinity;
        if (rank < lowest) {
          lowest = rank;
          at = i;
        }
      }
      if (at < 0) return parts.map((part) => this.rankOf.get(part));
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }

  decode(ids) {
    const bytes = Array.from(ids, (id) => this.tokens[id] ?? "").join("");
    return textOf(Uint8Array.from(bytes, (character) => character.charCodeAt(0)));
  }
}

function byteString(text) {
  return bytesOfText(text).map((byte) => String.fromCharCode(byte)).join("");
}

function textOf(bytes) { return new TextDecoder("utf-8", {ignoreBOM: true}).decode(bytes); } // U+FEFF stays
