// Light or dark: the system's choice until the button is pressed. Charts take their colours from CSS.

const theme = { isDark: false, listeners: [], colours: {} };

function setTheme(isDark) {
  theme.isDark = isDark;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  const styles = getComputedStyle(document.documentElement);
  const names = ["card", "ink", "dim", "line", "accent", "prefill", "rows", "rate", "slots", "lightness"];
  for (const name of [...names, "stop", "length", "aborted", "error", "failed"]) {
    theme.colours[name] = styles.getPropertyValue("--" + name).trim();
  }
  for (const listener of theme.listeners) listener();
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let isChosen = false;
  setTheme(system.matches);
  system.addEventListener("change", () => isChosen || setTheme(system.matches));
  $("theme").addEventListener("click", () => {
    isChosen = true;
    setTheme(!theme.isDark);
  });
}

/** A chart that is drawn by `options()`, again whenever the theme changes, and fits its element. */
function startChart(id, options) {
  const element = $(id), chart = echarts.init(element);
  const draw = () => chart.setOption(options());
  theme.listeners.push(draw);
  draw();
  new ResizeObserver(() => {
    if (chart.getWidth() !== element.clientWidth || chart.getHeight() !== element.clientHeight) chart.resize();
  }).observe(element);
  return { chart, draw };
}

function axis(more) {
  const { dim, line } = theme.colours;
  return {
    axisLine: { lineStyle: { color: line } },
    axisTick: { show: false },
    axisLabel: { color: dim, hideOverlap: true },
    splitLine: { lineStyle: { color: line } },
    ...more,
  };
}

function tooltip(more) {
  const { card, ink, line } = theme.colours;
  return { backgroundColor: card, borderColor: line, textStyle: { color: ink }, confine: true, ...more };
}

/** Colours far apart for neighbouring numbers. */
function groupColour(index) {
  return `hsl(${(index * 137.508) % 360}, 52%, ${theme.colours.lightness})`;
}

/** From poor (red) to good (green); `share` from 0 to 1. */
function shareColour(share) {
  return `hsl(${Math.round(share * 140)}, 55%, ${theme.colours.lightness})`;
}
