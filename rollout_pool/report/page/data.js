"use strict";
// The data of the page: compressed blobs in script elements that no browser runs.

const NO_LOGPROB = 65535;
const $ = (id) => document.getElementById(id);

/** The bytes of one blob. */
async function inflate(name) {
  const element = $("blob-" + name);
  const packed = atob(element.textContent);
  element.remove();
  const bytes = new Uint8Array(packed.length);
  for (let at = 0; at < packed.length; at++) bytes[at] = packed.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

async function inflateJson(name) {
  return JSON.parse(new TextDecoder().decode(await inflate(name)));
}

/** Samples as columns; a row is a sample, or a group that has none. */
class Samples {
  constructor(columns, reasons) {
    Object.assign(this, columns);
    this.reasons = reasons;
    this.size = this.group.length;
    this.hasRewards = this.reward.some((reward) => reward !== null);
    this.firstOf = new Map();
    for (let row = this.size - 1; row >= 0; row--) this.firstOf.set(this.group[row], row);
  }

  reasonOf(row) {
    return this.reasons[this.finish[row]];
  }

  /** The rows of one group: they stand together. */
  rowsOf(group) {
    const rows = [];
    for (let row = this.firstOf.get(group); this.group[row] === group; row++) rows.push(row);
    return rows;
  }

  rowOf(group, sample) {
    return this.firstOf.has(group) ? this.rowsOf(group).find((row) => this.sample[row] === sample) : undefined;
  }
}

/** Prompts, texts and tokens, which arrive after the first picture. */
class Texts {
  constructor(texts, ids, logprobs, samples) {
    this.ids = texts.ids;
    this.pieces = texts.pieces;
    this.special = new Set(texts.special);
    this.groups = new Map();
    this.offsets = new Map();
    const width = texts.ids.length <= 65536 ? Uint16Array : Uint32Array;
    this.tokens = new width(ids);
    this.logprobs = new Uint16Array(logprobs);
    let offset = 0;
    for (const group of texts.groups) {
      this.groups.set(group.index, group);
      if (!group.texts.length) continue;
      for (const row of samples.rowsOf(group.index)) {
        this.offsets.set(row, offset);
        offset += samples.length[row];
      }
    }
  }

  /** What a row says: its text, or why its group has none. */
  of(row, samples) {
    const group = this.groups.get(samples.group[row]);
    if (!group) return "";
    return group.texts.length ? group.texts[row - samples.firstOf.get(group.index)] : group.error || "";
  }

  logprob(place) {
    const packed = this.logprobs[place];
    return packed === NO_LOGPROB ? NaN : -packed / 1000;
  }
}

function promptText(prompt) {
  if (typeof prompt === "string") return prompt;
  return prompt.map((item) => (typeof item === "object" ? String(item.content) : item)).join(" ");
}

/** 4.25 s, 31 s, 2:05, 1:00:07. */
function clock(seconds) {
  if (seconds < 60) return Number(seconds.toFixed(seconds < 10 ? 2 : 1)) + " s";
  const two = (value) => String(Math.floor(value) % 60).padStart(2, "0");
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes}:${two(seconds)}` : `${Math.floor(minutes / 60)}:${two(minutes)}:${two(seconds)}`;
}

/** An element with a class and text; text is never read as HTML. */
function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}
