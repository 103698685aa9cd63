// Histograms over all samples.

const NUM_BINS = 24;

function startDistributions(samples, onReason) {
  const all = Array.from({ length: samples.size }, (_, row) => row).filter((row) => samples.sample[row] >= 0);
  const whole = (row) => samples.length[row];
  startChart("lengths-chart", () => histogram(samples, all, whole, true));
  startChart("logprobs-chart", () => histogram(samples, all, (row) => samples.logprob[row], false));
  $("rewards").hidden = !samples.hasRewards;
  if (samples.hasRewards) startChart("rewards-chart", () => histogram(samples, all, (row) => samples.reward[row], false));
  const { chart } = startChart("reasons-chart", () => reasonBars(samples));
  chart.on("click", ({ name }) => onReason(name));
}

/** Counts per bin, one series per finish reason that occurs. */
function histogram(samples, rows, valueOf, isWhole) {
  const known = rows.filter((row) => valueOf(row) !== null);
  let [low, high] = range(known.map(valueOf));
  if (!known.length) [low, high] = [0, 1];
  if (high === low) high = low + 1;
  const width = isWhole ? Math.max(1, Math.ceil((high - low + 1) / NUM_BINS)) : (high - low) / NUM_BINS;
  const numBins = isWhole ? Math.ceil((high - low + 1) / width) : NUM_BINS;
  const labels = Array.from({ length: numBins }, (_, bin) => binLabel(low + bin * width, width, isWhole));
  const counts = new Map();
  for (const row of known) {
    const reason = samples.reasonOf(row);
    if (!counts.has(reason)) counts.set(reason, new Array(numBins).fill(0));
    counts.get(reason)[Math.min(numBins - 1, Math.floor((valueOf(row) - low) / width))]++;
  }
  return {
    animation: false,
    grid: { left: 44, right: 8, top: 10, bottom: 26 },
    tooltip: tooltip({ trigger: "axis", axisPointer: { type: "shadow" } }),
    xAxis: axis({ type: "category", data: labels, splitLine: { show: false } }),
    yAxis: axis({ type: "value", minInterval: 1, splitNumber: 3 }),
    series: samples.reasons.filter((reason) => counts.has(reason)).map((reason) => ({
      type: "bar", stack: "all", name: reason, barCategoryGap: "8%", color: theme.colours[reason], data: counts.get(reason),
    })),
  };
}

function binLabel(start, width, isWhole) {
  if (isWhole) return width === 1 ? String(start) : `${start}–${start + width - 1}`;
  return (start + width / 2).toFixed(2);
}

function reasonBars(samples) {
  const counts = samples.reasons.map(() => 0);
  for (const finish of samples.finish) counts[finish]++;
  const present = samples.reasons.filter((_, place) => counts[place]).reverse();
  return {
    animation: false,
    grid: { left: 62, right: 52, top: 10, bottom: 26 },
    tooltip: tooltip({ trigger: "item" }),
    xAxis: axis({ type: "value", minInterval: 1, splitNumber: 3 }),
    yAxis: axis({ type: "category", data: present, splitLine: { show: false } }),
    series: [{
      type: "bar", barMaxWidth: 26, cursor: "pointer", label: { show: true, position: "right", color: theme.colours.dim },
      data: present.map((reason) => ({
        value: counts[samples.reasons.indexOf(reason)], itemStyle: { color: theme.colours[reason] },
      })),
    }],
  };
}
