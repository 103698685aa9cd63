// Slots, rows in use and tokens per second on one axis of time.

const ALL_ROWS = 128; // all actors are shown at once when they have no more slots than this

class TimelineView {
  constructor(overview, samples, onSample) {
    Object.assign(this, { overview, samples });
    this.actor = null;
    this.colourBy = "group";
    this.fillActors();
    this.fillIncidents();
    this.fit();
    const { chart, draw } = startChart("timeline-chart", () => this.options());
    this.chart = chart;
    $("actor").addEventListener("change", () => {
      this.actor = $("actor").value === "" ? null : Number($("actor").value);
      this.fit();
      chart.resize();
      draw();
    });
    $("colour").addEventListener("change", () => {
      this.colourBy = $("colour").value;
      draw();
    });
    $("zoom-out").addEventListener("click", () => this.zoom(0, overview.seconds));
    chart.on("click", { seriesId: "slots" }, ({ data }) => {
      const [, group, sample] = overview.stays[data.value[4]];
      onSample(group, sample);
    });
  }

  fillActors() {
    const { actors } = this.overview;
    const numRows = actors.reduce((sum, actor) => sum + actor.num_slots, 0);
    const select = $("actor");
    if (numRows <= ALL_ROWS) select.append(new Option("all", ""));
    else this.actor = 0;
    actors.forEach((actor, number) => select.append(new Option(actor.name, number)));
    if (!this.samples.hasRewards) $("colour").querySelector("[value=reward]").remove();
  }

  fillIncidents() {
    const { incidents } = this.overview;
    $("incidents").hidden = !incidents.length;
    $("incidents").querySelector("summary").textContent =
      incidents.length + (incidents.length === 1 ? " incident" : " incidents");
    for (const [time, kind, text] of incidents) {
      const button = make("button");
      button.append(make("time", "", clock(time)), make("span", "", text));
      button.dataset.kind = kind;
      const reach = this.overview.seconds * 0.05;
      button.addEventListener("click", () => this.zoom(time - reach, time + reach));
      const item = make("li");
      item.append(button);
      $("incidents").querySelector("ol").append(item);
    }
  }

  /** Which actors are shown, and the row in which the slots of each begin. */
  bands() {
    const shown = this.overview.actors
      .map((actor, number) => ({ ...actor, number }))
      .filter(({ number }) => this.actor === null || this.actor === number);
    let first = 0;
    for (const band of shown) {
      band.first = first;
      first += band.num_slots + 0.6;
    }
    return { bands: shown, numRows: Math.max(1, first - 0.6) };
  }

  /** Make room for the slots of the actors that are shown. */
  fit() {
    const { numRows } = this.bands();
    this.slotsHeight = Math.round(Math.min(Math.max(numRows * 11, 120), 560));
    $("timeline-chart").style.height = this.slotsHeight + 318 + "px";
  }

  zoom(startValue, endValue) {
    this.chart.dispatchAction({ type: "dataZoom", dataZoomIndex: 0, startValue, endValue });
  }

  colourOf(stay) {
    const [, group, sample] = stay;
    if (this.colourBy === "group") return groupColour(group);
    const row = this.samples.rowOf(group, sample);
    if (row === undefined) return theme.colours.slots;
    if (this.colourBy === "finish") return theme.colours[this.samples.reasonOf(row)];
    const value = this.samples[this.colourBy][row];
    const [low, high] = (this.ranges ??= {})[this.colourBy] ??= range(this.samples[this.colourBy]);
    return value === null ? theme.colours.slots : shareColour(high > low ? (value - low) / (high - low) : 1);
  }

  /** One stay: prefill, decode, and a line to the slot that it was moved from. */
  drawStay(params, api) {
    const [start, end, row, ready] = [0, 1, 2, 3].map((place) => api.value(place));
    const from = api.value(5);
    const [left, top] = api.coord([start, row]);
    const [right, bottom] = api.coord([end, row + 1]);
    const middle = api.coord([ready, row])[0];
    const area = params.coordSys;
    const bar = (x, width, fill) => {
      const gap = width > 2 ? 0.7 : 0;
      const height = Math.max(bottom - top - (bottom - top > 4 ? 1 : 0), 1);
      const shape = echarts.graphic.clipRectByRect({ x, y: top, width: Math.max(width - gap, 0.5), height }, area);
      return shape && { type: "rect", shape, style: { fill } };
    };
    const parts = [bar(middle, right - middle, api.visual("color"))];
    if (middle > left) parts.push(bar(left, middle - left, theme.colours.prefill));
    if (from >= 0 && left >= area.x && left <= area.x + area.width) {
      const before = api.coord([start, from + 0.5])[1];
      const shape = { x1: left, y1: before, x2: left, y2: (top + bottom) / 2 };
      parts.push({ type: "line", shape, style: { stroke: theme.colours.ink, lineWidth: 1, lineDash: [3, 2] } });
    }
    return { type: "group", children: parts.filter(Boolean) };
  }

