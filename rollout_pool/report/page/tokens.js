// A sample's text as tokens, tinted by how unlikely each was.

const FAR = 24; // characters within which a token's text must turn up again

/**
 * Lays tokens over a text: [{text, from, to}] with places of tokens, `to` excluded. A text is not the
 * plain sum of its tokens: characters may be spread over several, special ones and a stop string are
 * left out, spaces cleaned up. What has no place in the text has `isBeside` set.
 */
function layTokens(text, ids, pieces, special) {
  const spans = [];
  let at = 0, pending = 0, seen = 0;
  const flush = (end, upTo) => {
    if (pending < upTo) spans.push({ text: text.slice(at, end), from: pending, to: upTo, isBeside: end === at });
    at = end;
    pending = upTo;
  };
  for (; seen < ids.length; seen++) {
    let piece = pieces[ids[seen]];
    if (at === 0 && pending === seen && !text.startsWith(piece)) piece = piece.trimStart();
    if (special.has(ids[seen]) && !text.startsWith(piece, at)) {
      flush(at, seen);
      spans.push({ text: piece, from: seen, to: seen + 1, isBeside: true });
      pending = seen + 1;
      continue;
    }
    if (!piece || piece.includes("\uFFFD")) continue;
    const found = text.indexOf(piece, at);
    if (found < 0 || found > at + (pending < seen ? FAR : 0)) continue;
    flush(found, seen);
    flush(found + piece.length, seen + 1);
  }
  flush(text.length, seen);
  for (const span of spans) {
    if (span.isBeside && !span.text) span.text = ids.slice(span.from, span.to).reduce((sum, id) => sum + pieces[id], "");
  }
  return spans;
}

/** How strongly a token is tinted: nothing when it was certain. */
function strength(logprob) {
  return Number.isNaN(logprob) ? 0.9 : 0.85 * (1 - Math.exp(logprob / 1.7));
}

/** The tinted text of one row. */
function tokenView(row, samples, texts) {
  const view = make("div");
  const text = texts.of(row, samples), first = texts.offsets.get(row);
  if (first === undefined) {
    view.append(make("p", "text full fault", text));
    return view;
  }
  const ids = texts.tokens.subarray(first, first + samples.length[row]);
  const tinted = (content, from, to, className) => {
    const span = make("span", className, content);
    let lowest = 0;
    for (let place = from; place < to; place++) {
      const logprob = texts.logprob(first + place);
      lowest = Number.isNaN(logprob) ? NaN : Math.min(lowest, logprob);
    }
    span.style.setProperty("--strength", strength(lowest).toFixed(3));
    span.dataset.from = first + from;
    span.dataset.to = first + to;
    return span;
  };
  if (texts.pieces) {
    const body = make("p", "text full");
    for (const { text: content, from, to, isBeside } of layTokens(text, ids, texts.pieces, texts.special)) {
      body.append(tinted(content, from, to, isBeside ? "token beside" : "token"));
    }
    view.append(body);
  } else {
    const strip = make("div", "strip");
    ids.forEach((_, place) => strip.append(tinted("", place, place + 1, "token")));
    view.append(make("p", "text full", text), strip);
  }
  return view;
}

/** Shows what a token was, at the pointer or the finger. */
function startTokenTips(texts) {
  const tip = $("tip");
  const show = (event) => {
    const token = event.target.closest?.(".token");
    tip.hidden = !token;
    if (!token) return;
    const lines = [];
    for (let place = Number(token.dataset.from); place < Number(token.dataset.to) && lines.length < 6; place++) {
      const id = texts.tokens[place], logprob = texts.logprob(place);
      const piece = texts.pieces ? JSON.stringify(texts.pieces[id]) + "  " : "";
      const chance = Number.isNaN(logprob) ? "not finite" : `${logprob.toFixed(3)} nats, p ${Math.exp(logprob).toPrecision(3)}`;
      lines.push(`${piece}id ${texts.ids[id]}  ${chance}`);
    }
    tip.textContent = lines.join("\n");
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 8)) + "px";
    tip.style.top = (event.clientY + box.height + 24 < innerHeight ? event.clientY + 16 : event.clientY - box.height - 12) + "px";
  };
  document.addEventListener("pointerover", show);
  document.addEventListener("pointerdown", show);
}
