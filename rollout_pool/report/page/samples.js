// The list of samples, of which only the visible rows exist, and the group that is open.

const ROW_HEIGHT = 64; // as in page.css

const ORDERS = {
  prompt: (samples, row) => samples.group[row] * 1e6 + samples.sample[row],
  longest: (samples, row) => -samples.length[row],
  shortest: (samples, row) => samples.length[row],
  unlikely: (samples, row) => samples.logprob[row] ?? Infinity,
  best: (samples, row) => -(samples.reward[row] ?? -Infinity),
  worst: (samples, row) => samples.reward[row] ?? Infinity,
};

class SampleBrowser {
  constructor(samples, texts) {
    Object.assign(this, { samples, texts, open: null });
    const present = new Set(samples.finish);
    samples.reasons.forEach((reason, place) => present.has(place) && $("reason").append(new Option(reason, reason)));
    if (!samples.hasRewards) $("order").querySelectorAll("[value=best],[value=worst]").forEach((option) => option.remove());
    this.shown = Array.from({ length: samples.size }, (_, row) => row).filter((row) => texts.groups.has(samples.group[row]));
    this.all = this.shown;
    for (const id of ["reason", "order"]) $(id).addEventListener("change", () => this.filter());
    let timer;
    $("search").addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.filter(), 120);
    });
    $("list").addEventListener("scroll", () => this.draw(), { passive: true });
    $("list").addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe($("list"));
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    startTokenTips(texts);
    this.filter();
    if (innerWidth > 800 && this.shown.length) this.choose(this.shown[0]);
  }

  showReason(reason) {
    $("reason").value = reason;
    this.filter();
    $("samples").scrollIntoView({ behavior: "smooth" });
  }

  filter() {
    const { samples, texts } = this;
    const wanted = $("search").value.trim().toLowerCase(), reason = $("reason").value;
    const hits = new Map(); // whether a group's prompt has it
    const isIn = (row) => {
      const group = samples.group[row];
      if (!hits.has(group)) hits.set(group, promptText(texts.groups.get(group).prompt).toLowerCase().includes(wanted));
      return hits.get(group) || texts.of(row, samples).toLowerCase().includes(wanted);
    };
    this.shown = this.all.filter((row) => (!reason || samples.reasonOf(row) === reason) && (!wanted || isIn(row)));
    const key = ORDERS[$("order").value];
    const keys = new Map(this.shown.map((row) => [row, key(samples, row)]));
    this.shown.sort((a, b) => keys.get(a) - keys.get(b) || a - b);
    $("count").textContent = `${this.shown.length.toLocaleString("en")} of ${this.all.length.toLocaleString("en")}`;
    $("rows").style.height = this.shown.length * ROW_HEIGHT + "px";
    $("list").scrollTop = 0;
    this.draw();
  }

  draw() {
    const { scrollTop, clientHeight } = $("list");
    const first = Math.max(0, Math.floor(scrollTop / ROW_HEIGHT) - 4);
    const last = Math.min(this.shown.length, Math.ceil((scrollTop + clientHeight) / ROW_HEIGHT) + 4);
    $("rows").replaceChildren(...this.shown.slice(first, last).map((row, place) => this.rowView(row, first + place)));
  }

  rowView(row, place) {
    const { samples, texts } = this;
    const view = make("button", "row");
    view.type = "button";
    view.tabIndex = -1;
    view.style.top = place * ROW_HEIGHT + "px";
    view.setAttribute("aria-current", String(row === this.open));
    view.append(figures(row, samples), make("span", "text", texts.of(row, samples).slice(0, 160).replace(/\s+/g, " ")));
    view.addEventListener("click", () => this.choose(row));
    return view;
  }

  onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !this.shown.length) return;
    event.preventDefault();
    const place = Math.max(0, Math.min(this.shown.length - 1, this.shown.indexOf(this.open) + step));
    this.choose(this.shown[place]);
    const list = $("list"), top = place * ROW_HEIGHT;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
  }

  /** Open a sample by its names, from elsewhere on the page. */
  show(group, sample) {
    const row = this.samples.rowOf(group, sample);
    if (row === undefined || !this.texts.groups.has(group)) return;
    this.choose(row);
    $("samples").scrollIntoView({ behavior: "smooth" });
  }

  close() {
    $("group").hidden = innerWidth <= 800;
  }

  choose(row) {
    const { samples, texts } = this;
    this.open = row;
    this.draw();
    const group = texts.groups.get(samples.group[row]);
    const view = $("group");
    const head = make("div", "head");
    const close = make("button", "close", "✕ close");
    close.addEventListener("click", () => this.close());
    const scale = make("span", "dim", "likely ");
    scale.append(make("span", "scale"), " unlikely");
    head.append(make("h2", "", `Prompt ${group.index}`), close, make("span", "dim", `${group.prompt_tokens} tokens`), scale);
    const siblings = make("div", "siblings");
    const lazily = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        lazily.unobserve(target);
        target.append(tokenView(target.row, samples, texts));
      }
    }, { root: view, rootMargin: "600px" });
    for (const sibling of group.texts.length ? samples.rowsOf(group.index) : []) {
      const card = make("section", sibling === row ? "sibling chosen" : "sibling");
      card.row = sibling;
      card.append(figures(sibling, samples));
      siblings.append(card);
      lazily.observe(card);
    }
    view.replaceChildren(head, promptView(group.prompt), ...extras(group), siblings);
    view.hidden = false;
    view.scrollTop = 0;
    const chosen = siblings.querySelector(".chosen");
    if (chosen) siblings.scrollLeft = chosen.offsetLeft - siblings.offsetLeft;
  }
}

/** A line of figures about one row. */
function figures(row, samples) {
  const line = make("span", "line");
  const isSample = samples.sample[row] >= 0, reason = samples.reasonOf(row);
  line.append(make("b", "", isSample ? `${samples.group[row]} · ${samples.sample[row]}` : `${samples.group[row]}`));
  const chip = make("span", "chip", reason);
  chip.style.setProperty("--chip", `var(--${reason})`);
  line.append(chip);
  if (isSample) line.append(make("span", "", `${samples.length[row]} tokens`));
  if (samples.logprob[row] !== null) line.append(make("span", "", `${samples.logprob[row].toFixed(2)} nats`));
  if (samples.reward[row] !== null) line.append(make("span", "", `reward ${samples.reward[row]}`));
  return line;
}

function promptView(prompt) {
  const view = make("div", "prompt");
  const isChat = Array.isArray(prompt) && typeof prompt[0] === "object";
  for (const message of isChat ? prompt : [{ content: promptText(prompt) }]) {
    if (message.role) view.append(make("span", "role", message.role));
    view.append(make("pre", "", typeof message.content === "string" ? message.content : JSON.stringify(message.content)));
  }
  return view;
}

function extras(group) {
  const parts = [];
  if (group.error) parts.push(make("p", "fault", group.error));
  if (group.metadata) {
    const details = make("details");
    details.append(make("summary", "dim", "metadata"), make("pre", "", group.metadata));
    parts.push(details);
  }
  return parts;
}