  /** Start, end, row, ready, number, and the row that it was moved from or -1. */
  staysOf(bands) {
    const firstRow = new Map(bands.map(({ number, first }) => [number, first]));
    const last = new Map(), data = [];
    this.overview.stays.forEach((stay, number) => {
      const [actor, group, sample, slot, start, ready, end] = stay;
      if (!firstRow.has(actor)) return;
      const row = firstRow.get(actor) + slot, name = `${group} ${sample}`;
      const before = last.get(name);
      const from = before && before.end === start && ready === start ? before.row : -1;
      last.set(name, { row, end });
      data.push({ value: [start, end, row, ready, number, from], itemStyle: { color: this.colourOf(stay) } });
    });
    return data;
  }

  describe([start, end, , ready, number]) {
    const [actor, group, sample, slot] = this.overview.stays[number];
    const row = this.samples.rowOf(group, sample);
    const lines = [`prompt ${group}, sample ${sample}`, `${this.overview.actors[actor].name}, slot ${slot}`];
    lines.push(`${clock(start)} to ${clock(end)}`);
    lines.push(ready > start ? `prefill ${clock(ready - start)}, decode ${clock(end - ready)}` : "went on here");
    if (row !== undefined) {
      lines.push(`${this.samples.length[row]} tokens, ${this.samples.reasonOf(row)}`);
      if (this.samples.reward[row] !== null) lines.push(`reward ${this.samples.reward[row]}`);
    }
    return lines.map(echarts.format.encodeHTML).join("<br>");
  }

  options() {
    const { overview } = this;
    const { bands, numRows } = this.bands();
    const colours = theme.colours;
    const tops = [4, this.slotsHeight + 50, this.slotsHeight + 166];
    const heights = [this.slotsHeight, 84, 84];
    const line = (place, dimension, name, color, more) => ({
      type: "line", name, xAxisIndex: place, yAxisIndex: place, showSymbol: false, color, animation: false,
      data: overview.points.map((point) => [point[0], point[dimension]]), ...more,
    });
    const severe = new Set(["lost", "memory", "failed"]);
    const marks = {
      silent: true, symbol: "none", animation: false, label: { show: false },
      data: overview.incidents.slice(0, 100).map(([xAxis, kind]) => ({
        xAxis, lineStyle: { color: severe.has(kind) ? colours.error : colours.accent, type: "solid", width: 1 },
      })),
    };
    return {
      animation: false,
      axisPointer: { link: [{ xAxisIndex: "all" }], lineStyle: { color: colours.dim } },
      tooltip: tooltip({ trigger: "item" }),
      title: ["rows in use, of all slots", "tokens/s"].map((text, place) => ({
        text, left: 62, top: tops[place + 1] - 20, padding: 0, textStyle: { color: colours.dim, fontSize: 12, fontWeight: "normal" },
      })),
      grid: tops.map((top, place) => ({
        top, height: heights[place], left: 62, right: 12,
        tooltip: tooltip({ show: true, trigger: place ? "axis" : "item" }),
      })),
      xAxis: tops.map((_, gridIndex) => axis({
        type: "value", gridIndex, min: 0, max: Math.max(overview.seconds, 0.1), splitLine: { show: false },
        axisLabel: { color: colours.dim, formatter: clock, show: gridIndex !== 1, hideOverlap: true },
        axisPointer: { show: gridIndex > 0, label: { formatter: ({ value }) => clock(value) } },
      })),
      yAxis: tops.map((_, gridIndex) => gridIndex
        ? axis({ type: "value", gridIndex, splitNumber: 2 })
        : axis({
            type: "value", gridIndex, inverse: true, min: 0, max: numRows, splitLine: { show: false },
            axisLabel: {
              color: colours.dim, width: 58, overflow: "truncate",
              customValues: bands.map(({ first, num_slots }) => first + num_slots / 2),
              formatter: (value) => bands.find(({ first, num_slots }) => first + num_slots / 2 === value)?.name ?? "",
            },
          })),
      dataZoom: [
        { type: "slider", xAxisIndex: [0, 1, 2], filterMode: "weakFilter", bottom: 6, height: 26, left: 62, right: 18,
          labelFormatter: clock, textStyle: { color: colours.dim }, brushSelect: true, borderColor: colours.line },
        { type: "inside", xAxisIndex: [0, 1, 2], filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false },
      ],
      series: [
        { id: "slots", name: "slots", type: "custom", data: this.staysOf(bands), encode: { x: [0, 1], y: 2 }, clip: true,
          renderItem: (params, api) => this.drawStay(params, api), markLine: marks, cursor: "pointer",
          progressive: 1500, progressiveThreshold: 4000,
          tooltip: { formatter: ({ data }) => this.describe(data.value) } },
        line(1, 1, "rows in use", colours.rows, { areaStyle: { opacity: 0.25 }, markLine: marks }),
        line(1, 2, "slots", colours.slots, { lineStyle: { type: "dashed", width: 1 }, step: "end" }),
        line(2, 3, "tokens/s", colours.rate, { areaStyle: { opacity: 0.2 }, markLine: marks }),
      ],
    };
  }
}

function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}
