// Puts the page together: figures and charts first, texts when they are there.

function fillHeader(overview) {
  const { facts, num_groups, num_prompts } = overview;
  const state = $("state");
  state.textContent = overview.is_over ? "finished" : "not finished";
  state.style.setProperty("--chip", overview.is_over ? "var(--stop)" : "var(--length)");
  const parts = [];
  if (facts.model) parts.push(facts.model.split("/").pop());
  if (facts.num_actors) parts.push(`${facts.num_actors} × ${facts.num_slots} slots`, `layout ${facts.layout}`);
  if (facts.tensor_parallel_size > 1) parts.push(`tensor parallel ${facts.tensor_parallel_size}`);
  $("facts").textContent = parts.join(" · ");
  for (const note of overview.notes) $("notes").append(make("li", "", note));
  if (num_prompts === null || num_groups === num_prompts) return;
  $("state").textContent += `: ${num_groups} of ${num_prompts} groups`;
}

function fillTiles(overview, samples) {
  const { prefill, totals } = overview;
  const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
  const tile = (value, label, isBad) => {
    const view = make("div", isBad ? "tile bad" : "tile");
    view.append(make("b", "", value), make("span", "", label));
    $("tiles").append(view);
  };
  tile(number(overview.num_groups), "groups");
  tile(number(overview.num_samples), "samples");
  tile(number(overview.num_tokens), "new tokens");
  if (overview.points.length) {
    tile(number((totals.new_tokens || 0) / Math.max(overview.seconds, 1e-3)), "tokens/s");
    tile(clock(overview.seconds), `on ${overview.actors.length} actors, up in ${clock(overview.load_s)}`);
  }
  if (overview.rows_per_step) tile(overview.rows_per_step.toFixed(1), `rows per decode step, of ${overview.facts.num_slots}`);
  if (prefill.computed) {
    const share = (100 * prefill.saved) / Math.max(prefill.saved + prefill.computed, 1);
    tile(`${share.toFixed(0)} %`, `of prompt tokens saved: ${number(prefill.saved)}`);
  }
  if (samples.hasRewards) {
    const known = samples.reward.filter((reward) => reward !== null);
    tile((known.reduce((sum, reward) => sum + reward, 0) / known.length).toFixed(3), "mean reward");
  }
  if (overview.num_failed) tile(number(overview.num_failed), "groups failed", true);
  const lost = overview.incidents.filter(([, kind]) => kind === "lost").length;
  if (lost) tile(number(lost), "times actors were lost", true);
}

async function start() {
  startTheme();
  const overview = await inflateJson("overview");
  const samples = new Samples(overview.columns, overview.reasons);
  let browser = null;
  fillHeader(overview);
  fillTiles(overview, samples);
  $("timeline").hidden = !overview.actors.length;
  if (overview.actors.length) new TimelineView(overview, samples, (group, sample) => browser?.show(group, sample));
  startDistributions(samples, (reason) => browser?.showReason(reason));
  await new Promise((done) => setTimeout(done)); // lets the browser paint
  const [texts, ids, logprobs] = await Promise.all([inflateJson("texts"), inflate("ids"), inflate("logprobs")]);
  browser = new SampleBrowser(samples, new Texts(texts, ids, logprobs, samples));
  document.documentElement.dataset.ready = "true";
}

start();
